"""The still picture of a timeline: operations one by one where they are few, busy stretches and the most bytes."""

from __future__ import annotations

import re

from undertow.report.plan_tracks import still_bytes, still_operations

STAGES = [{"F": [10, 5, 0], "B": [20, 1, -6], "recomputed": 0}]


def rank(kinds: str, gaps: list[int]):
    return {
        **{"stages": [0], "kinds": kinds, "chunks": "", "gaps": gaps, "steps": [], "lasts": []},
        **{"static_bytes": 10, "peak_bytes": 16},
    }


def tracks(*ranks, seconds: float = 100.0):
    return {"tick": 1.0, "seconds": seconds, "stages": STAGES, "ranks": list(ranks)}


def paths(drawn: str, kind: str) -> list[str]:
    return re.findall(rf'<path style="--k:var\(--{kind}\)" d="([^"]*)"', drawn)


def test_operations_one_by_one():
    drawn = still_operations(tracks(rank("FB", [0, 40])))
    assert paths(drawn, "F") == ["M0.0,8h99.7v84H0.0z"] and paths(drawn, "B") == ["M500.0,8h199.7v84H500.0z"]
    assert 'aria-label="Operations of rank 0"' in drawn


def test_many_operations_are_busy_stretches():
    many = rank("FB" * 400, [0] * 400 + [3000] + [0] * 399)
    drawn = still_operations(tracks(many, seconds=15_000.0))
    assert paths(drawn, "F") == paths(drawn, "B") == []
    assert paths(drawn, "still") == ["M0.0,8h399.7v84H0.0zM600.0,8h399.7v84H600.0z"]


def test_the_most_bytes_of_each_part():
    drawn = still_bytes(tracks(rank("FB", [0, 40])), limit=25)
    (line,) = paths(drawn, "F")
    heights = [float(each) for each in re.findall(r"V([\d.]+)H", line)]
    levels = [round(26 * (1 - height / 100)) for height in heights]  # the axis ends at 1.04 x 25
    assert len(levels) == 250 and levels[0] == levels[124] == 15 and levels[126] == levels[173] == 16
    assert levels[-1] == 10 and set(levels) == {10, 15, 16}
