"""Closed forms of parameter counts against the module tree and the optimizer's own division of it."""

from __future__ import annotations

import subprocess
import sys

import pytest
import torch

from undertow.config.model import ModelConfig
from undertow.model.count import count
from undertow.model.parameters import all_parameters, buffer_bytes, indexer_parameters, layer_parameters
from undertow.model.transformer import Transformer
from undertow.optim.groups import split

CASES = [("v4-flash", {}), ("v4-pro", {}), ("v4-flash", {"indexer": "own_rank"}), ("v4-small", {}), ("v4-debug", {})]


@pytest.mark.parametrize(("preset", "changes"), CASES)
def test_module_tree(preset, changes):
    config = ModelConfig.from_preset(preset, **changes)
    model = Transformer(config, device="meta", dtype=torch.bfloat16)
    parameters = list(model.parameters())
    low = [p for p in parameters if p.dtype == torch.bfloat16]
    muon = [entry.parameter for entry in split(model).muon]
    assert all_parameters(config) == (
        sum(p.numel() for p in low),
        sum(p.numel() for p in parameters) - sum(p.numel() for p in low),
        sum(p.numel() for p in muon if p.dtype == torch.bfloat16),
        sum(p.numel() for p in muon if p.dtype == torch.float32),
        max(p.numel() for p in parameters),
    )
    assert buffer_bytes(config) == sum(b.numel() * b.element_size() for b in model.buffers())


@pytest.mark.parametrize("layer", range(6))
def test_each_layer(layer):
    config = ModelConfig.from_preset("v4-debug")
    model = Transformer(config, device="meta")
    module = model.layers[layer] if layer < 5 else model.mtp[0]
    found = layer_parameters(config, layer)
    assert found.low + found.high == sum(p.numel() for p in module.parameters())


def test_indexer():
    config = ModelConfig.from_preset("v4-flash")
    found = indexer_parameters(config)
    assert 21 * (found.low + found.high) == count(config).by_module["indexers"]


def test_import_loads_no_torch():
    probe = "import sys, undertow.model.parameters; assert 'torch' not in sys.modules"
    done = subprocess.run([sys.executable, "-c", probe], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
