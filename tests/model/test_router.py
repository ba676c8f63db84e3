"""Choices that load all experts alike."""

import pytest
import torch

from undertow.config.model import ModelConfig
from undertow.model.build import build_model
from undertow.model.router import uniform_choices
from undertow.ops.segments import Segments


@pytest.mark.parametrize(("tokens", "k", "experts"), [(12, 2, 8), (5, 6, 7), (0, 2, 8), (1, 1, 4)])
def test_uniform_choices_load_every_expert_alike(tokens, k, experts):
    chosen = uniform_choices(tokens, k, experts)
    load = torch.bincount(chosen.flatten(), minlength=experts)
    assert chosen.shape == (tokens, k) and load.max() - load.min() <= 1
    assert all(len(set(row)) == k for row in chosen.tolist())


def test_uniform_routers_take_them_in_every_layer():
    model = build_model(ModelConfig.from_preset("v4-debug"), seed=1)
    config, ids = model.config, torch.arange(20)
    for block in model.layers:
        block.ffn.gate.uniform = True
    routes = model.trunk(ids, Segments.from_lengths([13, 7])).routes
    expected = uniform_choices(20, config.num_experts_per_tok, config.n_routed_experts)
    assert len(routes) == config.num_hidden_layers
    for routing in routes:
        assert torch.equal(routing.indices, expected)
        picked = routing.scores.gather(1, expected)
        assert torch.allclose(routing.weights, config.routed_scaling_factor * picked / picked.sum(1, keepdim=True))
