"""Operations, bytes and floors against counting them one by one, and against the published shapes."""

import pytest

from undertow.bench.attention import FORMS, TINY, Problem
from undertow.bench.ceilings import Ceilings
from undertow.bench.work import Work, entry_pairs, slots, window_pairs

REACHED = Ceilings(copy=4282e9, matmul=680e12, copied=0, side=0)


@pytest.mark.parametrize("lengths", [(1,), (7,), (128,), (300,), (129, 1, 64)])
def test_pairs_are_those_of_every_token(lengths):
    assert window_pairs(lengths, 128) == sum(min(t + 1, 128) for n in lengths for t in range(n))
    assert entry_pairs(lengths, 4) == sum((t + 1) // 4 for n in lengths for t in range(n))
    assert entry_pairs(lengths, 4, 9) == sum(min((t + 1) // 4, 9) for n in lengths for t in range(n))


def test_slots_are_those_that_published_tables_count():
    of = {name: slots((4096,), f.window, f.ratio, f.keep) / 4096 for name, f in FORMS.items()}
    assert of == {"swa": 128, "hca": 160, "csa": 640, "pro-csa": 1152}
    assert slots((8, 100), 16, 4, 10) == 8 * (16 + 2) + 100 * (16 + 10)


def test_mean_of_causal_keys_is_the_published_one():
    form = FORMS["csa"]
    pairs = window_pairs((4096,), form.window) + entry_pairs((4096,), form.ratio, form.keep)
    assert round(pairs / 4096) == 510


def test_floor_is_the_larger_of_both_bounds():
    assert Work(4282 * 10**6).floor(REACHED) == (pytest.approx(1.0), "memory")
    assert Work(8, exact=1.36e12, nominal=9e12).floor(REACHED) == (pytest.approx(2.0), "math")


def test_work_of_attention_counts_each_tensor_once(cpu):
    problem = Problem(TINY["csa"], (40, 21), cpu)
    forward, backward = problem.work()
    q, window, entries, sink = 61 * 4 * 32 * 2, 61 * 32 * 2, 15 * 32 * 2, 4 * 4
    inputs, output = q + window + entries + sink + 61 * 8 * 8, q + 61 * 4 * 4
    assert forward.bytes == inputs + output
    assert backward.bytes == inputs + output + q + q + window + entries + sink
    assert backward.exact == 2.5 * forward.exact and backward.nominal == 2.5 * forward.nominal
    assert forward.exact == 4 * 4 * 32 * (window_pairs((40, 21), 16) + entry_pairs((40, 21), 4, 8))
