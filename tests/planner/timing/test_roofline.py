"""Operations of a step: bytes by hand, and seconds that add up to those of the plan."""

from __future__ import annotations

import pytest

import undertow
from undertow.planner.task import Task
from undertow.planner.timing.costs import MicrobatchShape, model_times
from undertow.planner.timing.roofline import operations


def task_of(model="v4-flash", gpus="32xMI355X", **options) -> Task:
    return undertow.plan(model, gpus, **options).task


def test_one_operation_by_hand():
    found = {each.name: each for each in operations(task_of(pipeline=4))}
    logits = found["logits"]  # of the trunk and of the MTP block
    assert logits.count == 2 and logits.flops == 2 * 2 * 4096 * 4096 * 129_280
    assert logits.bytes == 2 * 2 * (4096 * (4096 + 129_280) + 4096 * 129_280)
    assert logits.intensity == pytest.approx(2016.1, abs=0.1)
    window = found["attention core, SWA"]  # queries, results, and one key-value latent a token; no weights
    assert window.count == 3 and window.bytes == 3 * 4096 * 2 * (2 * 64 * 512 + 512)
    assert window.flops == 3 * 4 * 64 * 512 * 516_160
    assert window.rate == pytest.approx(window.flops / 3 / 0.20e-3)
    experts = found["experts and routers"]
    weights = 32 * 3 * 4096 * 2048 + 3 * 4096 * 2048 + 256 * 4096
    assert experts.bytes == 44 * 2 * (4096 * (7 * (2 * 4096 + 3 * 2048) + 4096 + 2 * 256) + weights)


@pytest.mark.parametrize(
    ("model", "gpus", "options"),
    [
        ("v4-flash", "32xMI355X", {"pipeline": 4}),
        ("v4-flash", "64xH200", {"pipeline": 8, "sequence_length": 8192, "micro_batch": 2}),
        ("v4-flash", "64xMI355X", {"tensor": 4, "overrides": ("model.indexer=own_rank", "indexer.frozen=true")}),
        ("v4-debug", "1xH200", {}),
    ],
)
def test_seconds_add_up_to_those_of_the_layers(model, gpus, options):
    """Before what GPUs send each other."""
    task = task_of(model, gpus, **options)
    batch, sharing = task.batch, task.geometry.sequence_ranks
    shape = MicrobatchShape(task.config, batch.sequence_length, batch.micro_batch, sharing, task.frozen_indexer)
    times = model_times(shape, task.rates)
    layers = sum(time.forward + time.backward for time in (*times.blocks, times.head))
    whole = sum(each.seconds for each in operations(task))
    assert whole == pytest.approx(float(layers) * task.microbatches / task.geometry.pipeline, rel=1e-9)


def test_widths_divide_the_work_and_the_weights():
    wide, alone = operations(task_of(tensor=4, pipeline=4)), operations(task_of(pipeline=4))
    for one, four in zip(alone, wide, strict=True):
        assert four.flops == pytest.approx(one.flops / 4) and one.bytes / 4 <= four.bytes <= one.bytes
