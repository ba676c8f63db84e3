"""Logits, gradients and incremental decode equal those of transformers' DeepSeek-V4 on random models of every kind."""

from __future__ import annotations

import random

import pytest
import torch

from tests.model.cases import Plan, draw, logit_error, plan, rounding
from tests.model.oracle import gradients, random_shape, worst_gradient

LOGITS = 2e-5
GRADIENTS = 1e-5
FLOOR = 1e-7

CASES = [*map(plan, range(64)), *(plan(number, divisible=True) for number in range(8))]
SHARES = 8


def check(cases: list[Plan]) -> dict[str, float]:
    """Assert both errors of every case; returns the worst of them and the draws repeated.

    A draw for which transformers' own float32 is off by half the tolerance decides nothing: it is repeated too.
    """
    worst = {"logits": 0.0, "gradient": 0.0, "redraws": 0, "ill-conditioned": 0}
    for case in cases:
        attempt = 0
        while True:
            models, ids, attempt = draw(case, attempt)
            theirs, their_gradients = gradients(models.theirs, ids)
            ours, our_gradients = gradients(models.ours, ids)
            error = logit_error(ours, theirs)
            slope, name = worst_gradient(our_gradients, their_gradients, FLOOR)
            if error <= LOGITS and slope <= GRADIENTS:
                break
            own_error, own_slope = rounding(models.theirs, ids, FLOOR)
            assert error <= LOGITS or own_error > LOGITS / 2, (error, case)
            assert slope <= GRADIENTS or own_slope > GRADIENTS / 2, (slope, name, case)
            worst["ill-conditioned"] += 1
            attempt += 1
        worst["logits"], worst["gradient"] = max(worst["logits"], error), max(worst["gradient"], slope)
        worst["redraws"] += attempt
    return worst


def test_cases_cover_every_branch_and_length():
    kinds = [set(case.shape["kinds"]) for case in CASES]
    assert all(sum(kind in present for present in kinds) >= 24 for kind in (0, 1, 2))
    assert sum(case.shape["num_hash_layers"] > 0 for case in CASES) >= 24
    assert sum(case.shape["num_hash_layers"] < case.shape["num_hidden_layers"] for case in CASES) >= 24
    assert all(case.shape["index_n_heads"] >= 16 for case in CASES)
    assert {case.shape["csa_ratio"] for case in CASES} == {2, 3, 4}
    assert {case.shape["hca_ratio"] for case in CASES} == {5, 8, 16, 32}
    assert {case.shape["hc_mult"] for case in CASES} == {2, 4}
    lengths = [case.length for case in CASES]
    assert {1, 2, 3} <= set(lengths) and max(lengths) >= 299
    assert sum(bool(case.length % case.ratios[0]) and bool(case.length % case.ratios[1]) for case in CASES) >= 60
    csa = [case for case in CASES if 1 in case.shape["kinds"]]
    assert sum(case.length // case.ratios[0] > case.shape["index_topk"] for case in csa) >= 24
    assert any(case.length < case.ratios[0] for case in csa)
    assert any(case.length < case.ratios[1] for case in CASES if 2 in case.shape["kinds"])
    assert sum(case.length > case.shape["sliding_window"] for case in CASES) >= 48


@pytest.mark.parametrize("share", range(SHARES))
def test_logits_and_gradients(share):
    cases = CASES[share::SHARES]
    worst = check(cases)
    assert worst["redraws"] < len(cases)
    assert worst["ill-conditioned"] <= len(cases) // 6


@pytest.mark.slow
@pytest.mark.parametrize("share", range(10))
def test_logits_and_gradients_of_many(share):
    cases = [plan(number) for number in range(64 + share, 364, 10)]
    worst = check(cases)
    assert worst["redraws"] < len(cases)
    assert worst["ill-conditioned"] <= len(cases) // 6


def decode_case(released_ratios: bool) -> Plan:
    """All layer kinds, with the released ratios and window or with small odd ones, so that chunks cut groups."""
    shape = random_shape(random.Random(11))
    shape |= dict(kinds=[0, 1, 2], num_hidden_layers=3, num_hash_layers=1)
    if released_ratios:
        return Plan(2000, shape | dict(csa_ratio=4, hca_ratio=128, sliding_window=128, index_topk=6), 1, 263)
    return Plan(2001, shape | dict(csa_ratio=3, hca_ratio=5, sliding_window=4, index_topk=3), 2, 71)


@pytest.fixture(scope="module", params=[True, False], ids=["released ratios", "small ratios"])
def decoded(request):
    models, ids, _ = draw(decode_case(request.param))
    with torch.no_grad():
        return models.ours, ids, models.theirs(ids).logits


@pytest.mark.parametrize("chunk", [1, 3, 4, 5, 127, 128, 129])
@torch.no_grad()
def test_incremental_decode_matches_their_whole_forward(decoded, chunk):
    ours, ids, theirs = decoded
    cache = ours.new_cache(len(ids))
    logits = torch.cat([ours(part, cache=cache) for part in ids.split(chunk, dim=1)], 1)
    assert cache.lengths == (ids.shape[1],) * len(ids)
    assert logit_error(logits, theirs) <= LOGITS
