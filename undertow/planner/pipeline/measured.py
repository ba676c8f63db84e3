"""A measured iteration as a timeline: the operations of a run's pipeline in place of simulated ones."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from fractions import Fraction
from typing import Any

from undertow.config.errors import InputError
from undertow.config.layout import Layout, parse_layout, place, placement_of
from undertow.config.parallel import Schedule
from undertow.planner.pipeline.schedules import Operation
from undertow.planner.pipeline.timeline import Event, RankTimeline, StageBytes, Timeline


def measured_timeline(document: Mapping[str, Any]) -> Timeline:
    """The timeline in `timeline.json` of a run directory; what ranks hold was not measured and is 0.

    Raises `InputError` for a document without its parts.
    """
    try:
        layout, seconds = parse_layout(document["layout"]), float(document["seconds"])
        ranks = [_rank(layout, document["schedule"], document["ranks"], seconds, of) for of in document["operations"]]
    except (KeyError, TypeError, ValueError) as error:
        raise InputError(
            f"this is no measured timeline ({type(error).__name__}: {error}); a run over pipeline ranks writes one, "
            "timeline.json in its directory"
        ) from error
    split = any(event.operation.kind == "W" for rank in ranks for event in rank.events)
    return Timeline(seconds, tuple(ranks), tuple(StageBytes(0) for _ in layout.stages), split)


def _rank(
    layout: Layout, schedule: Schedule, ranks: int, seconds: float, operations: Sequence[Sequence[Any]]
) -> RankTimeline:
    events, flying, most = [], 0, 0
    for kind, microbatch, stage, start, end in operations:
        chunk = place(stage, ranks, placement_of(schedule))[1]
        events.append(Event(Operation(kind, microbatch, chunk), stage, start, end))
        flying += (kind == "F") - (kind == "B")
        most = max(most, flying)
    busy = sum(event.end - event.start for event in events)
    chunks = len(layout.stages) // ranks
    return RankTimeline(tuple(events), busy, seconds - busy, 0, 0, Fraction(most, chunks))
