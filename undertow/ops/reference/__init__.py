"""Plain PyTorch definitions of every operator, one file a family: what each backend is tested against.

They accumulate in float32 (float64 for float64 inputs), keep memory linear in the number of tokens and save for
backward only what it needs. Functions that take `invariant` give each row the same bits whatever shares the call when
it is set.
"""
