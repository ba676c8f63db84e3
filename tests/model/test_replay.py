"""Stored routes: a second pass that rounds otherwise takes the first one's experts, however near the tie."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from tests.model.oracle import randomise
from tests.model.small import LENGTH, small_config, tokens
from undertow.model.transformer import Transformer, Trunk
from undertow.ops import Ops
from undertow.ops.segments import Segments

SEGMENTS = Segments.from_lengths([LENGTH, 29])


def build(invariant: bool = False) -> Transformer:
    """Experts come in pairs whose scores differ in the last bit or not at all."""
    model = Transformer(small_config(num_experts_per_tok=3), ops=Ops(batch_invariant=invariant))
    randomise(model, 3)
    with torch.no_grad():
        for block in model.layers:
            gate = block.ffn.gate
            gate.weight[1::2] = gate.weight[::2] * (1 + 3e-8 * torch.arange(48))
            if not gate.hashed:
                gate.bias[1::2] = gate.bias[::2]
    return model


def ids(model: Transformer) -> Tensor:
    return tokens(model.config, 1, SEGMENTS.tokens)[0]


def gradients(model: Transformer, trunk: Trunk) -> dict[str, Tensor]:
    model.zero_grad()
    logits = model.logits(model.collapse(trunk.streams))
    torch.nn.functional.cross_entropy(logits, ids(model).roll(-1)).backward()
    return {n: p.grad.clone() for n, p in model.named_parameters() if p.grad is not None}


def distance(got: dict[str, Tensor], wanted: dict[str, Tensor]) -> float:
    error = sum((got[name] - wanted[name]).double().square().sum() for name in wanted)
    return float((error / sum(g.double().square().sum() for g in wanted.values())).sqrt())


def indices(trunk: Trunk) -> list[Tensor]:
    return [route.indices for route in trunk.routes]


def test_near_ties_fall_otherwise_in_another_rounding():
    first, second = build(), build(invariant=True)
    one = first.trunk(ids(first), SEGMENTS)
    two = second.trunk(ids(second), SEGMENTS)
    assert any(not torch.equal(a, b) for a, b in zip(indices(one), indices(two), strict=True))
    assert distance(gradients(second, two), gradients(first, one)) > 1e-2


def test_replay_takes_the_stored_choice_and_gives_the_same_gradients():
    first, second = build(), build(invariant=True)
    one = first.trunk(ids(first), SEGMENTS)
    two = second.trunk(ids(second), SEGMENTS, replay=indices(one))
    assert all(torch.equal(a, b) for a, b in zip(indices(one), indices(two), strict=True))
    assert distance(gradients(second, two), gradients(first, one)) <= 1e-5


def test_replay_of_its_own_choice_changes_no_bit():
    model = build()
    one = model.trunk(ids(model), SEGMENTS)
    two = model.trunk(ids(model), SEGMENTS, replay=indices(one))
    assert torch.equal(one.streams, two.streams)
    wanted, got = gradients(model, one), gradients(model, two)
    assert [name for name in wanted if not torch.equal(wanted[name], got[name])] == []


@pytest.mark.parametrize("layer", [0, 1])
@torch.no_grad()
def test_weights_of_a_forced_choice_follow_todays_scores(layer):
    model = build()
    gate = model.layers[layer].ffn.gate
    x = torch.randn(7, 48, generator=torch.Generator().manual_seed(0))
    forced = torch.arange(14).view(7, 2) % 8
    free, made = gate(x, ids(model)[:7]), gate(x, ids(model)[:7], forced)
    assert torch.equal(made.indices, forced) and torch.equal(made.scores, free.scores)
    picked = free.scores.gather(1, forced)
    torch.testing.assert_close(made.weights, 1.5 * picked / picked.sum(1, keepdim=True))
