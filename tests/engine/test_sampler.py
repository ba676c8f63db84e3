import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from undertow.config.errors import UndertowError
from undertow.engine.draws import Draws
from undertow.engine.sampler import sample
from undertow.engine.sampling import SamplingParams

GRID = 4000


def histogram(logits: list[float], **params: object) -> list[float]:
    """Share of the unit interval that each token owns, by drawing at the middle of `GRID` equal cells."""
    uniforms = [(i + 0.5) / GRID for i in range(GRID)]
    rows = torch.tensor(logits).expand(GRID, -1)
    ids = sample(rows, [SamplingParams(**params)] * GRID, uniforms).ids  # type: ignore[arg-type]
    return (torch.bincount(ids, minlength=len(logits)) / GRID).tolist()


def test_greedy_takes_the_lowest_index_on_ties():
    logits = torch.tensor([[0.0, 2.0, 2.0, 1.0], [5.0, 5.0, 5.0, 5.0], [-1.0, -3.0, -2.0, -1.0]])
    assert sample(logits, [SamplingParams(temperature=0)] * 3, [0.9] * 3).ids.tolist() == [1, 0, 0]


@pytest.mark.parametrize("temperature", [0.5, 1.0, 2.0])
def test_the_share_of_a_token_is_its_softmax(temperature: float):
    logits = [0.3, -1.0, 2.0, 0.3, 1.5]
    wanted = (torch.tensor(logits, dtype=torch.float64) / temperature).softmax(-1).tolist()
    assert histogram(logits, temperature=temperature) == pytest.approx(wanted, abs=1 / GRID)


def test_chi_square_of_seeded_draws():
    logits, n = torch.tensor([1.0, 0.0, -1.0, 0.5]), 4000
    uniforms = [Draws(11).uniform(i) for i in range(n)]
    counts = torch.bincount(sample(logits.expand(n, -1), [SamplingParams()] * n, uniforms).ids, minlength=4)
    wanted = logits.double().softmax(-1) * n
    # 3 degrees of freedom: 16.3 is passed once in a thousand.
    assert ((counts - wanted) ** 2 / wanted).sum().item() < 16.3


def test_top_k_is_exact_and_keeps_the_lowest_index_of_a_tie():
    logits = [1.0, 3.0, 1.0, 2.0, 1.0]
    e = [math.exp(v) for v in logits]
    kept = e[1] + e[3] + e[0]
    wanted = [e[0] / kept, e[1] / kept, 0, e[3] / kept, 0]
    assert histogram(logits, top_k=3) == pytest.approx(wanted, abs=1 / GRID)
    assert histogram(logits, top_k=1) == [0, 1, 0, 0, 0]
    assert histogram(logits, top_k=99) == histogram(logits)


def test_top_p_keeps_the_smallest_prefix_that_reaches_p():
    four = [0.0, 0.0, 0.0, 0.0]
    assert histogram(four, top_p=0.5) == [0.5, 0.5, 0, 0]
    assert histogram(four, top_p=0.5000001) == pytest.approx([1 / 3, 1 / 3, 1 / 3, 0], abs=1 / GRID)
    assert histogram(four, top_p=1e-9) == [1, 0, 0, 0]
    shares = [0.15, 0.5, 0.05, 0.3]
    logits = [math.log(s) for s in shares]
    assert histogram(logits, top_p=0.79) == pytest.approx([0, 0.5 / 0.8, 0, 0.3 / 0.8], abs=1 / GRID)
    assert histogram(logits, top_p=0.81) == pytest.approx([0.15 / 0.95, 0.5 / 0.95, 0, 0.3 / 0.95], abs=1 / GRID)


def test_top_p_acts_on_what_top_k_leaves():
    # Of the two kept, the first holds 0.5 / 0.8 = 0.625 of the mass.
    logits = [math.log(s) for s in (0.5, 0.3, 0.2)]
    assert histogram(logits, top_k=2, top_p=0.6) == [1, 0, 0]
    assert histogram(logits, top_p=0.6) == pytest.approx([0.625, 0.375, 0], abs=1 / GRID)


def test_temperature_and_top_p_act_in_that_order():
    logits = [math.log(s) for s in (0.5, 0.3, 0.2)]
    assert histogram(logits, temperature=0.1, top_p=0.9) == [1, 0, 0]


def test_logprobs_are_the_models_own_whatever_the_filters():
    logits = torch.randn(4, 50, generator=torch.Generator().manual_seed(0)) * 3
    params = [
        SamplingParams(temperature=0),
        SamplingParams(),
        SamplingParams(top_k=1),
        SamplingParams(temperature=3.0, top_p=0.1),
    ]
    sampled = sample(logits, params, [0.2, 0.5, 0.7, 0.999])
    wanted = logits.double().log_softmax(-1).gather(-1, sampled.ids[:, None]).squeeze(-1)
    torch.testing.assert_close(sampled.logprobs, wanted, rtol=0, atol=1e-11)


@pytest.mark.parametrize("bad", [math.nan, math.inf, -math.inf])
@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_nothing_is_sampled_from_logits_that_are_not_finite(bad: float, temperature: float):
    logits = torch.zeros(3, 8)
    logits[1, 5] = bad
    with pytest.raises(UndertowError, match=r"not finite \(row 1: 1 of 8\)"):
        sample(logits, [SamplingParams(temperature=temperature)] * 3, [0.5] * 3)


def test_the_ends_of_the_interval_and_far_tails_are_safe():
    top = 1 - 2.0**-53
    logits = torch.tensor([[0.0, -1e30, -1e30], [-3e38, 3e38, -3e38], [-80.0, 0.0, -80.0]])
    for uniform in (0.0, top):
        assert sample(logits, [SamplingParams()] * 3, [uniform] * 3).ids.tolist() == [0, 1, 1]
    for vocabulary in (3, 7, 1000, 4097, 65537, 129280):
        flat = torch.zeros(1, vocabulary)
        assert sample(flat, [SamplingParams()], [top]).ids.item() == vocabulary - 1
        assert sample(flat, [SamplingParams(top_k=2)], [top]).ids.item() == 1
    wide = torch.zeros(1, 129280)
    assert sample(wide, [SamplingParams(temperature=1e300)], [0.0]).ids.item() == 0
    assert sample(torch.tensor([[1.0, 2.0]]), [SamplingParams(temperature=5e-324)], [0.0]).ids.item() == 1


params_strategy = st.builds(
    SamplingParams,
    temperature=st.sampled_from([0.0, 0.3, 1.0, 1.7]),
    top_k=st.sampled_from([0, 1, 5, 40]),
    top_p=st.sampled_from([0.1, 0.6, 0.95, 1.0]),
    seed=st.integers(0, 2**64 - 1),
)


@settings(max_examples=60, deadline=None)
@given(st.lists(params_strategy, min_size=1, max_size=9), st.randoms(use_true_random=False), st.integers(0, 50))
def test_a_request_draws_the_same_alone_and_in_any_company(params: list[SamplingParams], rng, index: int):
    logits = torch.randn(len(params), 61, generator=torch.Generator().manual_seed(rng.randrange(2**32))) * 2
    uniforms = [Draws.of(p.seed).uniform(index) for p in params]
    order = rng.sample(range(len(params)), len(params))
    together = sample(logits[order], [params[i] for i in order], [uniforms[i] for i in order])
    for place, i in enumerate(order):
        alone = sample(logits[i : i + 1], [params[i]], [uniforms[i]])
        assert alone.ids.item() == together.ids[place].item()
        assert alone.logprobs.item() == together.logprobs[place].item()
