"""The values of a plan's page: plain, complete, and the plan's own."""

from __future__ import annotations

import json

import pytest

import undertow
from undertow.planner.drawing import page_document

TUNED = "Et*10|t*12|t*12|t*9mL"


@pytest.fixture(scope="module")
def plan():
    return undertow.plan("v4-flash", "32xMI355X", layout=TUNED, recompute="first:3")


@pytest.fixture(scope="module")
def document(plan):
    return page_document(plan)


def test_plain_values(document):
    assert json.loads(json.dumps(document, allow_nan=False)) == document
    assert document["tuned"] is None and document["rollout"] is None
    assert (document["name"], document["cluster"], document["fits"]) == ("v4-flash", "32xMI355X", True)


def test_what_is_planned(plan, document):
    settings = document["settings"]
    assert settings["layout"] == TUNED and settings["recomputed"] == "0-2, 10-12, 22-24, 34-36"
    assert [settings[name] for name in ("pipeline", "expert", "data", "expert_data", "microbatches")] == [
        4,
        8,
        8,
        1,
        32,
    ]
    time = document["time"]
    assert time["seconds_per_iteration"] == plan.time.seconds_per_iteration == document["tracks"]["seconds"]
    assert (time["tflops_algorithmic"], time["tflops_reported"]) == plan.time.tflops_per_gpu
    assert time["peak_share"] == pytest.approx(time["tflops_algorithmic"] / 2516.6)
    indexers = document["parameters"]["indexers"]
    assert [(each["name"], round(each["total"] / 1e9, 2)) for each in indexers] == [
        ("shared", 290.94),
        ("own_rank", 290.80),
    ]


def test_memory_of_stages_and_over_time(plan, document):
    stages, ranks = document["memory"]["stages"], document["tracks"]["ranks"]
    assert [stage["total_bytes"] for stage in stages] == [stage.total_bytes for stage in plan.memory.stages]
    for stage, rank in zip(stages, ranks, strict=True):
        assert sum(term["bytes"] for term in stage["terms"]) == stage["total_bytes"]
        assert rank["peak_bytes"] == stage["total_bytes"]  # the curve reaches what the table says
        saved = sum(term["bytes"] for term in stage["terms"] if term["name"].startswith("saved activations"))
        assert rank["static_bytes"] == pytest.approx(stage["total_bytes"] - saved, abs=3)


def test_what_is_computed_again_is_told(plan, document):
    tracks = document["tracks"]
    forward = sum(time.forward for time in plan.task.times.blocks[:3])
    assert tracks["stages"][0]["recomputed"] * tracks["tick"] == pytest.approx(float(forward), abs=tracks["tick"])
    assert all(0 < stage["recomputed"] < stage["B"][0] for stage in tracks["stages"])


def test_roofline(document):
    roofline = document["roofline"]
    assert roofline["gpu"] == {
        **{"name": "MI355X", "bf16": 2516.6e12, "bandwidth": 8e12},
        "sources": {"bf16": "vendor", "bandwidth": "vendor"},
    }
    assert list(roofline["kinds"]) == ["swa", "csa", "hca"]
    names = [each["name"] for each in roofline["operations"]]
    assert {"attention core, SWA", "attention core, CSA", "experts and routers", "logits", "indexer"} < set(names)
    for each in roofline["operations"]:
        assert each["intensity"] == each["flops"] / each["bytes"] and each["seconds"] > 0


def test_a_pool_that_samples_and_a_refusal():
    plan = undertow.plan("v4-flash", "16xMI308X+8xMI308X", tensor=4, pipeline=4, expert=4)
    document = page_document(plan)
    assert document["rollout"] == json.loads(json.dumps(plan.json()["rollout"]))
    assert (document["fits"], document["refusal"]) == (plan.fits, plan.refusal)


def test_one_gpu():
    document = page_document(undertow.plan("v4-debug", "1xH200"))
    assert len(document["tracks"]["ranks"]) == 1 and document["tracks"]["ranks"][0]["bubble"] == 0


def test_what_the_tuner_found():
    plan = undertow.plan("v4-tiny", "4xH200", tune=True, pipeline=2, expert=2, schedule="1f1b")
    tuned = page_document(plan)["tuned"]
    assert json.loads(json.dumps(tuned)) == tuned
    assert tuned["layout"] == plan.layout and tuned["recomputed"] == str(plan.recompute)
    assert tuned["fragment"] == plan.tuned.fragment and len(tuned["runners_up"]) == len(plan.tuned.runners_up)
    limits = [point["limit_bytes"] for point in tuned["frontier"]]
    rates = [point["tokens_per_second_per_gpu"] for point in tuned["frontier"]]
    assert len(limits) > 2 and limits == sorted(limits) and rates == sorted(rates)
    assert all(
        {"layout", "schedule", "recomputed", "seconds_per_iteration"} <= set(point) for point in tuned["frontier"]
    )
