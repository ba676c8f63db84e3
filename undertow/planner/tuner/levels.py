"""How many layers of each kind have which option: all ways, and ways that free enough bytes at few seconds."""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Callable, Iterable, Iterator, Sequence
from itertools import combinations_with_replacement
from typing import NamedTuple

from undertow.planner.options import Kind

Levels = list[list[int]]
"""For each kind, how many of its layers have each option."""


def dot(a: Sequence[int], b: Sequence[int]) -> int:
    """The sum of products."""
    return sum(x * y for x, y in zip(a, b, strict=True))


def freed_bytes(kinds: Sequence[Kind], levels: Levels, chunks: int) -> list[int]:
    """Bytes of one microbatch of each chunk."""
    freed = [0] * chunks
    for kind, level in zip(kinds, levels, strict=True):
        freed[kind.chunk] += sum(n * option.freed for option, n in zip(kind.options, level, strict=True) if n)
    return freed


def all_sets(kinds: Sequence[Kind], most: Sequence[int], needed: int) -> list[tuple[float, Levels]]:
    """How many layers at each option, cheapest first, of the sets that could free `needed` bytes."""
    found: list[tuple[float, int, Levels]] = [(0.0, 0, [])]
    for n, kind in zip(most, kinds, strict=True):
        ways = [*_ways(kind)]
        found = [(a + b, x + n * y, [*levels, level]) for a, x, levels in found for b, y, level in ways]
    return sorted((seconds, levels) for seconds, freed, levels in found if freed >= needed)


def _ways(kind: Kind) -> Iterator[tuple[float, int, list[int]]]:
    """Seconds, bytes freed and layers at each option, all ways to deal options out to the layers of a kind."""
    options = kind.options
    for chosen in combinations_with_replacement(range(len(options)), len(kind.layers)):
        level = [0] * len(options)
        for at in chosen:
            level[at] += 1
        seconds = sum(n * option.seconds for n, option in zip(level, options, strict=True) if n)
        yield seconds, sum(options[at].freed for at in chosen), level


def fill(kinds: Sequence[Kind], counts: Sequence[Sequence[int]], wanted: Sequence[int]) -> Levels | None:
    """Layers at each option that free `wanted` bytes at each moment, by seconds for a byte; None if none do.

    `counts` are the microbatches of each chunk at each moment. With one, the seconds exceed the fewest by less than one
    step of one layer. With several, the one that lacks most is served first, and the next from there.
    """
    levels = [[len(kind.layers)] + [0] * (len(kind.options) - 1) for kind in kinds]
    while True:
        freed = freed_bytes(kinds, levels, len(counts[0]))
        lacking = [want - dot(count, freed) for want, count in zip(wanted, counts, strict=True)]
        worst = max(range(len(counts)), key=lacking.__getitem__)
        if lacking[worst] <= 0:
            return levels
        if not _serve(kinds, counts[worst], lacking[worst], levels):
            return None


def _serve(kinds: Sequence[Kind], count: Sequence[int], lacking: int, levels: Levels) -> bool:
    """Free `lacking` bytes more at one moment. Steps are taken by seconds for a byte; before the one that is more than
    enough, the cheapest change of one layer that suffices is looked for."""
    steps = sorted(
        (rate / n, k, a, b) for k, kind in enumerate(kinds) if (n := count[kind.chunk]) for rate, a, b in kind.steps
    )
    for _, k, a, b in steps:
        kind, level = kinds[k], levels[k]
        each = count[kind.chunk] * (kind.options[b].freed - kind.options[a].freed)
        whole = min(level[a], lacking // each)
        level[a] -= whole
        level[b] += whole
        lacking -= whole * each
        if lacking <= 0:
            return True
        if level[a]:
            _, at, low, high = _cheapest(kinds, count, lacking, levels)
            levels[at][low] -= 1
            levels[at][high] += 1
            return True
    return _exhaust(kinds, count, lacking, levels)


def _exhaust(kinds: Sequence[Kind], count: Sequence[int], lacking: int, levels: Levels) -> bool:
    """Free what is lacking by layers whose option is between steps: to the last, one after the other."""
    for kind, level in zip(kinds, levels, strict=True):
        most = max(range(len(level)), key=lambda at: kind.options[at].freed)
        for at, option in enumerate(kind.options):
            while at != most and level[at] and lacking > 0:
                level[at] -= 1
                level[most] += 1
                lacking -= count[kind.chunk] * (kind.options[most].freed - option.freed)
    return lacking <= 0


def cheaper(kinds: Sequence[Kind], counts: Sequence[Sequence[int]], levels: Levels, room: int) -> list[Levels]:
    """Levels that take fewer seconds and at most `room` bytes more at any moment, the cheapest first: one layer has a
    cheaper option, and where that takes more, another layer the cheapest change that makes up for it."""
    ups = sorted(_changes(kinds, counts, levels, min, dearer=True))
    gains, best = [up.bytes for up in ups], [*ups]
    for at in reversed(range(len(ups) - 1)):  # the cheapest of those that free as much or more
        best[at] = min(best[at], best[at + 1], key=lambda up: up.seconds)
    found: list[tuple[float, Levels]] = []
    for down in _changes(kinds, counts, levels, max, dearer=False):
        if down.bytes <= room:
            found.append((-down.seconds, _changed(levels, down)))
        elif (at := bisect_left(gains, down.bytes - room)) < len(best) and best[at].seconds < down.seconds:
            both = _changed(_changed(levels, down), best[at])
            if min(both[best[at].kind]) >= 0:
                found.append((best[at].seconds - down.seconds, both))
    return [changed for _, changed in sorted(found)]


class _Change(NamedTuple):
    """Of one layer of a kind from an option to another: bytes and seconds between them, neither negative."""

    bytes: int
    seconds: float
    kind: int
    start: int
    end: int


def _changes(
    kinds: Sequence[Kind],
    counts: Sequence[Sequence[int]],
    levels: Levels,
    of: Callable[[Iterable[int]], int],
    *,
    dearer: bool,
) -> Iterator[_Change]:
    """To dearer options that free more, or to cheaper ones, bytes as `of` all moments."""
    for k, (kind, level) in enumerate(zip(kinds, levels, strict=True)):
        held, options = of(count[kind.chunk] for count in counts), kind.options
        for start in (at for at, n in enumerate(level) if n):
            for end in range(start + 1, len(options)) if dearer else range(start):
                freed = abs(options[end].freed - options[start].freed)
                if not dearer or options[end].freed > options[start].freed:
                    yield _Change(held * freed, abs(options[end].seconds - options[start].seconds), k, start, end)


def _changed(levels: Levels, change: _Change) -> Levels:
    level = [n - (at == change.start) + (at == change.end) for at, n in enumerate(levels[change.kind])]
    return [*levels[: change.kind], level, *levels[change.kind + 1 :]]


def _cheapest(kinds: Sequence[Kind], count: Sequence[int], lacking: int, levels: Levels) -> tuple[float, int, int, int]:
    """The cheapest change of one layer of a kind from one option to another that frees what is lacking: its seconds,
    the kind, and both options."""
    found = []
    for k, (kind, level) in enumerate(zip(kinds, levels, strict=True)):
        for low in (at for at, n in enumerate(level) if n and count[kind.chunk]):
            least = kind.options[low].freed + lacking / count[kind.chunk]
            high = next((at for at in range(low + 1, len(kind.options)) if kind.options[at].freed >= least), None)
            if high is not None:
                found.append((kind.options[high].seconds - kind.options[low].seconds, k, low, high))
    return min(found)
