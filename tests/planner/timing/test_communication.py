"""What a run sends beyond the measured ones, by hand; nothing in their own geometry."""

from __future__ import annotations

from dataclasses import replace

import pytest

import undertow
from undertow.config.gpus import GPUS
from undertow.config.model import ModelConfig
from undertow.planner.calibration.file import shipped_calibration
from undertow.planner.geometry import Batch, Geometry
from undertow.planner.memory.activations import Microbatch
from undertow.planner.memory.model import MemoryModel
from undertow.planner.memory.state import state_profile
from undertow.planner.timing.communication import HIDDEN_DISPATCH
from undertow.planner.timing.costs import MicrobatchShape, model_times
from undertow.planner.timing.fabric import LATENCY_ACROSS, LATENCY_INSIDE
from undertow.planner.timing.times import run_times

SHIPPED = shipped_calibration()
FLASH = SHIPPED.measured.config
MI355X = SHIPPED.measured.gpu
HOME = SHIPPED.measured.geometry
ALONE = model_times(MicrobatchShape(FLASH, 4096, frozen_indexer=True), SHIPPED.rates)
STREAM = 4096 * 4096 * 2  # bytes of one stream


def times(geometry: Geometry, profile="published-bf16", gpu=MI355X, calibration=SHIPPED, **changes):
    m = Microbatch(FLASH, geometry, Batch(256, 4096), "tight")
    memory = MemoryModel(m, state_profile(profile), **changes)
    return run_times(memory, gpu, calibration, frozen_indexer=True), memory


def test_nothing_in_the_measured_geometry():
    found, _ = times(HOME)
    assert (found.blocks, found.head) == (ALONE.blocks, ALONE.head)
    assert sum(found.embedding) == found.transfer == 0
    deeper, _ = times(Geometry(pipeline=8, expert=8, data=8))
    assert deeper.blocks == ALONE.blocks
    alone, _ = times(Geometry(data=1))
    assert alone.blocks == ALONE.blocks
    # Four GPUs of a mesh send each other twice as much over the same links.
    fewer, _ = times(Geometry(pipeline=8, expert=4, data=4))
    extra = 6 * STREAM / 8 / 76.8e9
    assert fewer.blocks[2].forward - ALONE.blocks[2].forward == pytest.approx(2 * (1 - HIDDEN_DISPATCH) * extra)


def test_sums_of_experts_and_dense_weights_over_two_machines():
    found, memory = times(Geometry(pipeline=2, expert=8, data=16))
    assert found.blocks[0][:3] == ALONE.blocks[0][:3]
    experts = 2 * 32 * 3 * 4096 * 2048  # bytes of gradients, and again of weights
    assert experts == 2 * memory.layers[0].experts.total == 1_610_612_736
    summed = 2 * (experts / 2 / 50e9 + LATENCY_ACROSS)
    # Of dense weights the sum inside the machine was measured; across, each card has half of an eighth.
    dense = 2 * memory.layers[0].dense.total
    shared = 2 * (dense / 16 / 50e9 + LATENCY_ACROSS)
    assert found.blocks[0].step == pytest.approx(summed + shared)
    assert round(1e3 * summed, 2) == 32.22
    tables = 2 * 129_280 * 4096
    assert found.embedding.step == pytest.approx(2 * (tables / 16 / 50e9 + LATENCY_ACROSS))


def test_profiles_send_what_they_keep():
    wide = Geometry(pipeline=2, expert=8, data=16)
    lean, rich = (times(wide, profile)[0].blocks[0].step for profile in ("published-bf16", "published-fp32"))
    assert rich / lean == pytest.approx(1.5, abs=1e-3)  # gradients of 4 bytes, weights of 2
    whole = times(wide, "published-muon")[0].blocks[0].step  # an all-reduce of gradients: 4 and 4
    assert whole / lean == pytest.approx(2, abs=1e-3)


def test_shared_weights_are_gathered_behind_the_work_of_their_layer():
    found, memory = times(Geometry(pipeline=2, expert=8, data=16), "adamw-bf16")
    assert found.blocks[0].step == 0 == found.embedding.forward < found.embedding.step
    kept = memory.profile.profile
    size = kept.weights(memory.layers[0].experts)
    gather = size / 2 / 50e9
    assert gather > ALONE.blocks[0].forward  # longer than the work that could hide it
    dense = kept.weights(memory.layers[0].dense) * (7 / 8 / 537.6e9 + 1 / 16 / 50e9)
    assert found.blocks[0].forward == pytest.approx(gather + dense, rel=1e-3)
    near, _ = times(HOME, "adamw-bf16")
    assert near.blocks[0] == ALONE.blocks[0]  # within a machine it is all hidden
    late, _ = times(Geometry(pipeline=2, expert=8, data=16), "adamw-bf16", deferred=True)
    assert late.blocks[0].forward == ALONE.blocks[0].forward and late.blocks[0].step > 0


def test_experts_across_machines():
    found, _ = times(Geometry(pipeline=2, expert=16, data=16))
    size = 6 * STREAM
    extra = (size / 2 / 50e9 + LATENCY_ACROSS) - (size * 7 / 8 / 537.6e9 + LATENCY_INSIDE)
    both = 2 * (1 - HIDDEN_DISPATCH) * extra
    assert found.modules[3]["moe"] - ALONE.modules[3]["moe"] == pytest.approx(both)
    assert found.modules[3]["query"] == ALONE.modules[3]["query"]
    for way in ("forward", "backward"):
        assert getattr(found.blocks[3], way) - getattr(ALONE.blocks[3], way) == pytest.approx(both)
    within, _ = times(Geometry(pipeline=2, expert=16, data=16), gpu=next(g for g in GPUS if g.name == "GB300"))
    rates = SHIPPED.rates_of(next(g for g in GPUS if g.name == "GB300"))
    alone = model_times(MicrobatchShape(FLASH, 4096, frozen_indexer=True), rates)
    assert within.blocks[3].forward - alone.blocks[3].forward < 0.1 * both


def test_tensor_parallelism_gathers_and_scatters():
    found, _ = times(Geometry(tensor=4, pipeline=4, expert=8, data=2))
    alone = model_times(MicrobatchShape(FLASH, 4096, sharing=4, frozen_indexer=True), SHIPPED.rates)
    once = STREAM * 3 / 4 / (3 * 76.8e9) + 3 * LATENCY_INSIDE
    assert found.blocks[0].forward - alone.blocks[0].forward == pytest.approx(4 * once)
    assert found.blocks[0].backward - alone.blocks[0].backward == pytest.approx(6 * once)
    assert found.head.forward - alone.head.forward == pytest.approx(once)
    assert found.blocks[43].forward - alone.blocks[43].forward == pytest.approx(5 * once)


def test_context_parallelism_passes_entries_and_keys():
    found, _ = times(Geometry(pipeline=4, expert=8, context=2, data=4))
    alone = model_times(MicrobatchShape(FLASH, 4096, sharing=2, frozen_indexer=True), SHIPPED.rates)
    halo = 127 * 512 * 2 / 76.8e9 + LATENCY_INSIDE
    values, keys = 1024 * 512 * 2 / 2 / 76.8e9, 1024 * 128 * 2 / 2 / 76.8e9
    extra = [(a.forward - b.forward, a.backward - b.backward) for a, b in zip(found.blocks, alone.blocks, strict=True)]
    gathered = LATENCY_INSIDE
    assert extra[0] == pytest.approx((halo, halo))
    assert extra[2] == pytest.approx((halo + values + keys + gathered, halo + values + gathered))  # keys: frozen
    assert extra[3] == pytest.approx((halo + values / 32 + gathered,) * 2)


def test_transfers_are_in_proportion_to_the_streams():
    measured = replace(SHIPPED, measured=replace(SHIPPED.measured, transfer_seconds=2.7e-3))
    assert times(HOME, calibration=measured)[0].transfer == pytest.approx(2.7e-3)
    assert times(Geometry(pipeline=2, expert=8, context=2, data=8), calibration=measured)[0].transfer == pytest.approx(
        1.35e-3
    )
    assert times(Geometry(expert=8, data=32), calibration=measured)[0].transfer == 0


def test_a_plan_pays_its_sums_once_at_the_end():
    """64 GPUs in four stages: experts are summed over two machines."""
    small, large = (
        undertow.plan(ModelConfig.from_preset("v4-flash"), f"{gpus}xMI355X", pipeline=4, global_batch=8 * gpus)
        for gpus in (32, 64)
    )
    steps = [float(rank.step) for rank in large.timeline.ranks]
    assert all(rank.step == 0 for rank in small.timeline.ranks)
    assert [round(step, 2) for step in steps] == [0.33, 0.36, 0.36, 0.4]
    last = max(float(rank.events[-1].end) + step for rank, step in zip(large.timeline.ranks, steps, strict=True))
    assert float(large.timeline.seconds) == last
    for rank in large.timeline.ranks:
        assert float(rank.busy + rank.step + rank.bubble) == pytest.approx(last)
