"""What a plan says of itself where no measurement covers it."""

from __future__ import annotations

from dataclasses import replace

import undertow
from undertow.config.gpus import GPUS
from undertow.planner.calibration.file import shipped_calibration
from undertow.planner.notes import gathered

PUBLISHED = ("model.indexer=own_rank", "indexer.frozen=true")


def told(gpus: str = "32xMI355X", overrides=PUBLISHED, **options) -> list[str]:
    return [*undertow.plan("v4-flash", gpus, overrides=overrides, **options).uncalibrated]


def test_nothing_where_it_was_measured():
    assert told(pipeline=4) == []


def test_each_width_that_was_not_measured():
    (memory, *time) = told(pipeline=8, expert=4)
    assert memory == "memory: expert is 4, the calibration mi355x-v4-flash was measured at 8"
    assert time == [
        "time: expert is 4, 8 was measured; the exchange of its tokens is estimated",
        "time: transfers between stages count as 0, for the measured rows do not tell them",
    ]
    shared = told("128xMI355X", pipeline=4, tensor=2, context=2)
    for name in ("tensor", "context"):
        note = f"time: {name} is 2, 1 was measured; work is divided evenly, what ranks send is estimated"
        assert note in shared
    across = told("64xMI355X", pipeline=4, expert=16, implementation="tight")
    assert (
        "time: expert 16 crosses machines of 8; its exchange is priced at 50 GB/s a GPU, which was not measured"
        in across
    )


def test_sums_of_gradients_over_more_ranks():
    sums = "over more ranks than measured are priced at 50 GB/s a GPU, which was not measured"
    assert told("64xMI355X", pipeline=4) == [f"time: gradient sums of dense weights and experts {sums}"]


def test_shape_batch_schedule_and_implementation():
    notes = told(pipeline=4, sequence_length=8192, micro_batch=2, schedule="zb-h1", implementation="tight", tensor=1)
    for note in (
        "time: rates were fitted to v4-flash at 4096 tokens; this is another shape",
        "time: rates are those of implementation primus; tight was not measured",
        "time: micro-batch is 2, 1 was measured; work is taken in proportion",
        "time: schedule zb-h1 is simulated; the measured runs had 1f1b",
    ):
        assert note in notes


def test_a_gpu_of_ones_own_without_a_source():
    own = replace(GPUS[0], name="Z1", sources={"memory": "unknown", "bf16": "unknown"})
    notes = undertow.plan("v4-flash", "64xZ1", own_gpus=[own]).uncalibrated
    assert notes[-1] == "gpu: memory and bf16 of Z1: as its file says, without a `source`"


def test_rows_that_a_sentence_is_about():
    plans = {
        (gpus, layers): undertow.plan("v4-flash", gpus, pipeline=8, recompute=layers, overrides=PUBLISHED)
        for gpus in ("32xMI355X", "64xH200")
        for layers in ("none", "all")
    }
    found = gathered({row: (plan.task, plan.memory) for row, plan in plans.items()})
    assert len(found) == len(set(found))
    assert any(each.startswith("time: rates of H200 are guessed") and each.endswith(" [64xH200]") for each in found)
    both = plans["32xMI355X", "none"].uncalibrated
    assert both and set(both) & set(found)  # true of all rows, and told without names
    one = {row: plan for row, plan in plans.items() if row != ("32xMI355X", "all")}
    assert gathered({row: (plan.task, plan.memory) for row, plan in one.items()}) == found


def test_another_gpu():
    notes = told("32xMI308X", pipeline=4, tensor=1)
    assert "memory: the constant of implementation primus is MI355X's, not MI308X's" in notes
    assert "time: rates of MI308X are guessed, 0.137 times MI355X by the peak in BF16" in notes
    assert notes[-1] == "gpu: memory and bf16 of MI308X: no vendor figure (unknown, computed)"


def test_a_poor_fit_is_told():
    shipped = shipped_calibration()
    poor = replace(shipped, warnings=("seconds of row 'x' come out +5.0% against what was measured",))
    assert told(pipeline=4, calibration=poor) == [
        "time: calibration mi355x-v4-flash: seconds of row 'x' come out +5.0% against what was measured"
    ]


def test_a_recipe_says_whose_memory_and_which_stage_are_planned():
    amd = undertow.plan("pretrain/v4-flash-amd", "32xMI355X").uncalibrated
    assert any(
        note.startswith("memory: saved activations and transients are those of Undertow's own operators; ")
        and "--implementation primus --state published-bf16 gives" in note
        for note in amd
    )
    assert any(
        note.startswith("time: rates are those of implementation primus, not of Undertow's kernels;") for note in amd
    )
    plain = undertow.plan("pretrain/v4-flash-amd", "32xMI355X", overrides=("optimizations.fusion=off",)).uncalibrated
    assert any(note.startswith("time: rates are those of fused kernels (primus)") for note in plain)
    published = undertow.plan("pretrain/v4-flash-amd", "32xMI355X", implementation="primus", state="published-bf16")
    assert published.uncalibrated == () and round(published.memory.peak.total_bytes / 1e9, 1) == 262.0
    staged = undertow.plan("pretrain/v4-flash", "64xH200").uncalibrated
    assert "choice: planned are steps with sparse attention; the first 13,278 of this run are dense" in staged


def test_a_constant_of_another_size_of_model():
    notes = undertow.plan("v4-tiny", "2xH200").uncalibrated
    told = "memory: the constant of 10.8 GB is that of v4-flash, of another size; "
    assert any(note.startswith(told) for note in notes)
