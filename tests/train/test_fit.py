"""What one of several ranks holds throughout, and the refusal of more than there is."""

from __future__ import annotations

import pytest
import torch

from undertow.config.errors import DoesNotFit
from undertow.config.resolve import resolve
from undertow.config.world import World
from undertow.model.parameters import all_parameters, buffer_bytes, sum_weights
from undertow.model.weights import all_weights
from undertow.train import fit
from undertow.train.fit import check_fit, lasting_bytes

WORDS = ("model=v4-debug", "device=cpu", "train.optimizer=adamw")


def config_of(*words):
    return resolve(None, [*WORDS, *words], {}).config


def test_weights_and_state_are_shared_but_for_what_stays_float32():
    """AdamW beside float32 weights: 12 bytes a number."""
    model = config_of().model
    p, buffers = all_parameters(model), buffer_bytes(model)
    experts = sum_weights(weight for weight in all_weights(model) if weight.split == "experts").total
    dense = p.low - experts

    def lasting(ranks, *words, gpu=False):
        return lasting_bytes(config_of(*words), ranks, gpu) - buffers

    assert lasting(2, "parallel.shard=1") == 12 * p.total
    assert lasting(2, "parallel.shard=1", "parallel.expert=2") == 12 * (p.total - experts // 2)
    assert lasting(2) == 12 * (p.low // 2 + p.high)
    assert lasting(4, "parallel.shard=2") == 12 * (dense // 2 + experts // 4 + p.high)
    assert lasting(2, "train.offload_optimizer=true", gpu=True) == 4 * (p.low // 2 + p.high)
    assert lasting_bytes(config_of("parallel.pipeline=2"), 2, False) == (12 * p.total + buffers) // 2


def test_ranks_of_a_machine_share_its_memory(monkeypatch):
    config, world = config_of(), World(0, 4, 0, 2)
    least = 2 * lasting_bytes(config, 4, False)
    monkeypatch.setattr(fit, "memory_of", lambda device: least)
    assert check_fit(config, torch.device("cpu"), world) is None
    monkeypatch.setattr(fit, "memory_of", lambda device: least - 2)
    with pytest.raises(DoesNotFit, match=r"^weights and optimizer state take 0\.0 GiB, a rank, cpu, has 0\.0 GiB: "):
        check_fit(config, torch.device("cpu"), world)
