"""Which rank holds the others up, judged from what every rank last said of itself."""

from __future__ import annotations

import json
from collections.abc import Iterable, Sequence
from dataclasses import asdict, dataclass, field
from typing import NamedTuple


@dataclass(frozen=True)
class Beat:
    """What a rank says of itself every second or so: steps taken, place, and how many collectives it entered in each
    group.

    `last` and `waits` are collectives, said only at a standstill. `blocked` says that its stack ends in an exchange
    that no recorder knows. `work` counts beats in which it computed before the first step. After `done` nothing more
    comes. `host` and `pid` are those of its process.
    """

    count: int
    step: int
    place: str
    numbers: dict[str, int] = field(default_factory=dict)
    last: str | None = None
    waits: str | None = None
    blocked: bool = False
    work: int = 0
    done: bool = False
    host: str = ""
    pid: int = 0

    @property
    def progress(self) -> tuple[int, dict[str, int], int, str | None]:
        """What changes as long as the rank moves; point-to-point exchanges are in `last` alone."""
        return self.step, self.numbers, self.work, self.last

    def encode(self) -> str:
        """As JSON."""
        return json.dumps(asdict(self))

    @staticmethod
    def decode(text: str | bytes) -> Beat:
        """The inverse of `encode`."""
        return Beat(**json.loads(text))


@dataclass(frozen=True)
class Sighting:
    """A rank as another sees it: its last beat, None before the first; seconds since its last beat, and since its
    progress changed."""

    beat: Beat | None
    silent: float
    still: float

    @property
    def done(self) -> bool:
        """Whether it has said that it is at its end."""
        return self.beat is not None and self.beat.done


class Verdict(NamedTuple):
    """One sentence on who holds the others up, and the ranks that gave no sign of life."""

    sentence: str
    lost: tuple[int, ...] = ()


def verdict(seen: Sequence[Sighting], timeout: float, patience: float | None = None) -> Verdict | None:
    """Who holds the others up, None if nobody does; `seen` has every rank, in order.

    A rank that gave no sign of life for `patience` seconds (default: `timeout`; twice as long where it never gave one)
    is lost. If no rank has moved for
    `timeout` seconds, those are lost that gave none for half of it; else, if some wait in a collective, those are named
    that do not wait, or all if all wait.
    """
    if told := _lost(seen, timeout if patience is None else patience):
        return told
    at_work = [(rank, sight.beat, sight.still) for rank, sight in enumerate(seen) if sight.beat and not sight.done]
    if not at_work or min(still for _, _, still in at_work) < timeout:
        return None
    if told := _lost(seen, timeout / 2):
        return told
    waiting = [rank for rank, beat, _ in at_work if beat.waits or beat.blocked]
    holding = [rank for rank, _, _ in at_work if rank not in waiting]
    mend = f"lengthen parallel.timeout, {timeout:g} s, if that may take longer"
    if waiting and holding:
        return Verdict(
            f"{_ranks(holding, len(seen))} did not move for {timeout:g} s, outside any collective: "
            f"{_last(seen[holding[0]].beat)}; {_waits(seen, holding)}; {mend}"
        )
    if waiting:
        return Verdict(f"all ranks wait for each other for {timeout:g} s: {_waits(seen, [])}; {mend}")
    return None


def _lost(seen: Sequence[Sighting], patience: float) -> Verdict | None:
    # Who was never seen may have come late: it has twice the time.
    limits = [patience if sight.beat else 2 * patience for sight in seen]
    lost = [rank for rank, sight in enumerate(seen) if not sight.done and sight.silent >= limits[rank]]
    if not lost:
        return None
    return Verdict(
        f"{_ranks(lost, len(seen))} gave no sign of life for {min(seen[rank].silent for rank in lost):.0f} s: stopped, "
        f"dead or cut off; last seen {_last(seen[lost[0]].beat)}; {_waits(seen, lost)}",
        tuple(lost),
    )


def _last(beat: Beat | None) -> str:
    if beat is None:
        return "before its first step"
    told = f"in step {beat.step + 1}, {beat.place}"
    if beat.last:
        return f"{told}, after {beat.last}"
    entered = ", ".join(f"{number} of {group}" for group, number in beat.numbers.items() if number)
    return f"{told}, after collectives {entered}" if entered else f"{told}, before its first collective"


def _waits(seen: Sequence[Sighting], apart: list[int]) -> str:
    """In what the others wait, the ranks of each together."""
    places: dict[str, list[int]] = {}
    for rank, sight in enumerate(seen):
        beat = sight.beat
        if rank in apart or beat is None or beat.done:
            continue
        if beat.waits or beat.blocked:
            places.setdefault(f"in {beat.waits or 'an exchange'}, step {beat.step + 1}, {beat.place}", []).append(rank)
    if not places:
        return "no other rank waits in a collective yet"
    return "; ".join(f"{_ranks(ranks)} wait{'s' * (len(ranks) == 1)} {place}" for place, ranks in places.items())


def _ranks(ranks: Iterable[int], of: int | None = None) -> str:
    """`rank 3`, `ranks 0-3, 7`."""
    spans: list[list[int]] = []
    for rank in ranks:
        if spans and spans[-1][1] == rank - 1:
            spans[-1][1] = rank
        else:
            spans.append([rank, rank])
    told = ", ".join(str(first) if first == last else f"{first}-{last}" for first, last in spans)
    several = len(spans) > 1 or spans[0][0] != spans[0][1]
    return f"rank{'s' * several} {told}" + (f" of {of}" if of else "")
