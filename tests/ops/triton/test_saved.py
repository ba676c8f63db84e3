"""What a model keeps for its backward pass with the kernels on: the closed form against autograd's own count."""

from __future__ import annotations

import pytest
import torch

from tests.model.saved import packed, saved_by_hooks
from undertow.config.model import ModelConfig
from undertow.model.activations import Objective, Pass, layer_terms, saved_terms
from undertow.model.build import build_model
from undertow.ops import Ops, registry
from undertow.train.objective import Weights, objective

ATTENDED = {"num_attention_heads": 8, "head_dim": 64, "index_n_heads": 16, "index_head_dim": 16}
EVERYTHING = Weights(mtp=0.3, balance=1e-4, z=1e-4, indexer=1.0)
FEW = {"num_hidden_layers": 2, "num_hash_layers": 1, "compress_ratios": (8, 4, 0), "index_topk": 2}
# The interpreter takes minutes for what a GPU does in a moment.
CASES = {
    "everything, few layers": (FEW, [[17]], EVERYTHING),
    "everything": ({}, [[64]], EVERYTHING),
    "packed, next token alone": ({"compress_ratios": (0, 4, 8, 0, 0, 0)}, [[33, 7, 23]], Weights()),
    "no selection, more entries than a tile": ({"index_topk": 64}, [[150]], Weights(indexer=1.0)),
}

PARTS = ("mixer_norm", "query", "attention_core", "output", "moe")


@pytest.fixture
def anywhere(device, monkeypatch):
    """Kernels are chosen off a GPU too, for the interpreter."""
    if device == "cpu":
        monkeypatch.setattr(registry, "machine", lambda device: registry.Machine("cuda", "sm_90"))
    return device


@pytest.mark.parametrize("again", [(), PARTS], ids=["", "modules again"])
@pytest.mark.parametrize("case", [c if "few" in c else pytest.param(c, marks=pytest.mark.gpu) for c in CASES])
def test_kept_by_a_model(case, again, anywhere):
    changes, rows, weights = CASES[case]
    depth = changes.get("num_hidden_layers", 5)
    recompute = frozenset((layer, module) for layer in range(depth) for module in again)
    config = ModelConfig.from_preset("v4-debug", **ATTENDED, **changes)
    ops = Ops(device=anywhere)
    model = build_model(config, dtype=torch.bfloat16, device=anywhere, ops=ops)
    batch = packed(config, rows, anywhere)
    found = saved_by_hooks(model, lambda: objective(model, batch, weights, recompute=recompute))
    served = {op for op, takers in ops.calls.taken.items() if takers.get("triton")}
    assert {"hyper_in", "hyper_head", "head_norm_rotary", "sparse_attention", "compress_pool"} <= served
    assert "linear_cross_entropy_mean" in served
    wanted = Objective(weights.mtp > 0, weights.indexer > 0, len(rows) if weights.balance else 0, recompute)
    documents = [length for row in rows for length in row]
    terms = saved_terms(config, documents, "bfloat16", wanted, kernels=True)
    assert sum(term.bytes for term in terms) == pytest.approx(found, rel=0.002)


def test_units_of_a_released_layer():
    """One row of 4,096 tokens of v4-flash, in units of one bfloat16 tensor `[T, d]`, without distillation."""
    config = ModelConfig.from_preset("v4-flash")
    p, unit = Pass(config, (4096,), "bfloat16", kernels=True), 4096 * 4096 * 2
    layers = {"swa": 43, "csa": 4, "hca": 3}
    told = {k: sum(t.bytes for t in layer_terms(p, n, Objective(distil=False))) / unit for k, n in layers.items()}
    assert {kind: round(units, 1) for kind, units in told.items()} == {"swa": 47.5, "csa": 56.7, "hca": 48.0}
