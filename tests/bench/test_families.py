"""Families of operators within steps: one model for all settings, what is not measured and why, and torch.compile."""

import json
import re

import pytest
import torch

from undertow.bench.compiled import exchange
from undertow.bench.families import Bench, Setting, bench_families, switches
from undertow.bench.settings import build, resolve_step
from undertow.bench.table import families_table
from undertow.config.errors import InputError
from undertow.config.optimizations import FAMILIES
from undertow.ops import Ops, registry

# One layer, so that it is quick.
SMALL = ["device=cpu", "train.sequence_length=32", "model.num_hidden_layers=1", "model.compress_ratios=[0]"]
SMALL += ["model.num_hash_layers=0", "model.num_nextn_predict_layers=0", "train.mtp_weight=0"]


def test_settings_share_weights_and_tokens():
    kept = []
    words = [*SMALL, "train.micro_batch_size=1"]
    result = bench_families("v4-debug", words, "fusion,grouped_gemm", 1, None, 2, {}, keep=lambda r: kept.append(1))
    rows = result["settings"]
    ok = [row for row in rows if row["status"] == "ok"]
    assert [(r["name"], r["role"], r["tokens"]) for r in ok] == [
        ("all off", "off", 64), ("all on", "on", 64), ("all off", "off", 32),
    ]  # fmt: skip
    off, on, short = ok
    assert off["losses"] == on["losses"] and off["gradient_norms"] == on["gradient_norms"]
    assert len(off["losses"]) == len(short["losses"]) == off["steps"] == 2
    assert off["losses"][0] != off["losses"][1]  # other tokens, the same weights
    assert on["times_off"] == pytest.approx(off["ms"]["median"] / on["ms"]["median"]) and off["times_off"] == 1.0
    share = off["tflops"]["algorithmic"] * 1e12 / result["ceilings"]["matmul"]
    assert off["share_of_matmul"]["algorithmic"] == pytest.approx(share)
    assert off["set"]["ops.swiglu"] == "reference" and "ops.swiglu" not in on["set"]
    alone = [row for row in rows if row["role"] == "alone"]
    assert {f"ops.{row['op']}" for row in alone} == FAMILIES["fusion"].on.keys() | FAMILIES["grouped_gemm"].on.keys()
    assert {(row["status"], row["reason"]) for row in alone} == {("absent", "triton kernels run on a GPU")}
    assert result["kernels"] == [] and len(kept) == len(rows)
    json.dumps(result, allow_nan=False)
    table = families_table(result)
    assert f"tokens/s of all on: {on['times_off']:.2f} times all off\n" in table
    assert "No kernel of these operators runs here: every setting is the reference, and the same." in table
    assert re.search(r"rms_norm, .* grouped_linear: absent: triton kernels run on a GPU ", " ".join(table.split()))
    assert re.search(rf"^all on +64 .* {off['losses'][-1]:.5f} ", table, re.MULTILINE)


def test_weights_stay_and_tables_are_exchanged():
    trainer, _ = build(resolve_step("v4-debug", SMALL, 3, False, {}), 3)
    model, given = trainer.model, Ops()
    exchange(model, given)
    assert all(module.ops is given for module in model.modules() if hasattr(module, "ops"))
    assert sum(hasattr(module, "ops") for module in model.modules()) > 10
    still = {"learning_rate": 0.0, "min_learning_rate": 0.0, "bias_update_rate": 0.0, "batch_size": 1}
    again = trainer.anew(trainer._packer, trainer.settings.model_copy(update=still))
    before = {name: value.clone() for name, value in model.state_dict().items()}
    entry = again.step()
    assert entry["train/batch_size"] == 1 and entry["train/grad_norm"] > 0 and again.progress.step == 1
    assert all(torch.equal(before[name], value) for name, value in model.state_dict().items())
    assert trainer.progress.step == 0


def test_an_operator_that_no_step_calls_or_whose_kernel_takes_none_is_not_measured_alone(monkeypatch):
    monkeypatch.setattr(registry, "machine", lambda device: registry.Machine("cuda", "sm_90"))
    monkeypatch.setattr(registry, "taker", lambda choice, *args, **kwargs: ("reference", "of another type"))
    words = [*SMALL, "attention.backend=reference", "attention.csa_backend=reference"]
    result = bench_families("v4-debug", words, "fusion", None, None, 1, {})
    assert "linear_cross_entropy" in result["kernels"]
    found = {row["op"]: row["reason"] for row in result["settings"] if row["status"] == "absent"}
    assert found["linear_cross_entropy"] == found["compress_pool"] == "a training step does not call it"
    assert found["swiglu"] == "its kernel takes no call of this step"
    assert [row["role"] for row in result["settings"] if row["status"] == "ok"] == ["off", "on"]


def test_a_setting_that_fails_leaves_the_others(monkeypatch):
    def broken(*args, **kwargs):
        raise RuntimeError("no such\nkernel")

    monkeypatch.setattr(registry, "machine", lambda device: registry.Machine("cuda", "sm_90"))
    monkeypatch.setattr(registry, "_serve", broken)
    words = [*SMALL, "attention.backend=reference", "attention.csa_backend=reference", "ops.indexer_select=reference"]
    result = bench_families("v4-debug", [*words, "optimizations.grouped_gemm=off"], "fusion", 0, None, 1, {})
    off, on = result["settings"]
    assert (off["status"], on["status"], on["reason"]) == ("ok", "failed", "RuntimeError: no such kernel")
    assert "all on: failed: RuntimeError: no such kernel" in families_table(result)


@pytest.mark.slow
def test_blocks_under_torch_compile_compute_the_same_and_are_as_before():
    resolved = resolve_step("v4-debug", SMALL, 2, False, {})
    bench = Bench(resolved, 1, torch.device("cpu"))
    off = bench.take(Setting("all off", "off", resolved), 0.0)
    row = bench.take(Setting("all off, torch.compile", "compile", resolved), 0.0)
    made = row["compile"]
    assert row["losses"] == pytest.approx(off["losses"], rel=1e-6)
    assert row["gradient_norms"] == pytest.approx(off["gradient_norms"], rel=1e-5)
    assert made["graphs"] > 0 and made["breaks"] > 0 and made["graphs_while_timed"] == 0
    assert made["not_compiled"] == {"met after the 0 s that --compile gives": made["graphs"]}
    assert made["told"].startswith(f"{made['graphs']} graphs, {made['breaks']} breaks; {made['graphs']} not compiled: ")
    assert made["first_step_seconds"] > 0 and made["limit_seconds"] == 0.0
    model = bench._trainer.model
    assert isinstance(model.ops, Ops) and all(block._compiled_call_impl is None for block in model.layers)


@pytest.mark.parametrize(
    ("families", "words", "told"),
    [
        ("fusio", [], "--families fusio: no family of operators; did you mean 'fusion'"),
        ("recompute", [], r"no family of operators \(families: fusion, attention, grouped_gemm\)"),
        (",", [], "--families ,: no family"),
        ("fusion", ["ops.rms_norm=reference"], "ops.rms_norm=reference: --families fusion sets this key"),
        ("fusion", ["optimizations.fusion=off"], "--families fusion sets this key"),
    ],
)
def test_what_cannot_be_switched_is_refused(families, words, told):
    with pytest.raises(InputError, match=told):
        switches(families, words)


def test_the_two_positions_of_attention():
    found = switches("attention", ["ops.rms_norm=reference"])
    assert found.words() == ["attention.backend=reference", "attention.csa_backend=reference"]
    assert found.words("csa_attention") == ["attention.backend=reference", "attention.csa_backend=auto"]
    assert found.words(on=True) == ["attention.backend=auto", "attention.csa_backend=auto"]
