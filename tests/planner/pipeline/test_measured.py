"""A measured iteration becomes a timeline that the page of a plan draws, each operation with its own length."""

import pytest

from undertow.config.errors import InputError
from undertow.planner.pipeline.measured import measured_timeline
from undertow.planner.pipeline.schedules import build_schedule
from undertow.planner.pipeline.timeline import StageTime, simulate
from undertow.planner.pipeline.tracks import tracks
from undertow.report.plan_timeline import timeline_section
from undertow.report.plan_tracks import spans

DOCUMENT = {
    "schedule": "1f1b",
    "layout": "Et|tmL",
    "ranks": 2,
    "microbatches": 2,
    "seconds": 1.0,
    "operations": [
        [["F", 0, 0, 0.0, 0.1], ["F", 1, 0, 0.1, 0.3], ["B", 0, 0, 0.5, 0.7], ["B", 1, 0, 0.8, 1.0]],
        [["F", 0, 1, 0.1, 0.2], ["B", 0, 1, 0.2, 0.5], ["F", 1, 1, 0.5, 0.6], ["B", 1, 1, 0.6, 0.8]],
    ],
}


def test_operations_come_back_with_their_own_lengths():
    timeline = measured_timeline(DOCUMENT)
    document = tracks(timeline, [0.0] * 2, [0] * 2)
    for rank, operations in zip(document["ranks"], DOCUMENT["operations"], strict=True):
        found = [
            [span.kind, span.microbatch, rank["stages"][span.chunk], span.start * document["tick"],
             span.end * document["tick"]] for span in spans(rank, document["stages"])
        ]  # fmt: skip
        for ours, theirs in zip(found, operations, strict=True):
            assert ours[:3] == theirs[:3] and ours[3:] == pytest.approx(theirs[3:], abs=1e-5)
    assert [rank.bubble for rank in timeline.ranks] == pytest.approx([0.3, 0.3])
    assert [rank.in_flight for rank in timeline.ranks] == [2, 1]
    assert "<svg" in timeline_section(document)


def test_a_simulation_that_is_told_as_measured_is_the_same():
    simulated = simulate(build_schedule("zbv", 2, 4, 2), [StageTime(1.0, 2.0, 1.0)] * 4)
    told = {
        "schedule": "zbv", "layout": "Et|t|t|tL", "ranks": 2, "microbatches": 4, "seconds": simulated.seconds,
        "operations": [
            [[e.operation.kind, e.operation.microbatch, e.stage, e.start, e.end] for e in rank.events]
            for rank in simulated.ranks
        ],
    }  # fmt: skip
    found = measured_timeline(told)
    assert [rank.events for rank in found.ranks] == [rank.events for rank in simulated.ranks]
    assert found.split and [rank.bubble for rank in found.ranks] == [rank.bubble for rank in simulated.ranks]
    assert tracks(found, [0.0] * 4, [0] * 2)["ranks"][0]["lasts"] == []


@pytest.mark.parametrize("missing", ["schedule", "layout", "ranks", "seconds", "operations"])
def test_a_document_without_its_parts_is_refused(missing):
    with pytest.raises(InputError, match="no measured timeline .KeyError: '" + missing):
        measured_timeline({name: value for name, value in DOCUMENT.items() if name != missing})
