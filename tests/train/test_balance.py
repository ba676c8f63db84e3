"""Balance of experts against sums written out, and the direction in which router biases move."""

import numpy as np
import pytest
import torch

from tests.model.small import small_config, stirred
from undertow.model.router import Routing
from undertow.train.balance import balance_loss, expert_counts, routers, update_biases

EXPERTS, CHOSEN = 8, 2


def routing(tokens: int, seed: int = 0, dtype: torch.dtype = torch.float64) -> Routing:
    generator = torch.Generator().manual_seed(seed)
    scores = torch.rand(tokens, EXPERTS, generator=generator, dtype=dtype).requires_grad_()
    # Not the best scores: a bias has moved the choice.
    indices = torch.rand(tokens, EXPERTS, generator=generator).topk(CHOSEN).indices
    return Routing(indices, scores.gather(1, indices), scores)


def written_out(given: Routing, sequence: torch.Tensor) -> float:
    total = 0.0
    for number in sequence.unique().tolist():
        mine = [t for t, owner in enumerate(sequence.tolist()) if owner == number]
        for expert in range(EXPERTS):
            hits = sum(expert in given.indices[t].tolist() for t in mine)
            f = EXPERTS / (CHOSEN * len(mine)) * hits
            p = np.mean([float(given.scores[t, expert] / given.scores[t].sum()) for t in mine])
            total += f * p
    return total


@pytest.mark.parametrize("lengths", [(7,), (5, 1, 9)])
def test_equals_the_formula_written_out_per_sequence(lengths):
    sequence = torch.repeat_interleave(torch.arange(len(lengths)), torch.tensor(lengths))
    given = routing(sum(lengths))
    assert balance_loss(given, sequence, len(lengths)).item() == pytest.approx(written_out(given, sequence), rel=1e-12)


def test_a_balanced_sequence_gives_one_and_a_collapsed_one_the_most():
    even = torch.arange(EXPERTS).view(-1, CHOSEN)
    flat = torch.ones(len(even), EXPERTS)
    one = torch.zeros(len(even), dtype=torch.int64)
    assert float(balance_loss(Routing(even, flat, flat), one, 1)) == pytest.approx(1.0, rel=1e-6)
    peaked = torch.zeros(4, EXPERTS).index_fill(1, torch.tensor([0, 1]), 1.0)
    same = torch.tensor([[0, 1]]).expand(4, 2)
    assert float(balance_loss(Routing(same, peaked, peaked), one, 1)) == pytest.approx(EXPERTS / CHOSEN)


def test_gradient_is_that_of_the_shares_with_the_choice_held():
    sequence = torch.tensor([0] * 6 + [1] * 3)
    given = routing(9)
    (found,) = torch.autograd.grad(balance_loss(given, sequence, 2), given.scores)
    eps = 1e-6
    for t, e in ((0, 0), (4, 7), (8, 3)):
        moved = []
        for sign in (1, -1):
            scores = given.scores.detach().clone()
            scores[t, e] += sign * eps
            moved.append(float(balance_loss(Routing(given.indices, given.weights, scores), sequence, 2)))
        assert float(found[t, e]) == pytest.approx((moved[0] - moved[1]) / (2 * eps), rel=1e-5, abs=1e-9)


def test_counts_are_those_of_the_choice():
    counts = expert_counts([routing(50), routing(30, seed=1)], 8)
    assert counts.shape == (2, EXPERTS) and counts.sum(1).tolist() == [50 * CHOSEN, 30 * CHOSEN]


def test_biases_move_by_the_rate_against_the_load_and_hash_layers_have_none():
    model = stirred(small_config())
    every = routers(model)
    assert [router.hashed for router in every] == [True, False, False, False]  # three layers and the MTP block
    before = [None if router.hashed else router.bias.clone() for router in every]
    counts = torch.tensor([[9, 3, 6, 6, 6, 6, 6, 6]] * 4)
    update_biases(model, counts, 0.01)
    wanted = 0.01 * torch.tensor([-1.0, 1.0, 0, 0, 0, 0, 0, 0])
    for router, old in zip(every, before, strict=True):
        if old is not None:
            torch.testing.assert_close(router.bias - old, wanted, rtol=0, atol=1e-8)


def test_without_counts_of_the_mtp_block_its_bias_rests():
    model = stirred(small_config())
    rested = routers(model)[-1].bias.clone()
    update_biases(model, torch.tensor([[9, 3, 6, 6, 6, 6, 6, 6]] * 3), 0.01)
    assert torch.equal(routers(model)[-1].bias, rested)
