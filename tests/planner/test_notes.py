"""What a plan says of itself where no measurement covers it."""

from __future__ import annotations

from dataclasses import replace

import undertow
from undertow.planner.calibration.file import shipped_calibration

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
