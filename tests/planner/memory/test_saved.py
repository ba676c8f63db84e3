"""What stays for weight gradients where a schedule splits the backward pass: by hand from the tables."""

from __future__ import annotations

import pytest

import undertow
from undertow.config.model import ModelConfig
from undertow.planner.geometry import Batch, Geometry, build_geometry
from undertow.planner.memory.activations import Microbatch, end_gradients, layer_gradients, layer_saved
from undertow.planner.memory.inflight import stage_bytes
from undertow.planner.memory.parameters import Stage
from undertow.planner.memory.saved import SavedTable

FLASH = ModelConfig.from_preset("v4-flash", indexer="own_rank")
UNIT = 4096 * 4096 * 2
POOL = 204_800 * 4096 * 2 / UNIT  # rows of the worst case of fc1


def table(implementation: str = "tight") -> SavedTable:
    m = Microbatch(FLASH, build_geometry(32, pipeline=4, expert=8), Batch(256, 4096), implementation)  # type: ignore[arg-type]
    return SavedTable(m)


@pytest.mark.parametrize(("layer", "pooled"), [(0, 0), (2, 0.5), (3, 0.25)])
def test_bytes_for_weight_gradients(layer, pooled):
    # Norms of both halves, of the query latent, de-rotated output, output latent, and what experts read.
    inputs = 2 + 0.25 + 8 + 2 + 0.5
    # Query latent, queries, key-value latent, values and gates, output latent, output; both shared gradients.
    gradients = 0.25 + 8 + 0.125 + pooled + 2 + 1 + 1 + 1
    tight = table().deferred(Stage((layer,)))
    assert tight.inputs / UNIT == inputs + 6 + 3 and tight.gradients / UNIT == gradients + 6 + 6
    # Its first product has the rows of the worst case, and so has its gradient; the rest is fetched again.
    primus = table("primus").deferred(Stage((layer,)))
    assert primus.inputs / UNIT == inputs + POOL and primus.gradients / UNIT == gradients + POOL
    assert tight.total == tight.inputs + tight.gradients
    names = [row.name for row in layer_gradients(table().m, layer)]
    assert len(names) == len(set(names))
    kept = [row for row in layer_saved(table().m, layer) if row.for_weight]
    assert sum(row.bytes for row in kept) == tight.inputs


def test_gradients_that_are_being_made():
    saved = table()
    one, two = saved.deferred(Stage((3,))), saved.deferred(Stage((3, 3)))
    # The layer that comes first has freed nothing yet; a layer frees more than its gradients take.
    assert one.transient == one.gradients == two.transient and two.gradients == 2 * one.gradients
    assert saved.full[3] - one.inputs > one.gradients
    # The head has its input and the gradient of its logits before the layers begin.
    head = sum(row.bytes for row in end_gradients(saved.m))
    assert head == 4096 * (4096 + 129_280) * 2
    last = saved.deferred(Stage((3,), head=True))
    assert (last.gradients, last.transient) == (one.gradients + head, one.gradients + head)
    assert saved.deferred(Stage((43,), head=True)).gradients == saved.deferred(Stage((43,))).gradients + head
    # An embedding has no product.
    assert saved.deferred(Stage((3,), True)) == one
    # Where gradients take more than is freed, they pile up.
    primus = table("primus")
    two = primus.deferred(Stage((3, 3)))
    assert two.transient == max(two.gradients // 2, two.gradients - (primus.full[3] - two.inputs // 2))


def test_bytes_of_a_stage():
    saved, stage = table(), Stage((2, 3), True)
    whole, split = stage_bytes(saved, stage, False), stage_bytes(saved, stage, True)
    assert whole.saved == split.saved + split.for_weight == saved.stage(stage).total
    assert (whole.for_weight, whole.gradients, whole.transient) == (0, 0, 0)
    assert split.gradients == saved.deferred(stage).gradients and split.transient > 0


def test_the_reference_keeps_all_of_it():
    config = ModelConfig.from_preset("v4-small")
    saved = SavedTable(Microbatch(config, Geometry(pipeline=2), Batch(4, 512), "reference"))
    stage = Stage((0, 1), True)
    assert saved.deferred(stage) == (saved.stage(stage).total, 0, 0)


@pytest.mark.parametrize("implementation", ["tight", "primus"])
@pytest.mark.parametrize("schedule", ["zb-h1", "zbv"])
def test_memory_and_timeline_tell_the_same(implementation, schedule):
    plan = undertow.plan("v4-flash", "32xMI355X", pipeline=4, schedule=schedule, implementation=implementation)
    names = (
        "saved activations of layers", "saved activations of embedding and head", "kept for weight gradients",
        "gradients that are being made",
    )  # fmt: skip
    for rank, line in zip(plan.memory.stages, plan.timeline.ranks, strict=True):
        told = sum(rank.bytes_of(name) for name in names)
        making = rank.bytes_of("gradients that are being made")
        assert told - making <= line.peak_bytes <= told


def test_zbv_takes_about_as_much_as_1f1b():
    held = {}
    for schedule in ("1f1b", "zbv"):
        plan = undertow.plan("v4-flash", "32xMI355X", pipeline=4, schedule=schedule, implementation="tight")
        held[schedule] = max(line.peak_bytes for line in plan.timeline.ranks)
    # 8 chunks of a half each, on every rank, and up to 4 chunks that wait for their weight gradients.
    assert 1.1 < held["zbv"] / held["1f1b"] < 1.6
