"""The still picture of a timeline, for readers without scripts: operations of every rank, and bytes over time."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, NamedTuple

from undertow.report.quantity import ceiling

_WIDTH, _HEIGHT = 1000, 100  # of a picture, in its own units
_ONE_BY_ONE = 600  # operations of a rank, of more than which only busy stretches are drawn
_BUCKETS = 250  # of the bytes over time


class Span(NamedTuple):
    """One operation of a rank: its place in the schedule, and its start and end in ticks."""

    kind: str
    chunk: int
    microbatch: int
    start: int
    end: int


def spans(rank: Mapping[str, Any], stages: Sequence[Mapping[str, Any]]) -> Iterator[Span]:
    """The operations of a rank of `tracks`, in order."""
    last: dict[tuple[str, int], int] = defaultdict(lambda: -1)
    now = 0
    for number, (kind, gap) in enumerate(zip(rank["kinds"], rank["gaps"], strict=True)):
        chunk = ord(rank["chunks"][number]) - ord("0") if rank["chunks"] else 0
        last[kind, chunk] += rank["steps"][number] if rank["steps"] else 1
        start = now + gap
        now = start + (rank["lasts"][number] if rank["lasts"] else stages[rank["stages"][chunk]][kind][0])
        yield Span(kind, chunk, last[kind, chunk], start, now)


def still_operations(tracks: Mapping[str, Any]) -> str:
    """A strip for each rank; where operations are many, only when it is busy."""
    whole = tracks["seconds"] / tracks["tick"]
    return _rows(
        _strip(list(spans(rank, tracks["stages"])), _WIDTH / whole, f"Operations of rank {number}")
        for number, rank in enumerate(tracks["ranks"])
    )


def _strip(done: Sequence[Span], scale: float, name: str) -> str:
    pieces = [(span.kind, span.start * scale, span.end * scale) for span in done]
    if len(pieces) > _ONE_BY_ONE:
        pieces = list(_busy(pieces))
    drawn: dict[str, list[str]] = defaultdict(list)
    for kind, start, end in pieces:
        drawn[kind].append(f"M{start:.1f},8h{max(0.2, end - start - 0.3):.1f}v84H{start:.1f}z")
    return _svg("".join(f'<path style="--k:var(--{kind})" d="{"".join(each)}"/>' for kind, each in drawn.items()), name)


def _busy(pieces: Sequence[tuple[str, float, float]]) -> Iterator[tuple[str, float, float]]:
    """Stretches without a gap that is wide enough to be seen, whatever is done in them."""
    _, begin, last = pieces[0]
    for _, start, end in pieces[1:]:
        if start - last > 1:
            yield "still", begin, last
            begin = start
        last = end
    yield "still", begin, last


def still_bytes(tracks: Mapping[str, Any], limit: int) -> str:
    """For each rank the most bytes that it holds in each part of the iteration, the limit as a line."""
    whole = tracks["seconds"] / tracks["tick"]
    top = ceiling(limit, (rank["peak_bytes"] for rank in tracks["ranks"]))
    line = _HEIGHT * (1 - limit / top)
    pictures = []
    for number, rank in enumerate(tracks["ranks"]):
        steps = "".join(
            f"V{_HEIGHT * (1 - most / top):.1f}H{_WIDTH * (n + 1) / _BUCKETS:.0f}"
            for n, most in enumerate(_most(rank, tracks["stages"], whole / _BUCKETS))
        )
        static = _HEIGHT * (1 - rank["static_bytes"] / top)
        drawn = (
            f'<path style="--k:var(--F)" d="M0,{_HEIGHT}{steps}V{_HEIGHT}z"/>'
            f'<path style="--k:var(--still)" d="M0,{_HEIGHT}V{static:.1f}H{_WIDTH}V{_HEIGHT}z"/>'
        )
        if limit <= top:
            drawn += f'<path style="--k:var(--limit)" d="M0,{line:.1f}h{_WIDTH}v1.5H0z"/>'
        pictures.append(_svg(drawn, f"Bytes of rank {number} over time", "tall"))
    return _rows(pictures)


def _most(rank: Mapping[str, Any], stages: Sequence[Mapping[str, Any]], width: float) -> list[int]:
    """The most bytes within each bucket of time of a rank."""
    found, now, reached = [0] * _BUCKETS, rank["static_bytes"], 0

    def until(tick: float) -> None:
        """The bytes of now hold up to this moment."""
        nonlocal reached
        last = min(_BUCKETS - 1, int(tick / width))
        for bucket in range(reached, last + 1):
            found[bucket] = max(found[bucket], now)
        reached = last

    for span in spans(rank, stages):
        _, at_start, at_end = stages[rank["stages"][span.chunk]][span.kind]
        for tick, change in ((span.start, at_start), (span.end, at_end)):
            until(tick)
            now += change
    until(width * _BUCKETS)
    return found


def _svg(drawn: str, name: str, kind: str = "") -> str:
    return (
        f'<svg class="{kind}" viewBox="0 0 {_WIDTH} {_HEIGHT}" preserveAspectRatio="none" role="img" '
        f'aria-label="{name}">{drawn}</svg>'
    )


def _rows(pictures: Iterator[str] | Sequence[str]) -> str:
    each = "".join(f"<div><span>{number}</span>{picture}</div>" for number, picture in enumerate(pictures))
    return f'<div class="rows">{each}</div>'
