from hypothesis import given
from hypothesis import strategies as st

from undertow.engine.runner import prefill_calls


def test_calls_of_a_ragged_batch():
    assert prefill_calls([5, 2, 1], chunk=2, budget=4) == [[2, 2, 0], [2, 0, 1], [1, 0, 0]]
    assert prefill_calls([3], chunk=512, budget=2048) == [[3]]


@given(st.lists(st.integers(1, 40), min_size=1, max_size=8), st.integers(1, 9), st.integers(0, 20))
def test_every_token_once_at_fixed_cuts_within_the_budget(lengths: list[int], chunk: int, spare: int):
    budget = chunk + spare
    done = [0] * len(lengths)
    for call in prefill_calls(lengths, chunk, budget):
        assert 0 < sum(call) <= budget
        for row, take in enumerate(call):
            assert done[row] % chunk == 0 or take == 0
            done[row] += take
    assert done == lengths
