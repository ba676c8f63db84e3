"""The timeline of one iteration: when each operation of a schedule runs, and what its rank holds meanwhile.

An operation starts when its rank is free and what it needs has arrived. Times may be of any exact or floating type:
with integers or fractions the closed forms of equal stages come out exactly.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from fractions import Fraction
from typing import NamedTuple, TypeAlias

from undertow.config.errors import ConfigError, UndertowError
from undertow.planner.pipeline.schedules import Operation, Schedule, needs

Time: TypeAlias = float | int | Fraction


class StageTime(NamedTuple):
    """Seconds that one microbatch takes on a stage; `weight` is the part of `backward` that makes weight gradients.

    `step` is taken once an iteration, after the last operation of the rank: sums of gradients, gathers of weights.
    """

    forward: Time
    backward: Time
    weight: Time = 0
    step: Time = 0


class StageBytes(NamedTuple):
    """Bytes of one microbatch on a stage: `saved` from the start of its forward to the end of its backward,
    `for_weight` besides, to the end of the weight gradient, and `transient` during the backward alone. Where a schedule
    splits the backward, `gradients` come from the end of its first part to the end of the weight gradient."""

    saved: int
    for_weight: int = 0
    transient: int = 0
    gradients: int = 0


class Event(NamedTuple):
    """One operation with its stage, its start and its end in seconds from the start of the iteration."""

    operation: Operation
    stage: int
    start: Time
    end: Time


@dataclass(frozen=True)
class RankTimeline:
    """What a rank does, in order, and what it holds.

    `busy`, `step` (once, after the last operation) and `bubble` add up to the iteration, in seconds. `peak_bytes`
    counts what microbatches hold, first reached at `peak_at` seconds. `in_flight` is the most microbatches whose
    forward had started and whose backward had not ended, in full-stage equivalents: a chunk of v counts 1/v.
    """

    events: tuple[Event, ...]
    busy: Time
    bubble: Time
    peak_bytes: int
    peak_at: Time
    in_flight: Fraction
    step: Time = 0


@dataclass(frozen=True)
class Timeline:
    """One iteration: its seconds from the first forward to the end of the last rank, its step included, and every rank.

    `held` are the bytes that it was run with, by stage, and `split` is its schedule's: `changes` reads them.
    """

    seconds: Time
    ranks: tuple[RankTimeline, ...]
    held: tuple[StageBytes, ...] = ()
    split: bool = False

    def bubble_fraction(self, rank: int) -> float:
        """Share of the iteration in which a rank waits."""
        return float(self.ranks[rank].bubble / self.seconds)


def simulate(
    schedule: Schedule, times: Sequence[StageTime], held: Sequence[StageBytes] | None = None, *, transfer: Time = 0
) -> Timeline:
    """Run a schedule over stages that take `times` and hold `held`, one entry a stage.

    `transfer` is the seconds between the end of an operation and the start of the next stage's on another rank; it
    keeps neither rank busy. Raises `UndertowError` for a schedule that stops, naming the operation that waits.
    """
    stages = schedule.ranks * schedule.chunks
    held = held or [StageBytes(0)] * stages
    if len(times) != stages or len(held) != stages:
        raise ConfigError(
            f"schedule {schedule.name} has {stages} stages; times of {len(times)} and bytes of {len(held)} were given"
        )
    events = _run(schedule, times, transfer)
    steps: list[Time] = [
        sum(times[schedule.stage(rank, chunk)].step for chunk in range(schedule.chunks))
        for rank in range(schedule.ranks)
    ]
    seconds = max(of_rank[-1].end + step for of_rank, step in zip(events, steps, strict=True))
    ranks = tuple(_rank(schedule, *each, held, seconds) for each in zip(events, steps, strict=True))
    return Timeline(seconds, ranks, tuple(held), schedule.split)


def _durations(schedule: Schedule, times: Sequence[StageTime]) -> list[dict[str, Time]]:
    split = schedule.split
    return [{"F": t.forward, "B": t.backward - t.weight if split else t.backward, "W": t.weight} for t in times]


def _run(schedule: Schedule, times: Sequence[StageTime], transfer: Time) -> list[list[Event]]:
    """Advance every rank as far as it goes, in turn, until all lists are done or none moves."""
    last = schedule.ranks * schedule.chunks - 1
    durations = _durations(schedule, times)
    stage_of = [[schedule.stage(rank, chunk) for chunk in range(schedule.chunks)] for rank in range(schedule.ranks)]
    rank_of = {stage: rank for rank, stages in enumerate(stage_of) for stage in stages}
    ended: dict[tuple[str, int, int], Time] = {}
    events: list[list[Event]] = [[] for _ in schedule.orders]
    free: list[Time] = [0] * schedule.ranks
    moved = True
    while moved:
        moved = False
        for rank, order in enumerate(schedule.orders):
            done = events[rank]
            while len(done) < len(order):
                operation = order[len(done)]
                kind, microbatch, chunk = operation
                stage = stage_of[rank][chunk]
                start = free[rank]
                for source in needs(kind, stage, last):
                    end = ended.get((*source, microbatch))
                    if end is None:
                        break
                    start = max(start, end if rank_of[source[1]] == rank else end + transfer)
                else:
                    free[rank] = end = start + durations[stage][kind]
                    ended[kind, stage, microbatch] = end
                    done.append(Event(operation, stage, start, end))
                    moved = True
                    continue
                break
    _refuse_a_stop(schedule, events, stage_of)
    return events


def _refuse_a_stop(schedule: Schedule, events: list[list[Event]], stage_of: list[list[int]]) -> None:
    last = schedule.ranks * schedule.chunks - 1
    ended = {(e.operation.kind, e.stage, e.operation.microbatch) for done in events for e in done}
    for rank, order in enumerate(schedule.orders):
        if len(events[rank]) == len(order):
            continue
        kind, microbatch, chunk = order[len(events[rank])]
        stage = stage_of[rank][chunk]
        wanted = next((k, s) for k, s in needs(kind, stage, last) if (k, s, microbatch) not in ended)
        raise UndertowError(
            f"schedule {schedule.name} stops: on rank {rank}, {kind} of microbatch {microbatch} on stage {stage} waits "
            f"for {wanted[0]} on stage {wanted[1]}, which has not run; every operation comes after what it needs"
        )


def changes(held: StageBytes, kind: str, split: bool) -> tuple[int, int]:
    """Bytes that a rank holds more of when an operation of a `kind` starts on a stage, and when it ends; `split` is the
    schedule's."""
    saved, for_weight, transient, gradients = held
    if kind == "F":
        return saved + for_weight, 0
    if kind == "B":
        return transient, (gradients - saved if split else -saved - for_weight) - transient
    return 0, -for_weight - gradients


def _rank(
    schedule: Schedule, events: list[Event], step: Time, held: Sequence[StageBytes], seconds: Time
) -> RankTimeline:
    busy = sum(e.end - e.start for e in events)
    now = peak = flying = most = 0
    peak_at: Time = 0
    for (kind, _, _), stage, start, _ in events:
        at_start, at_end = changes(held[stage], kind, schedule.split)
        now += at_start
        flying += kind == "F"
        most = max(most, flying)
        if now > peak:
            peak, peak_at = now, start
        now += at_end
        flying -= kind == "B"
    bubble = seconds - busy - step
    return RankTimeline(tuple(events), busy, bubble, peak, peak_at, Fraction(most, schedule.chunks), step)
