"""Run on a small file system of its own: conversions whose disk fills up in the middle of a file."""

from __future__ import annotations

import json
import sys
from pathlib import Path

from tests.small_disk import Ballast
from undertow.cli import convert, main


def convert_until(share: float, ballast: Ballast, words: list[str]) -> tuple[int, str]:
    """Run `convert`, with no room left once `share` of all bytes are written; the exit code and the file at work."""
    show, at = convert._Gauge.show, []

    def fill(gauge: convert._Gauge, what: str, done: int, of: int) -> None:
        if done > share * of and not at:
            at.append(what)
            ballast.leave(0)
        show(gauge, what, done, of)

    convert._Gauge.show = fill
    try:
        return main(words), at[0]
    finally:
        convert._Gauge.show = show


def run(disk: Path, source: str, whole: Path, words: list[str]) -> list[dict[str, object]]:
    """What is there after each of three failures, then that a run with room gives the files of `whole`."""
    place, work, ballast, found = disk / "place", disk / ".place.converting", Ballast(disk / "ballast"), []
    words = ["convert", source, str(place), *words]
    kept: dict[str, int] = {}
    for share in (0.15, 0.5, 0.85):
        code, at = convert_until(share, ballast, words)
        ballast.drop()
        held = {file.name: file.stat().st_mtime_ns for file in work.iterdir()}
        assert kept.items() <= held.items() and at not in held, (kept, held, at)
        kept = held
        found.append({"code": code, "at": at, "kept": sorted(held), "there": sorted(p.name for p in disk.iterdir())})
    assert main(words) == 0
    assert kept.items() <= {file.name: file.stat().st_mtime_ns for file in place.iterdir()}.items()
    assert {f.name: f.read_bytes() for f in place.iterdir()} == {f.name: f.read_bytes() for f in whole.iterdir()}
    assert [path.name for path in disk.iterdir()] == ["place"]
    return found


if __name__ == "__main__":
    result = run(Path(sys.argv[1]), sys.argv[2], Path(sys.argv[3]), sys.argv[4:])
    print(json.dumps(result), file=sys.stderr)
