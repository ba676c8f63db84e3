"""The closed form of a step's peak against the storages that are alive while a step runs."""

from __future__ import annotations

import subprocess
import sys

import pytest
import torch

from tests.model.saved import LiveBytes, packed
from undertow.config.model import ModelConfig
from undertow.config.training import TrainConfig
from undertow.model.activations import Objective
from undertow.model.build import build_model
from undertow.model.modules import Again
from undertow.model.parameters import Parameters
from undertow.model.peak import State, peak_bytes
from undertow.optim.build import build_optimizer
from undertow.train.objective import Weights, objective

WEIGHTS = Weights(mtp=0.3, balance=1e-4, indexer=1.0)
TWO = {"num_hidden_layers": 2, "compress_ratios": (0, 4, 0)}
THREE = {"num_hidden_layers": 3, "compress_ratios": (0, 4, 8, 0)}
WIDE_EXPERTS = TWO | {"hidden_size": 64, "moe_intermediate_size": 300, "num_experts_per_tok": 4}
WIDE_HEADS = THREE | {"num_attention_heads": 8, "head_dim": 64, "moe_intermediate_size": 24}

NO_MTP = {"num_nextn_predict_layers": 0}
WIDE_LAST = WIDE_EXPERTS | NO_MTP | {"compress_ratios": (0, 4)}
WIDE_HEADS_LAST = WIDE_HEADS | NO_MTP | {"compress_ratios": (0, 4, 8)}
PARTS = tuple((layer, module) for module in ("moe", "query") for layer in (0, 1))
PARTS += tuple((layer, module) for module in ("query", "attention_core", "output") for layer in (0, 1, 2))


def measured(
    config: ModelConfig, rows: list[list[int]], state: State, recompute: tuple[Again, ...], passes: int
) -> int:
    """Most bytes alive in the second step of a run; the first is short."""
    model = build_model(config, dtype=getattr(torch, state.dtype))
    if state.profile == "fp32":
        for parameter in model.parameters():
            parameter.grad_dtype = torch.float32
    optimizer = build_optimizer(model, TrainConfig(state_profile=state.profile, optimizer=state.optimizer))
    short, whole = packed(config, [[9]]), packed(config, rows)
    tensors = (*model.parameters(), *model.buffers(), whole.ids, whole.labels, whole.mtp_labels, whole.sequence)
    with LiveBytes(tensors) as meter:
        for batch, times in ((short, 1), (whole, passes)):
            meter.peak = 0
            optimizer.zero_grad(set_to_none=True)
            for _ in range(times):
                objective(model, batch, WEIGHTS, recompute=recompute).total.backward()
            optimizer.step()
    return meter.peak


@pytest.mark.parametrize(
    ("moment", "preset", "changes", "rows", "state", "recompute"),
    [
        ("mtp block: experts", "v4-debug", WIDE_EXPERTS, [[150]] * 2, State("bfloat16", "muon", "bf16"), ()),
        ("mtp block: attention", "v4-debug", WIDE_HEADS, [[200]] * 2, State("bfloat16", "adamw", "fp32"), ()),
        ("mtp block: stream weights", "v4-debug", THREE, [[100]] * 2, State("float32"), ()),
        ("layer 1 (csa): distillation", "v4-tiny", TWO, [[400]], State("float32"), (0, 1)),
        ("layer 1 (csa): experts", "v4-debug", WIDE_LAST, [[150]] * 2, State("bfloat16", "muon", "bf16"), PARTS[:4]),
        ("layer 2 (hca): attention", "v4-debug", WIDE_HEADS_LAST, [[200]] * 2, State("bfloat16", "adamw"), PARTS[4:]),
        ("mtp head: loss", "v4-tiny", TWO, [[20]], State("bfloat16", "muon", "bf16", accumulates=True), ()),
    ],
)
def test_live_storages(moment, preset, changes, rows, state, recompute):
    config = ModelConfig.from_preset(preset, **changes)
    found = measured(config, rows, state, recompute, passes=2 if state.accumulates else 1)
    wanted = Objective(balance_rows=len(rows), recompute=frozenset(recompute))
    peak = peak_bytes(config, [n for row in rows for n in row], state, wanted, gpu=False)
    assert peak.total == pytest.approx(found, rel=0.05), peak
    assert peak.moment == moment


def test_bytes_of_a_parameter_by_profile():
    """One matrix parameter and one other, both in the model's type."""
    p = Parameters(low=2, high=0, low_matrices=1, high_matrices=0, largest=1)

    def each(*state) -> tuple[int, int, int]:
        s = State(*state)
        return s.weights(p), s.gradients(p), s.optimizer_state(p)

    assert each("bfloat16", "adamw", "bf16") == (4, 4, 2 * (2 + 2 + 2))
    assert each("bfloat16", "muon", "bf16") == (4, 4, (2 + 2) + (2 + 2 + 2))
    assert each("bfloat16", "adamw", "fp32") == (4, 8, 2 * (4 + 4 + 4))
    assert each("float32", "muon", "fp32") == (8, 8, 4 + 8)


def test_parts_of_the_small_model_on_a_gpu():
    config = ModelConfig.from_preset("v4-small")
    peak = peak_bytes(config, (2048,) * 16, State("bfloat16", "muon", "bf16"), Objective(balance_rows=16))
    sizes = {part.name: part.bytes for part in peak.parts}
    assert peak.moment == "mtp block: experts"
    assert sizes["saved for backward"] > 0.8 * peak.total
    assert {part.name: part.basis for part in peak.parts}["optimizer state"] == "measured"
    assert sizes["weights"] == pytest.approx(2 * 147.1e6, rel=0.01)
    frozen = peak_bytes(config, (2048,) * 16, State("bfloat16"), Objective(distil=False, balance_rows=16))
    assert frozen.total < peak_bytes(config, (2048,) * 16, State("bfloat16"), Objective(balance_rows=16)).total


def test_state_on_the_host_leaves_two_batches_of_it_on_a_gpu():
    flash = ModelConfig.from_preset("v4-flash")

    def state_bytes(optimizer, profile, gpu, offloaded=True):
        state = State("bfloat16", optimizer, profile, offloaded=offloaded)
        peak = peak_bytes(flash, [64], state, gpu=gpu)
        return {part.name: part.bytes for part in peak.parts}["optimizer state"]

    assert state_bytes("adamw", "fp32", True) == 2 * 12 * 2**24
    assert state_bytes("muon", "fp32", True) == 2 * 8 * 2**26
    assert state_bytes("muon", "bf16", True) == 2 * 4 * 2**26
    assert state_bytes("adamw", "bf16", False) == state_bytes("adamw", "bf16", True, False) > 10**12


def test_few_tokens_leave_the_update_as_the_peak():
    peak = peak_bytes(ModelConfig.from_preset("v4-small"), (16,), State("float32"), Objective())
    assert peak.moment == "update"


def test_import_loads_no_torch():
    probe = "import sys, undertow.model.peak; assert 'torch' not in sys.modules"
    done = subprocess.run([sys.executable, "-c", probe], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
