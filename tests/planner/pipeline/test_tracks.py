"""A timeline in few characters: times, kinds, chunks, microbatches and bytes come back."""

from __future__ import annotations

import json

import pytest

from undertow.planner.pipeline.schedules import build_schedule
from undertow.planner.pipeline.timeline import StageBytes, StageTime, Timeline, simulate
from undertow.planner.pipeline.tracks import tracks
from undertow.report.plan_tracks import spans


def run(name, ranks, microbatches, chunks=1, held=None) -> Timeline:
    schedule = build_schedule(name, ranks, microbatches, chunks)
    times = [StageTime(0.3 + 0.01 * stage, 0.61, 0.25, step=0.05) for stage in range(ranks * chunks)]
    return simulate(schedule, times, held)


@pytest.mark.parametrize(
    ("name", "ranks", "microbatches", "chunks"),
    [("1f1b", 4, 9, 1), ("interleaved", 4, 8, 3), ("zb-h1", 3, 7, 1), ("zbv", 3, 10, 2), ("1f1b", 1, 1, 1)],
)
def test_every_operation_comes_back(name, ranks, microbatches, chunks):
    timeline = run(name, ranks, microbatches, chunks)
    document = json.loads(json.dumps(tracks(timeline, [0.0] * ranks * chunks, [0] * ranks)))
    assert document["chunks"] == chunks and document["seconds"] == pytest.approx(float(timeline.seconds))
    for track, rank in zip(document["ranks"], timeline.ranks, strict=True):
        found = list(spans(track, document["stages"]))
        assert [(span.kind, span.microbatch, span.chunk) for span in found] == [
            event.operation for event in rank.events
        ]
        for span, event in zip(found, rank.events, strict=True):
            assert span.start * document["tick"] == pytest.approx(float(event.start), abs=2 * document["tick"])
            assert span.end * document["tick"] == pytest.approx(float(event.end), abs=3 * document["tick"])
        assert track["stages"] == [
            {event.operation.chunk: event.stage for event in rank.events}[chunk] for chunk in range(chunks)
        ]
        assert track["step"] * document["tick"] == pytest.approx(0.05 * chunks)


def test_one_microbatch_in_full():
    timeline = simulate(
        build_schedule("1f1b", 2, 1), [StageTime(1, 3), StageTime(2, 4)], [StageBytes(5, 2, 3), StageBytes(7)]
    )
    assert tracks(timeline, [1, 0], [10, 20]) == {
        "tick": 1e-5,
        "seconds": 10.0,
        "chunks": 1,
        "stages": [
            {"F": [100_000, 7, 0], "B": [300_000, 3, -10], "recomputed": 100_000},
            {"F": [200_000, 7, 0], "B": [400_000, 0, -7], "recomputed": 0},
        ],
        "ranks": [
            {
                **{"stages": [0], "kinds": "FB", "chunks": "", "gaps": [0, 600_000], "steps": [], "lasts": []},
                **{"step": 0, "bubble": 0.6, "peak_bytes": 20, "static_bytes": 10},
            },
            {
                **{"stages": [1], "kinds": "FB", "chunks": "", "gaps": [100_000, 0], "steps": [], "lasts": []},
                **{"step": 0, "bubble": 0.4, "peak_bytes": 27, "static_bytes": 20},
            },
        ],
    }


@pytest.mark.parametrize(("name", "chunks"), [("1f1b", 1), ("interleaved", 2), ("zb-h1", 1), ("zbv", 2)])
def test_bytes_add_up_to_the_peak_and_back_to_nothing(name, chunks):
    held = [StageBytes(100 + stage, 10, 7, 3) for stage in range(4 * chunks)]
    timeline = run(name, 4, 8, chunks, held)
    document = tracks(timeline, [0.0] * 4 * chunks, [1000] * 4)
    for track, rank in zip(document["ranks"], timeline.ranks, strict=True):
        now = most = 1000
        for span in spans(track, document["stages"]):
            _, at_start, at_end = document["stages"][track["stages"][span.chunk]][span.kind]
            now += at_start
            most = max(most, now)
            now += at_end
        assert (now, most) == (1000, 1000 + rank.peak_bytes)


def test_many_operations_take_few_characters():
    timeline = run("interleaved", 8, 512, 2)
    operations = sum(len(rank.events) for rank in timeline.ranks)
    size = len(json.dumps(tracks(timeline, [0.0] * 16, [0] * 8), separators=(",", ":")))
    assert operations == 16_384 and size < 8 * operations
