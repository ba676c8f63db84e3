"""Pipeline schedules: the operations of every rank in their order.

1F1B and its interleaved form (Narayanan et al. 2021, "Efficient large-scale language model training on GPU clusters"),
ZB-H1 (Qi et al. 2023, "Zero bubble pipeline parallelism") and ZBV (Qi et al. 2024, "Pipeline parallelism with
controllable memory"). The last two split a backward pass into the gradient of the input, which the stage before waits
for, and the gradient of the weights, which nothing waits for.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from functools import lru_cache
from heapq import heappop, heappush
from typing import Literal, NamedTuple

from undertow.config.errors import ConfigError
from undertow.config.layout import Placement, placement_of

ScheduleName = Literal["1f1b", "interleaved", "zb-h1", "zbv"]

Pace = tuple[int, int, int]
"""How long F, B and W take, one against the other, where the backward pass is split."""
EQUAL: Pace = (1, 1, 1)


class Operation(NamedTuple):
    """Forward `F`, backward `B` or weight gradient `W` of one microbatch through one chunk of a rank.

    `B` is the whole backward pass unless the schedule splits it; then it is the gradient of the input alone.
    """

    kind: Literal["F", "B", "W"]
    microbatch: int
    chunk: int = 0


LONGEST = 300_000
"""Operations of a step that are simulated at most."""
_PASSES = {"1f1b": 2, "interleaved": 2, "zb-h1": 3, "zbv": 9}  # of ZBV three times: its order is found by trial

Orders = tuple[tuple[Operation, ...], ...]
"""What each rank does, in that order."""


@dataclass(frozen=True)
class Schedule:
    """`orders[rank]` is what a rank does, in that order; `split` says whether `B` leaves the weights to `W`."""

    name: ScheduleName
    ranks: int
    chunks: int
    microbatches: int
    placement: Placement
    split: bool
    orders: Orders

    def stage(self, rank: int, chunk: int) -> int:
        """The stage that is a rank's chunk."""
        if self.placement == "fold" and chunk == 1:
            return 2 * self.ranks - 1 - rank
        return chunk * self.ranks + rank


def splits_backward(name: ScheduleName) -> bool:
    """Whether a schedule splits the backward pass; layers cannot be recomputed under one that does."""
    return name in ("zb-h1", "zbv")


def needs(kind: str, stage: int, last: int) -> tuple[tuple[str, int], ...]:
    """What ends, of the same microbatch, before an operation on a stage starts: pairs of kind and stage."""
    if kind == "F":
        return (("F", stage - 1),) if stage else ()
    if kind == "W":
        return (("B", stage),)
    return (("F", stage),) if stage == last else (("F", stage), ("B", stage + 1))


def check_schedule(name: ScheduleName, ranks: int, microbatches: int, chunks: int = 1) -> None:
    """Raises `ConfigError` where the number of chunks or microbatches does not suit a schedule."""
    if ranks < 1 or microbatches < 1:
        raise ConfigError(f"schedule {name}: {ranks} ranks and {microbatches} microbatches; each is at least 1")
    allowed = {"1f1b": (1, "1"), "zb-h1": (1, "1"), "zbv": (2, "2"), "interleaved": (max(chunks, 2), "2 or more")}
    if name not in allowed:
        raise ConfigError(f"schedule '{name}' is unknown; there are {', '.join(allowed)}")
    if chunks != allowed[name][0]:
        raise ConfigError(f"schedule {name}: {chunks} stages on each rank; it takes {allowed[name][1]}")
    if name == "interleaved" and microbatches % ranks:
        raise ConfigError(
            f"schedule interleaved: {microbatches} microbatches; their number is a multiple of the {ranks} ranks"
        )
    operations = microbatches * ranks * chunks * _PASSES[name]
    if operations > LONGEST:
        most = LONGEST // (ranks * chunks * _PASSES[name])
        raise ConfigError(
            f"schedule {name}: {microbatches} microbatches of a step on each of {ranks} pipeline ranks are too many to "
            f"simulate; allowed: {most}, take a smaller batch, a larger micro-batch or fewer pipeline ranks"
        )


def build_schedule(name: ScheduleName, ranks: int, microbatches: int, chunks: int = 1, pace: Pace = EQUAL) -> Schedule:
    """The schedule of that name; the order of ZBV follows the `pace` of operations. Raises as `check_schedule`."""
    check_schedule(name, ranks, microbatches, chunks)
    if name == "zbv":
        orders = _folded(ranks, microbatches, pace)
    elif name == "zb-h1":
        orders = [tuple(_zero_bubble(rank, ranks, microbatches)) for rank in range(ranks)]
    else:
        orders = [tuple(_alternating(rank, ranks, microbatches, chunks)) for rank in range(ranks)]
    return Schedule(name, ranks, chunks, microbatches, placement_of(name), splits_backward(name), tuple(orders))


def _alternating(rank: int, ranks: int, microbatches: int, chunks: int) -> Iterator[Operation]:
    """Forwards until the pipeline is full, then one forward and one backward in turn, then the backwards left over.

    With several chunks, microbatches go through a chunk in packs of `ranks`, and the chunks take turns.
    """
    total = microbatches * chunks
    ahead = ranks - rank - 1 if chunks == 1 else 2 * (ranks - rank - 1) + (chunks - 1) * ranks
    ahead = min(ahead, total)

    def nth(kind: Literal["F", "B"], n: int) -> Operation:
        if chunks == 1:
            return Operation(kind, n)
        pack, within = divmod(n, ranks * chunks)
        turn, member = divmod(within, ranks)
        return Operation(kind, pack * ranks + member, turn if kind == "F" else chunks - 1 - turn)

    yield from (nth("F", n) for n in range(ahead))
    for n in range(total - ahead):
        yield nth("F", ahead + n)
        yield nth("B", n)
    yield from (nth("B", n) for n in range(total - ahead, total))


def _zero_bubble(rank: int, ranks: int, microbatches: int) -> Iterator[Operation]:
    """1F1B, each weight gradient right behind a backward, but `rank` microbatches late: they fill the last wait."""
    written = 0
    for operation in _alternating(rank, ranks, microbatches, 1):
        yield operation
        if operation.kind == "B" and operation.microbatch >= rank:
            yield Operation("W", written)
            written += 1
    yield from (Operation("W", n) for n in range(written, microbatches))


_LATE = (0, 2, 4)  # chunks; more hardly shorten an iteration
_PREFERRED: tuple[tuple[Literal["F", "B", "W"], int], ...] = (
    ("B", 1), ("F", 1), ("F", 0), ("B", 0), ("W", 1), ("W", 0)
)  # fmt: skip


@lru_cache(maxsize=16)
def _folded(ranks: int, microbatches: int, pace: Pace) -> Orders:
    """ZBV: with some chunks (`_LATE`) more than 2 `ranks` that wait for their W, what is done first.

    No order takes less than all operations of the last rank behind the first forwards of the others.
    """
    least = 2 * microbatches * sum(pace) + (ranks - 1) * pace[0]
    best: tuple[int, Orders] | None = None
    for late in _LATE:
        found = _listed(ranks, microbatches, 2 * ranks + late, pace)
        if best is None or found[0] < best[0]:
            best = found
        if best[0] == least or 2 * microbatches <= 2 * ranks + late:
            break
    assert best is not None
    return best[1]


def _listed(ranks: int, microbatches: int, most: int, pace: Pace) -> tuple[int, Orders]:
    """List scheduling, and when it ends: a free rank starts the first that it can of B and F of chunk 1, F and B of
    chunk 0, W; a forward only while fewer than 2 `ranks` chunks are in flight, and fewer than `most` until their W.

    Of that room, chunk 0 leaves one place to chunk 1: so the oldest microbatch always gets on, and the loop ends.
    """
    last, lasting = 2 * ranks - 1, dict(zip("FBW", pace, strict=True))
    done: dict[tuple[str, int, int], int] = {}  # (kind, stage, microbatch) -> when it ends
    following = {(kind, stage): 0 for kind in "FBW" for stage in range(last + 1)}
    sources = {each: needs(*each, last) for each in following}
    orders: list[list[Operation]] = [[] for _ in range(ranks)]
    held, kept, free = [0] * ranks, [0] * ranks, [0] * ranks  # chunks until their B, until their W; when it is free
    moments, now = [0], 0
    while moments:
        now = heappop(moments)
        for rank in range(ranks):
            for kind, chunk in _PREFERRED if free[rank] <= now else ():
                stage = last - rank if chunk else rank
                n = following[kind, stage]
                if n == microbatches:
                    continue
                if kind == "F" and (held[rank] + (chunk == 0) >= 2 * ranks or kept[rank] + (chunk == 0) >= most):
                    continue
                if all(done.get((*source, n), now + 1) <= now for source in sources[kind, stage]):
                    done[kind, stage, n] = free[rank] = now + lasting[kind]
                    following[kind, stage] += 1
                    held[rank] += (kind == "F") - (kind == "B")
                    kept[rank] += (kind == "F") - (kind == "W")
                    orders[rank].append(Operation(kind, n, chunk))
                    if free[rank] not in moments:
                        heappush(moments, free[rank])
                    break
    return now, tuple(tuple(order) for order in orders)
