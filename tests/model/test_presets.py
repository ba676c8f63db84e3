"""Every preset uses every branch at the length it is made for, and has the size it promises."""

from __future__ import annotations

import pytest
import torch

from tests.model.small import tokens
from undertow.config.model import ModelConfig
from undertow.config.presets import PRESETS
from undertow.model.branches import active_branches
from undertow.model.build import build_model
from undertow.model.count import count

# Tokens of the documents that a preset is for.
LENGTHS = {"v4-flash": 4096, "v4-pro": 8192, "v4-proxy": 4096, "v4-small": 2048, "v4-tiny": 512, "v4-debug": 64}


def test_every_preset_has_its_length():
    assert LENGTHS.keys() == PRESETS.keys()


@pytest.mark.parametrize("name", LENGTHS)
def test_every_branch_is_active(name):
    config = ModelConfig.from_preset(name)
    branches = active_branches(config, LENGTHS[name])
    assert [branch for branch, active in branches.items() if not active] == []
    assert LENGTHS[name] <= config.max_position_embeddings


@pytest.mark.parametrize(("name", "first"), [("v4-flash", 2052), ("v4-pro", 4100), ("v4-tiny", 132), ("v4-debug", 16)])
def test_selection_begins_with_the_first_entry_too_many(name, first):
    config = ModelConfig.from_preset(name)
    assert active_branches(config, first)["selection"]
    assert not active_branches(config, first - 1)["selection"]


def test_branches_that_a_configuration_lacks():
    plain = ModelConfig.from_preset(
        "v4-debug", num_hidden_layers=2, compress_ratios=(8, 8), num_nextn_predict_layers=0, num_hash_layers=2
    )
    active = {name for name, on in active_branches(plain, 64).items() if on}
    assert active == {"window evicts", "hca entries", "hash routing"}
    debug = ModelConfig.from_preset("v4-debug")
    assert not active_branches(debug, 8)["window evicts"] and active_branches(debug, 9)["window evicts"]
    assert not active_branches(debug, 7)["csa overlaps"] and active_branches(debug, 8)["csa overlaps"]
    assert not active_branches(debug, 7)["hca entries"] and active_branches(debug, 8)["hca entries"]
    assert not active_branches(debug, 1)["mtp"]


@pytest.mark.parametrize(("name", "length"), [("v4-tiny", 512), ("v4-debug", 64), ("v4-debug", 15), ("v4-debug", 7)])
@torch.no_grad()
def test_branches_are_what_the_model_does(name, length):
    config = ModelConfig.from_preset(name)
    model = build_model(config)
    entries, chose, routed = {}, set(), set()
    for layer, block in enumerate(model.layers):
        routed.add(block.ffn.gate.hashed)
        if block.attn.kind != "swa":
            block.attn.compressor.register_forward_hook(
                lambda _, __, out, layer=layer: entries.update({layer: len(out)})
            )
        if block.attn.kind == "csa":
            block.attn.indexer.register_forward_hook(lambda *_, layer=layer: chose.add(layer))
    model(tokens(config, 1, length), return_mtp=True)
    branches = active_branches(config, length)
    kinds = {layer: config.kind(layer) for layer in entries}
    assert branches["csa entries"] == any(n for layer, n in entries.items() if kinds[layer] == "csa")
    assert branches["hca entries"] == any(n for layer, n in entries.items() if kinds[layer] == "hca")
    assert chose == ({layer for layer, kind in kinds.items() if kind == "csa"} if branches["selection"] else set())
    assert (branches["hash routing"], branches["learned routing"]) == (True in routed, False in routed)


def test_sizes():
    totals = {name: count(ModelConfig.from_preset(name)).total for name in PRESETS}
    assert totals["v4-proxy"] == 6_769_694_830  # 6.77 B
    assert 100e6 <= totals["v4-small"] <= 150e6
    assert 1e6 <= totals["v4-tiny"] <= 2e6


@pytest.mark.parametrize("name", ["v4-flash", "v4-pro"])
def test_released_schedules(name):
    config = ModelConfig.from_preset(name)
    kinds = [config.kind(layer) for layer in range(config.num_hidden_layers)]
    wanted = {"v4-flash": (2, 21, 20), "v4-pro": (0, 30, 31)}[name]
    assert tuple(kinds.count(kind) for kind in ("swa", "csa", "hca")) == wanted
    assert config.kind(config.num_hidden_layers) == "swa"
