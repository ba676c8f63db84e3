"""Sparse attention in Triton, forward and backward, for the three layer types.

How the kernels work is told in `docs/concepts/attention-kernels.md`. Forward and backward have one set of names:

Sizes that a kernel is compiled for

- `H`, `D`: heads of a token, numbers of a head.
- `NEW`, `OLD`, `WINDOW`: window rows of a block's own tokens (16); rows before the block that its tile holds, a power
  of two; tokens of the window.
- `NEAR`: entries that lie in a tile beside the window (32), 0 where there are none.
- `TOKENS`, `M`: tokens of a program; its rows, which are token x head. `ROWS`: rows that share what is written of
  entries.
- `SLOTS`, `K`: places of the entries that a token chose, a multiple of 128; numbers in a row of the selection.
- `BK`: keys taken at a time. `TILE`: the BK of the pass that wrote what this one reads. `BO`: rows of `OLD` at a
  time.
- `BD`, `BX`: numbers of a head taken at a time in a sum over all D; `BN`: those that a program or a step makes.
- `BH`, `BR`: rows, or parts, taken at a time in a sum over them.
- `STAGES`, `STAGES2`: of the first loop's pipeline and of the second's.

Arguments

- `q`, `do`, `o`, `dq`: `[tokens x heads, D]`. `old`, `new`, `near`, `keys`: the same window or entries in tiles of a
  shape; a second description of one (`_value`, `_for_dq`, `_for_keys`) is for another product.
- `start`, `tokens`: first token of the slab and how many it has; `call_tokens`: those of the call. `column`,
  `columns`: first entry that the slab sees, and how many columns it keeps.
- `begin`, `low`, `high`: what tokens see, see `geometry.Sight`. `bits`, `rows`, `counts`: what they chose, see
  `selection`.
- `p_old`, `p_new`, `p_near`, `p`, and the same with `ds`: probabilities and their slopes, times the scale, as
  spilled.
- `totals`, `shifts`: sums of a row of P over a tile, and the power of two it is against.
- `delta`, `sizes`, `ratios`: rowsum(o do), rowsum(o o), rowsum(do do) / rowsum(q q). `sums`: rowsum(P (dP - delta)) of
  a tile, lines `stride` apart; `rests`: of the window, then of all. `excess`, `flags`: see `rounding`. `sinks`: shares
  of the sink's gradient. `parts`: float32 gradients of keys, to be added in order.

Values

- `row`: first row of a program in q, which begins at the slab in the forward pass, at the call in the backward pass;
  `r0`: in what is spilled; `t0`: first token of its block; `n0`, `k0`, `c`: first entry, column of a slab, column of a
  head.
- `m`, `j`, `n`, `e`: rows, old rows, new rows or chosen entries, entries of a tile. `inside`: rows that are there.
- `a`, `g`: tiles of q and do. `s0`, `s1`, `s2`: scores, then P, of old, new and near keys; `d0`, ...: dP, then dS.
- `row_lse`, `row_delta`, `row_size`: one number a row, the first in base 2.
"""
