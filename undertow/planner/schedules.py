"""Pipeline schedules: the operations of every rank in their order.

1F1B and its interleaved form (Narayanan et al. 2021, "Efficient large-scale language model training on GPU clusters"),
ZB-H1 (Qi et al. 2023, "Zero bubble pipeline parallelism") and ZBV (Qi et al. 2024, "Pipeline parallelism with
controllable memory"). The last two split a backward pass into the gradient of the input, which the stage before waits
for, and the gradient of the weights, which nothing waits for.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Literal, NamedTuple

from undertow.config.errors import ConfigError
from undertow.planner.layout import Placement

ScheduleName = Literal["1f1b", "interleaved", "zb-h1", "zbv"]


class Operation(NamedTuple):
    """Forward `F`, backward `B` or weight gradient `W` of one microbatch through one chunk of a rank.

    `B` is the whole backward pass unless the schedule splits it; then it is the gradient of the input alone.
    """

    kind: Literal["F", "B", "W"]
    microbatch: int
    chunk: int = 0


@dataclass(frozen=True)
class Schedule:
    """`orders[rank]` is what a rank does, in that order; `split` says whether `B` leaves the weights to `W`."""

    name: ScheduleName
    ranks: int
    chunks: int
    microbatches: int
    placement: Placement
    split: bool
    orders: tuple[tuple[Operation, ...], ...]

    def stage(self, rank: int, chunk: int) -> int:
        """The stage that is a rank's chunk."""
        if self.placement == "fold" and chunk == 1:
            return 2 * self.ranks - 1 - rank
        return chunk * self.ranks + rank


def placement_of(name: ScheduleName) -> Placement:
    """How a schedule lays stages over ranks."""
    return "fold" if name == "zbv" else "wrap"


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


def build_schedule(name: ScheduleName, ranks: int, microbatches: int, chunks: int = 1) -> Schedule:
    """The schedule of that name. `ConfigError` where the number of chunks or microbatches does not suit it."""
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
    if name == "zbv":
        orders = _folded(ranks, microbatches)
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


def _folded(ranks: int, microbatches: int) -> list[tuple[Operation, ...]]:
    """ZBV by list scheduling in unit steps: a rank starts the first that it can of B and F of chunk 1, F and B of chunk
    0, W; a forward only while fewer than 2 `ranks` chunks are in flight.

    Of that room, chunk 0 leaves one place to chunk 1: so the oldest microbatch always gets on, and the loop ends.
    """
    last = 2 * ranks - 1
    done: dict[tuple[str, int, int], int] = {}  # (kind, stage, microbatch) -> step at whose end it is done
    following = {(kind, stage): 0 for kind in "FBW" for stage in range(last + 1)}
    orders: list[list[Operation]] = [[] for _ in range(ranks)]
    held = [0] * ranks
    step = 0
    while any(len(order) < 6 * microbatches for order in orders):
        chosen: list[tuple[int, str, int, int]] = []
        for rank in range(ranks):
            for kind, chunk in (("B", 1), ("F", 1), ("F", 0), ("B", 0), ("W", 1), ("W", 0)):
                stage = last - rank if chunk else rank
                n = following[kind, stage]
                if n == microbatches or (kind == "F" and held[rank] + (chunk == 0) >= 2 * ranks):
                    continue
                if all(done.get((*source, n), step + 1) <= step for source in needs(kind, stage, last)):
                    chosen.append((rank, kind, stage, n))
                    break
        step += 1
        for rank, kind, stage, n in chosen:
            done[kind, stage, n] = step
            following[kind, stage] += 1
            held[rank] += {"F": 1, "B": -1, "W": 0}[kind]
            orders[rank].append(Operation(kind, n, int(stage >= ranks)))  # type: ignore[arg-type]
    return [tuple(order) for order in orders]
