"""A plan in the terms of what is measured, and measured pipelines beside simulated ones."""

import pytest

from undertow.bench.planned import planned_step, timelines
from undertow.bench.settings import resolve_step
from undertow.planner.plan import plan
from undertow.train.fit import lasting_bytes

GPU = "NVIDIA H200"


def config(*words):
    return resolve_step("v4-proxy", ["train.micro_batch_size=1", *words], 5, True, {}).config


def test_memory_of_each_rank_and_seconds_are_the_planners():
    run = config("parallel.pipeline=2", "train.batch_size=8")
    found, whole = planned_step(run, 2, GPU), plan(run, "2xH200")
    assert found["bytes"] == [stage.total_bytes for stage in whole.memory.stages]
    assert (found["of"], found["why"], found["seconds"]) == ("peak", None, whole.time.seconds_per_iteration)
    assert found["notes"] == list(whole.uncalibrated)


SPLIT = ("parallel.pipeline=2", "parallel.schedule=zb-h1", "recompute.layers=all")


@pytest.mark.parametrize(
    ("words", "device", "why"),
    [
        (["parallel.expert=2"], "cpu", "the planner knows no rates of cpu"),
        (["parallel.expert=2"], "GeForce 256", "the planner knows no rates of GeForce 256"),
        (SPLIT, GPU, "schedule zb-h1 splits the backward pass"),
    ],
)
def test_without_a_plan_what_lasts_counts(words, device, why):
    run = config("train.batch_size=8", *words)
    found = planned_step(run, 2, device)
    assert found["bytes"] == [lasting_bytes(run, 2, device != "cpu")] * 2 and found["seconds"] is None
    assert why in found["why"] and found["of"].startswith("weights")


def document(operations, schedule="1f1b", layout="Et*2|t*2L", microbatches=2):
    seconds = max(operation[-1] for of_rank in operations for operation in of_rank)
    return {
        "schedule": schedule, "layout": layout, "ranks": 2, "microbatches": microbatches, "seconds": seconds,
        "operations": operations,
    }  # fmt: skip


def test_equal_stages_have_the_bubble_of_the_closed_form():
    """F takes 1 and B 2: of 2 micro-batches over 2 ranks a third of the step is bubble, (p - 1) / (m + p - 1)."""
    first = [["F", 0, 0, 0.0, 1.0], ["F", 1, 0, 1.0, 2.0], ["B", 0, 0, 4.0, 6.0], ["B", 1, 0, 7.0, 9.0]]
    last = [["F", 0, 1, 1.0, 2.0], ["B", 0, 1, 2.0, 4.0], ["F", 1, 1, 4.0, 5.0], ["B", 1, 1, 5.0, 7.0]]
    found = timelines(document([first, last]))
    assert found["simulated"] == {"seconds": 9.0, "bubble": pytest.approx([1 / 3, 1 / 3])}
    assert found["measured"] == found["simulated"]
    later = [[*operation[:3], operation[3] + 3, operation[4] + 3] for operation in last]
    late = timelines(document([[*first[:2], ["B", 0, 0, 7.0, 9.0], ["B", 1, 0, 10.0, 12.0]], later]))
    assert late["measured"] == {"seconds": 12.0, "bubble": pytest.approx([0.5, 0.5])}
    assert late["simulated"] == found["simulated"]


def test_weight_gradients_fill_the_bubble():
    """Under a split backward pass the simulation has W apart."""
    first = [["F", 0, 0, 0, 1], ["F", 1, 0, 1, 2], ["B", 0, 0, 3, 4], ["B", 1, 0, 5, 6], ["W", 0, 0, 6, 7]]
    first += [["W", 1, 0, 7, 8]]
    last = [["F", 0, 1, 1, 2], ["B", 0, 1, 2, 3], ["F", 1, 1, 3, 4], ["B", 1, 1, 4, 5], ["W", 0, 1, 5, 6]]
    last += [["W", 1, 1, 6, 7]]
    found = timelines(document([first, last], "zb-h1"))
    assert found["measured"]["bubble"] == pytest.approx([2 / 8, 2 / 8])
    assert found["simulated"]["seconds"] <= 8 and max(found["simulated"]["bubble"]) < 1 / 3
