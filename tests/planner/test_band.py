"""Measured steps beside the plan's."""

import pytest

from undertow.config.resolve import resolve
from undertow.planner.band import Band, band_of
from undertow.planner.plan import plan

BAND = Band("1xH200", 2.0, 100_000_000_000, notes=("time: rates are guessed; so", "gpu: x"))


def _recipe(*words):
    return resolve("pretrain/proxy-1xH200", words, {}).config


def test_inside():
    assert BAND.sentence([2.09, 1.98, 9.0], 96_000_000_000) == (
        "plan for 1xH200: 2.09 s a step, 2 planned, inside the band of 5%; 96 GB on rank 0, 100 planned, inside the "
        "band of 5%"
    )


@pytest.mark.parametrize(
    ("seconds", "peak", "told"),
    [
        (2.2, 94_000_000_000, ("10.0% more", "6.0% less")),
        (1.88, 107_500_000_000, ("6.0% less", "7.5% more")),
    ],
)
def test_outside(seconds, peak, told):
    time, memory = BAND.sentence([seconds], peak).split("; ")
    assert time.endswith(f"2 planned, {told[0]}, outside the band of 5% (not calibrated: rates are guessed, so)")
    assert memory.endswith(f"100 planned, {told[1]}, outside the band of 5%")


def test_the_projection_is_that_of_the_plan():
    found, planned = band_of(_recipe(), 1, "NVIDIA H200"), plan(_recipe(), "1xH200")
    assert (found.pool, found.seconds) == ("1xH200", planned.time.seconds_per_iteration)
    assert (found.peak_bytes, found.notes) == (planned.memory.stages[0].total_bytes, planned.uncalibrated)
    assert found.seconds == pytest.approx(3.0135, abs=1e-3) and found.peak_bytes == pytest.approx(81.7e9, rel=1e-3)


def test_a_cpu_has_no_prediction():
    assert band_of(_recipe(), 2, "cpu").sentence([1.0], 10) == (
        "plan: no prediction for cpu: the planner knows no rates of it"
    )


def test_steps_that_change_are_not_timed():
    found = band_of(_recipe("train.sequence_length_schedule=[[4,1024]]"), 1, "NVIDIA H200")
    told = found.sentence([1.0], found.peak_bytes or 0)
    assert told.endswith("; seconds are not compared: train.sequence_length_schedule changes the steps")
    assert "s a step" not in told


def test_what_cannot_be_planned_has_no_prediction():
    told = band_of(_recipe("parallel.pipeline=3"), 4, "NVIDIA H200").sentence([1.0], 10)
    assert told.startswith("plan: no prediction for 4xH200: ") and "pipeline 3" in told
