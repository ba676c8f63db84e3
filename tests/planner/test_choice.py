"""Widths that nobody states: of a schedule that needs a pipeline, within a margin, and of what takes long to send."""

from __future__ import annotations

import pytest

import undertow
from undertow.config.errors import ConfigError


@pytest.mark.parametrize(("schedule", "seconds"), [("zbv", 8.837), ("zb-h1", 9.097), ("interleaved", 9.139)])
def test_a_schedule_gets_the_pipeline_of_1f1b(schedule, seconds):
    plan = undertow.plan("v4-flash", "32xMI355X", schedule=schedule)
    geometry = plan.task.geometry
    assert (geometry.tensor, geometry.pipeline, geometry.expert) == (1, 4, 8) and plan.fits
    assert plan.time.seconds_per_iteration == pytest.approx(seconds, abs=1e-3)
    assert plan.uncalibrated[0] == (
        "choice: implementation tight, for under primus pipeline 4 does not fit 32xMI355X; --implementation gives "
        "another"
    )
    given = undertow.plan("v4-flash", "32xMI355X", schedule=schedule, pipeline=4)
    assert (given.task.geometry, given.task.microbatch.implementation) == (geometry, "tight")


def test_an_implementation_that_is_stated_is_kept():
    plan = undertow.plan("v4-flash", "32xMI355X", schedule="zbv", implementation="primus")
    assert plan.task.microbatch.implementation == "primus" and plan.task.geometry.pipeline == 8


def test_a_pipeline_schedule_on_one_gpu_and_on_two():
    assert undertow.plan("v4-tiny", "1xH200", schedule="interleaved").task.geometry.pipeline == 1
    assert undertow.plan("v4-tiny", "2xH200", schedule="interleaved").task.geometry.pipeline == 2


def test_a_margin_without_tuning():
    whole = undertow.plan("v4-flash", "32xMI355X")
    less = undertow.plan("v4-flash", "32xMI355X", margin=0.1)
    assert (whole.task.geometry.pipeline, less.task.geometry.pipeline) == (4, 8)
    assert less.memory.limit_bytes == 259_200_000_000 and less.fits
    narrow = undertow.plan("v4-flash", "32xMI355X", pipeline=4, tensor=1, memory_limit=200, margin=0.05)
    assert narrow.memory.limit_bytes == 190_000_000_000 and not narrow.fits
    with pytest.raises(ConfigError, match="memory limit is 300 GB; allowed: above 0, at most the 288 GB of MI355X"):
        undertow.plan("v4-flash", "32xMI355X", memory_limit=300)


def test_a_plan_that_mostly_sends_says_so():
    wide = undertow.plan("pretrain/v4-flash", "64xH200", pipeline=1)
    share = wide.task.sending_seconds(wide.stages, wide.recompute) / wide.time.seconds_per_iteration
    assert 0.7 < share < 0.8
    assert f"  {share:.0%} of an iteration goes to gathering weights" in str(wide) and "; --tune looks" in str(wide)
    published = undertow.plan("v4-flash", "32xMI355X")
    assert published.task.sending_seconds(published.stages) == 0 and "gathering weights," not in str(published)


@pytest.mark.parametrize(
    ("schedule", "batch", "told"),
    [
        ("zbv", 80_000, "schedule zbv: 10000 microbatches of a step on each of 4 pipeline ranks are too many"),
        ("interleaved", 256_000, "schedule interleaved: 32000 microbatches of a step on each of 4 pipeline ranks"),
        ("1f1b", 400_000, "schedule 1f1b: 50000 microbatches of a step on each of 4 pipeline ranks are too many"),
    ],
)
@pytest.mark.parametrize("tune", [False, True])
def test_steps_that_take_long_to_simulate_are_refused(schedule, batch, told, tune):
    options = {"schedule": schedule, "global_batch": batch, "pipeline": 4, "tensor": 1, "tune": tune}
    with pytest.raises(ConfigError) as refusal:
        undertow.plan("v4-flash", "32xMI355X", **options)
    assert str(refusal.value).startswith(told) and "\n" not in str(refusal.value)
