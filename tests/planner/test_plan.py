"""A plan as a whole: published figures, what is chosen unasked, the document, and what is said to be unmeasured."""

from __future__ import annotations

import json
import subprocess
import sys
import time

import pytest

import undertow
from undertow.config.errors import ConfigError
from undertow.config.layout import parse_layout
from undertow.config.model import ModelConfig
from undertow.config.schema import RunConfig
from undertow.planner.calibration.file import shipped_calibration
from undertow.planner.choice import Options, choose
from undertow.planner.memory.recompute import NONE, Recompute
from undertow.planner.plan import evaluate
from undertow.planner.subject import read_subject

PUBLISHED = ("model.indexer=own_rank", "indexer.frozen=true")
TUNED = "Et*10|t*12|t*12|t*9mL"
ROWS = [
    ("Et*10|t*11|t*11|t*11mL", 3, 1167.2),
    (TUNED, 3, 1273.4),
    ("Et*10|t*11|t*11|t*11mL", 0, 1255.7),
    (TUNED, 0, 1378.8),
]


@pytest.mark.parametrize(("layout", "recomputed", "reported"), ROWS)
def test_published_runs(layout, recomputed, reported):
    plan = undertow.plan("v4-flash", "32xMI355X", layout=layout, recompute=f"first:{recomputed}", overrides=PUBLISHED)
    assert plan.task.profile.name == "published-bf16" and plan.task.microbatch.implementation == "primus"
    told = f"{layout}, recompute {f'first:{recomputed}' if recomputed else 'none'}"
    (peak,) = (row.peak_bytes for row in shipped_calibration().rows if str(row) == told)
    assert plan.memory.peak.total_bytes == pytest.approx(peak, rel=0.01) and plan.fits
    assert plan.time.tflops_per_gpu[1] == pytest.approx(reported, rel=2e-3)
    assert plan.uncalibrated == () and plan.refusal is None


def test_parameters_and_operations_of_both_indexers():
    own = undertow.plan("v4-flash", "32xMI355X", overrides=PUBLISHED[:1])
    shared = undertow.plan(ModelConfig.from_preset("v4-flash"), "32xMI355X")
    assert [round(p.parameters.total / 1e9, 2) for p in (own, shared)] == [290.80, 290.94]
    assert round(shared.parameters.main / 1e9, 2) == 284.33 and shared.parameters.by_module["mtp"] > 6.6e9
    assert own.flops.reported_per_iteration == pytest.approx(377.10e15, rel=1e-3)
    assert own.flops.algorithmic_per_iteration == pytest.approx(94.18e15, rel=1e-3)
    assert shared.flops.reported_per_iteration == pytest.approx(380.70e15, rel=1e-3)
    assert shared.flops.algorithmic_per_iteration == pytest.approx(95.08e15, rel=1e-3)


def test_another_published_anchor():
    """8 nodes, 128 sequences: 722 TFLOP/s a GPU were logged for 4,076 ms."""
    plan = undertow.plan("v4-flash", "64xMI355X", global_batch=128, overrides=PUBLISHED)
    assert plan.flops.reported_per_iteration / 4.076 / 64e12 == pytest.approx(722.8, abs=0.1)


def test_defaults_of_a_model():
    plan = undertow.plan("v4-flash", "32xMI355X")
    task = plan.task
    assert (task.geometry.pipeline, task.geometry.expert, task.geometry.data) == (4, 8, 8)
    assert (task.batch.sequence_length, task.batch.micro_batch, task.batch.size) == (4096, 1, 256)
    assert plan.layout == "Et*10|t*11|t*11|t*11mL" and plan.recompute == NONE and task.microbatches == 32
    assert plan.time.tokens_per_second_per_gpu == pytest.approx(256 * 4096 / plan.time.seconds_per_iteration / 32)
    assert plan.uncalibrated == (
        "time: the indexer is shared, learning, the measured runs had own_rank, frozen; its operations count at the "
        "fitted rate",
    )


def test_pipeline_is_the_smallest_that_fits():
    wide = undertow.plan("v4-flash", "1024xMI355X", overrides=PUBLISHED)
    assert wide.fits and wide.task.geometry.pipeline == 2
    narrower = undertow.plan("v4-flash", "1024xMI355X", pipeline=1, tensor=1)
    assert not narrower.fits
    assert wide.uncalibrated == (
        "time: gradient sums of dense weights and experts over more ranks than measured are priced at 50 GB/s a GPU, "
        "which was not measured",
        "time: transfers between stages count as 0, for the measured rows do not tell them",
    )


def test_what_does_not_fit_names_the_binding_term():
    plan = undertow.plan("v4-flash", "8xH200")
    assert not plan.fits and plan.refusal
    peak = plan.memory.peak
    largest = max(peak.terms, key=lambda term: term.bytes)
    assert f"a GPU of stage {peak.stage} needs {peak.total_bytes / 1e9:,.1f} GB" in plan.refusal
    told = f"the most for '{largest.name}', {largest.bytes / 1e9:,.1f} GB"
    assert told in plan.refusal and "\n" not in plan.refusal
    # No other width is less full at its fullest.
    for width in (1, 2, 8):
        assert undertow.plan("v4-flash", "8xH200", pipeline=width).memory.peak.total_bytes >= peak.total_bytes
    assert any("rates of H200 are guessed, 0.393 times MI355X" in note for note in plan.uncalibrated)


def test_a_recipe_plans_what_it_trains():
    plan = undertow.plan("pretrain/small", "1xH200")
    task = plan.task
    assert (task.batch.size, task.batch.sequence_length, task.batch.micro_batch) == (16, 2048, 16)
    assert task.microbatch.implementation == "reference" and task.profile.name == "muon-fp32"
    assert [term.name for term in plan.memory.peak.terms if term.basis == "measured"]
    amd = undertow.plan("pretrain/v4-flash-amd", "32xMI355X", pipeline=4)
    assert amd.task.frozen_indexer and amd.task.config.indexer == "own_rank" and amd.task.profile.name == "adamw-bf16"
    again = undertow.plan("pretrain/v4-flash-amd", "32xMI355X", pipeline=4, overrides=["recompute.layers=[0,1]"])
    assert again.recompute == Recompute.of((0, 1))


def test_a_configuration_and_a_directory(tmp_path):
    run = RunConfig.model_validate({"model": ModelConfig.from_preset("v4-tiny"), "train": {"batch_size": 4}})
    assert undertow.plan(run, "2xH200").task.batch.size == 4
    (tmp_path / "config.json").write_text(
        json.dumps({"model_type": "undertow", "format_version": 1} | ModelConfig.from_preset("v4-tiny").model_dump())
    )
    named = undertow.plan(tmp_path, "8xH200")
    assert named.parameters == undertow.plan("v4-tiny", "8xH200").parameters
    assert undertow.plan("v4-tiny", "8xH200", environment={"UNDERTOW__TRAIN__BATCH_SIZE": "16"}).task.batch.size == 16


def test_experts_may_take_their_ranks_from_tensor_parallelism():
    plan = undertow.plan("v4-flash", "16xMI308X+8xMI308X", tensor=4, pipeline=4, expert=4)
    geometry = plan.task.geometry
    assert (geometry.data, geometry.expert_data, plan.task.microbatch.implementation) == (1, 1, "tight")
    assert len(plan.memory.ranks) == 16
    rollout = plan.rollout
    assert rollout and (rollout.geometry.gpus, rollout.replicas, rollout.fits) == (2, 4, True)
    assert rollout.sequences == 4 * rollout.serving.sequences and rollout.serving.length == 4096
    # One GPU has no room for the weights.
    alone = undertow.plan("v4-flash", "16xMI308X+1xMI308X", tensor=4, pipeline=4, expert=4)
    assert alone.rollout and not alone.rollout.fits


def test_a_rollout_that_does_not_fit():
    plan = undertow.plan("v4-flash", "64xMI355X+1xH200")
    assert plan.memory.fits and not plan.fits
    assert plan.refusal and plan.refusal.startswith(
        "rollout does not fit 1xH200: on each GPU of a replica of 1, weights"
    )


@pytest.mark.parametrize(
    ("schedule", "layout"),
    [("interleaved", "Et*5|t*5|t*5|t*5|t*5|t*6|t*6|t*6mL"), ("zb-h1", "Et*10|t*11|t*11|t*11mL")],
)
def test_schedules(schedule, layout):
    plan = undertow.plan("v4-flash", "32xMI355X", pipeline=4, tensor=1, schedule=schedule)
    assert plan.layout == layout and len(plan.memory.stages) == 4
    assert any(f"schedule {schedule} is simulated" in note for note in plan.uncalibrated)
    assert plan.timeline.seconds < undertow.plan("v4-flash", "32xMI355X", pipeline=4).timeline.seconds


def test_more_stages_than_ranks_are_interleaved():
    spread = "Et*6|t*5|t*6|t*6|t*6|t*6|t*5|t*3mL"
    plan = undertow.plan("v4-flash", "32xMI355X", tensor=1, pipeline=4, layout=spread, overrides=PUBLISHED)
    assert plan.task.schedule == "interleaved" and plan.time.seconds_per_iteration == pytest.approx(7.90, rel=5e-3)


def test_a_folded_layout_has_two_stages_a_rank():
    plan = undertow.plan("v4-flash", "32xMI355X", schedule="zbv", layout="Et*6|t*5|t*6|t*6|t*6|t*6|t*5|t*3mL")
    assert plan.task.geometry.pipeline == 4 and len(plan.memory.stages) == 4
    assert any("an upper bound" in note for note in plan.uncalibrated)


def test_tensor_parallelism_divides_the_work():
    one = undertow.plan("v4-flash", "32xMI355X", pipeline=4)
    four = undertow.plan("v4-flash", "128xMI355X", pipeline=4, tensor=4, global_batch=256)
    single, shared = (plan.timeline.ranks[1].busy for plan in (one, four))
    assert 0.25 < shared / single < 0.4 and one.timeline.ranks[1].step == 0 < four.timeline.ranks[1].step
    assert any(note.startswith("time: tensor is 4") for note in four.uncalibrated)


def test_a_search_may_choose_the_layout():
    subject = read_subject("v4-flash", 32, (), {})
    task, _, _ = choose(subject, undertow.plan("v4-flash").task.pool, Options())
    plan = evaluate(task, parse_layout(TUNED), Recompute.of((0,)))
    assert plan.layout == TUNED and plan.recompute.layers == {0}
    assert plan.memory.peak.total_bytes < undertow.plan("v4-flash", layout=TUNED).memory.peak.total_bytes


def test_document():
    plan = undertow.plan("v4-flash", "32xMI355X", layout=TUNED)
    document = json.loads(json.dumps(plan.json()))
    assert list(document) == [
        "model",
        "gpu",
        "gpus",
        "geometry",
        "batch",
        "schedule",
        "implementation",
        "state",
        "parameters",
        "memory",
        "fits",
        "refusal",
        "flops",
        "time",
        "bubbles",
        "decode",
        "layout",
        "recompute",
        "uncalibrated",
    ]
    assert set(document["parameters"]) == {"main", "total", "active", "by_module"}
    assert document["parameters"]["total"] == sum(document["parameters"]["by_module"].values()) == plan.parameters.total
    ranks = document["memory"]["ranks"]
    assert len(ranks) == 32 and [ranks[n]["stage"] for n in (0, 8, 31)] == [0, 1, 3]
    for rank, planned in zip(ranks, plan.memory.ranks, strict=True):
        assert rank["total_bytes"] == planned.total_bytes == sum(term["bytes"] for term in rank["terms"])
    assert {term["basis"] for term in ranks[0]["terms"]} == {"measured", "estimated"}
    assert document["memory"]["limit_bytes"] == 288_000_000_000 and document["fits"] is True
    flops = document["flops"]
    assert set(flops) == {"algorithmic_per_iteration", "reported_per_iteration", "terms"}
    for convention in ("algorithmic", "reported"):
        parts = [sum(term[convention].values()) for term in flops["terms"].values()]
        assert sum(parts) == pytest.approx(flops[f"{convention}_per_iteration"])
    assert document["time"] == {
        "seconds_per_iteration": plan.time.seconds_per_iteration,
        "tokens_per_second_per_gpu": plan.time.tokens_per_second_per_gpu,
        "calibration": "mi355x-v4-flash",
    }
    assert document["layout"] == TUNED and document["uncalibrated"] == list(plan.uncalibrated)
    rollout = undertow.plan("v4-flash", "32xMI355X+8xMI355X").json()["rollout"]
    assert rollout["replicas"] * rollout["gpus_per_replica"] == 8 and rollout["fits"]


@pytest.mark.parametrize("given", [("v4-flash", "1024xMI355X"), ("v4-pro", "2048xB200"), ("v4-flash", "8xH200")])
def test_plans_are_quick(given):
    began = time.perf_counter()
    plan = undertow.plan(*given)
    assert time.perf_counter() - began < 3 and str(plan) and plan.uncalibrated


@pytest.mark.parametrize(
    ("given", "options", "message"),
    [
        ("v4-flsh", {}, "no preset, recipe or model directory 'v4-flsh'; did you mean 'v4-flash'?"),
        ("v4-flash", {"gpus": "32xMI35X"}, "gpus '32xMI35X': unknown GPU 'MI35X'; did you mean 'MI355X'?"),
        ("v4-flash", {"gpus": "H200+H200+H200"}, "gpus 'H200+H200+H200': 3 pools; allowed: one that trains, or"),
        ("v4-flash", {"layout": "Et*10|q"}, "layout 'Et*10|q', column 7: 'q' is none of"),
        ("v4-flash", {"layout": "Et*10|t*33mL", "pipeline": 4}, "layout 'Et*10|t*33mL', after stage 1: 2 stages"),
        ("v4-flash", {"layout": "Et*10|t*12|t*12|t*8mL"}, "layout 'Et*10|t*12|t*12|t*8mL', stages 0 to 3: 42 t"),
        ("v4-flash", {"layout": TUNED, "schedule": "interleaved"}, "schedule interleaved with a layout of 4 stages"),
        ("v4-flash", {"expert": 7}, "expert 7 does not divide the 32 ranks of a stage"),
        ("v4-flash", {"pipeline": 0}, "pipeline is 0; allowed: at least 1"),
        ("v4-flash", {"pipeline": 64}, "32 GPUs are not a multiple of tensor 1 x pipeline 64"),
        ("v4-flash", {"gpus": "64xH200", "pipeline": 32, "schedule": "zbv"}, "64 stages (32 pipeline ranks, 2 each)"),
        (
            "v4-flash",
            {"global_batch": 100, "pipeline": 4, "tensor": 1},
            "batch of 100 sequences is not a multiple of micro-batch 1 x",
        ),
        ("v4-flash", {"micro_batch": 0}, "batch micro_batch is 0; allowed: at least 1"),
        ("v4-flash", {"schedule": "gpipe"}, "unknown schedule 'gpipe' (schedules: 1f1b, interleaved, zb-h1, zbv)"),
        ("v4-flash", {"schedule": "zb-h1", "recompute": [0]}, "schedule zb-h1 splits the backward pass"),
        ("v4-flash", {"recompute": "99"}, "recompute '99': layer 99 is none of this model's, 0 to 42"),
        ("v4-flash", {"recompute": "5-2"}, "recompute '5-2': the range 5-2 runs backwards"),
        ("v4-flash", {"recompute": "first:x"}, "recompute 'first:x': 'x' is no layer number; write none, all"),
        ("v4-flash", {"state": "fp7"}, "unknown state profile 'fp7'"),
        ("v4-flash", {"implementation": "tigt"}, "unknown implementation 'tigt'; did you mean 'tight'?"),
        ("v4-flash", {"implementation": "primus", "expert": 16}, "implementation primus: its expert kernel needs"),
        (ModelConfig.from_preset("v4-tiny"), {"overrides": ["seed=1"]}, "seed=1: KEY=VALUE changes a preset or"),
    ],
)
def test_mistakes(given, options, message):
    with pytest.raises(ConfigError) as caught:
        undertow.plan(given, **{"gpus": "32xMI355X", **options})
    assert str(caught.value).startswith(message) and "\n" not in str(caught.value)


@pytest.mark.parametrize(
    ("text", "layers"),
    [("none", []), ("0,4,10-12", [0, 4, 10, 11, 12]), ("first:2", [0, 1, 10, 11, 22, 23, 34, 35]), ("42", [42])],
)
def test_layers_to_recompute(text, layers):
    assert sorted(undertow.plan("v4-flash", layout=TUNED, recompute=text).recompute.layers) == layers


def test_a_plan_loads_neither_torch_nor_numpy():
    probe = (
        "import sys, undertow; p = undertow.plan('pretrain/v4-flash', '32xMI355X+8xMI355X'); str(p); p.json(); "
        "assert not {'torch', 'numpy'} & set(sys.modules)"
    )
    done = subprocess.run([sys.executable, "-c", probe], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
