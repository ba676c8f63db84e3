"""What a search for a layout works on: one geometry under one schedule, cut into stages and weighed quickly.

The parts of a model in order are the embedding, the decoder layers, the MTP blocks together, and the head. A stage is a
span of them, so that every placement of MTP blocks and head that a layout can spell is a list of cuts.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import pairwise
from typing import NamedTuple

from undertow.planner.costs import ModelTimes, add
from undertow.planner.inflight import held_by_schedule
from undertow.planner.layout import Layout, check_layout
from undertow.planner.memory import Held, Memory, MemoryModel
from undertow.planner.parameters import Stage
from undertow.planner.pipeline import schedule_for
from undertow.planner.schedules import Schedule, ScheduleName, build_schedule, needs
from undertow.planner.timeline import StageTime, Time

Cuts = tuple[int, ...]
"""Where stages end, in parts: stage k is parts `cuts[k-1]` to `cuts[k]`, the last cut is the number of parts."""


class Span(NamedTuple):
    """Parts `first` to `end` - 1."""

    first: int
    end: int


def spans(cuts: Cuts) -> list[Span]:
    """The stages of a list of cuts."""
    return [Span(*pair) for pair in pairwise((0, *cuts))]


class _Step(NamedTuple):
    rank: int
    duration: int  # three a stage: forward, backward (of the input where it is split), weights
    sources: tuple[tuple[int, bool], ...]  # steps that end before, and whether on another rank


@dataclass(frozen=True)
class Case:
    """One geometry under one schedule, with the bytes that each pipeline rank may hold.

    `times` and `memory` are of the same model; the number of ranks is the pipeline width of `memory`.
    """

    times: ModelTimes
    memory: MemoryModel
    microbatches: int
    limits: tuple[int, ...]
    schedule: ScheduleName = "1f1b"
    chunks: int = 1
    transfer: Time = 0

    @property
    def ranks(self) -> int:
        """Pipeline ranks."""
        return self.memory.m.geometry.pipeline

    @property
    def stages(self) -> int:
        """Stages, all chunks of all ranks."""
        return self.ranks * self.chunks

    @cached_property
    def parts(self) -> tuple[str, ...]:
        """Letters of each part."""
        config = self.times.config
        mtp = "m" * config.num_nextn_predict_layers
        return ("E", *"t" * config.num_hidden_layers, *([mtp] if mtp else []), "L")

    @cached_property
    def part_times(self) -> tuple[StageTime, ...]:
        """Seconds of each part for one microbatch."""
        times, layers = self.times, self.times.config.num_hidden_layers
        nothing = StageTime(0.0, 0.0, 0.0)
        blocks = [add(nothing, *times.blocks[layers:])] if len(times.blocks) > layers else []
        return (nothing, *times.blocks[:layers], *blocks, times.head)

    @cached_property
    def plan(self) -> Schedule:
        """The order of operations, the same for every layout."""
        return build_schedule(self.schedule, self.ranks, self.microbatches, self.chunks)

    def layout(self, cuts: Cuts) -> Layout:
        """Cuts as a layout."""
        return Layout(tuple("".join(self.parts[a:b]) for a, b in spans(cuts)))

    def stage(self, span: Span) -> Stage:
        """What memory counts of a span."""
        config, inner = self.times.config, len(self.parts) - 1
        layers = [part - 1 for part in range(max(span.first, 1), min(span.end, config.num_hidden_layers + 1))]
        if config.num_nextn_predict_layers and span.first <= config.num_hidden_layers + 1 < span.end:
            layers += range(config.num_hidden_layers, len(self.times.blocks))
        return Stage(tuple(layers), span.first == 0, span.end == inner + 1)

    def rank_spans(self, cuts: Cuts) -> list[tuple[Span, ...]]:
        """The stages of each rank, by chunk."""
        of = spans(cuts)
        return [tuple(of[self.plan.stage(rank, chunk)] for chunk in range(self.chunks)) for rank in range(self.ranks)]

    def time(self, span: Span) -> StageTime:
        """Seconds of a span, nothing computed again."""
        return add(*self.part_times[span.first : span.end])

    def allows(self, cuts: Cuts) -> bool:
        """Whether the MTP blocks are in the last chunk of their rank."""
        if self.chunks == 1 or not self.times.config.num_nextn_predict_layers:
            return True
        return cuts[self.stages - self.ranks - 1] < len(self.parts) - 1

    @cached_property
    def in_flight(self) -> tuple[tuple[tuple[int, ...], ...], ...]:
        """For each rank the most microbatches it holds of its chunks at one moment: every count that none exceeds."""
        last = "W" if self.plan.split else "B"
        found = []
        for order in self.plan.orders:
            now, seen = [0] * self.chunks, set()
            for kind, _, chunk in order:
                now[chunk] += kind == "F"
                seen.add(tuple(now))
                now[chunk] -= kind == last
            found.append(tuple(sorted(c for c in seen if not any(d != c and _covers(d, c) for d in seen))))
        return tuple(found)

    @cached_property
    def _program(self) -> tuple[_Step, ...]:
        """All operations in an order in which each comes after what it needs."""
        plan, last = self.plan, self.stages - 1
        at: dict[tuple[str, int, int], int] = {}
        rank_of = {plan.stage(rank, chunk): rank for rank in range(plan.ranks) for chunk in range(plan.chunks)}
        steps: list[_Step] = []
        done = [0] * plan.ranks
        moved = True
        while moved:
            moved = False
            for rank, order in enumerate(plan.orders):
                while done[rank] < len(order):
                    kind, n, chunk = order[done[rank]]
                    stage = plan.stage(rank, chunk)
                    wanted = needs(kind, stage, last)
                    if any((*source, n) not in at for source in wanted):
                        break
                    sources = tuple((at[(*source, n)], rank_of[source[1]] != rank) for source in wanted)
                    at[kind, stage, n] = len(steps)
                    steps.append(_Step(rank, 3 * stage + "FBW".index(kind), sources))
                    done[rank] += 1
                    moved = True
        return tuple(steps)

    def seconds(self, times: Sequence[StageTime]) -> float:
        """Seconds of an iteration over stages of such times, as `simulate` finds them."""
        split, transfer = self.plan.split, float(self.transfer)
        lasting = [x for t in times for x in (t.forward, t.backward - t.weight if split else t.backward, t.weight)]
        free, ends = [0.0] * self.ranks, []
        for rank, duration, sources in self._program:
            start = free[rank]
            for source, sent in sources:
                end = ends[source] + transfer if sent else ends[source]
                if end > start:
                    start = end
            free[rank] = end = start + lasting[duration]
            ends.append(end)
        return float(max(free))

    def weigh(self, layout: Layout, recompute: frozenset[int], gpu_memory: int) -> Memory:
        """Memory of every rank, as the planner tells it. Raises `ConfigError` for a layout that cannot be."""
        check_layout(layout, self.times.config, self.ranks, self.plan.placement)
        order = schedule_for(layout, self.times, self.schedule, self.ranks, self.microbatches, recompute)
        held = held_by_schedule(order, layout, self.memory.saved, recompute)
        return self.memory.plan(held, gpu_memory, recompute=recompute)

    def static_bytes(self, rank: int, of: Sequence[Span]) -> int:
        """Bytes of a rank that holds such stages, but no microbatch."""
        return self.memory.rank(rank, [Held(self.stage(span), 0) for span in of]).total_bytes


def _covers(more: tuple[int, ...], fewer: tuple[int, ...]) -> bool:
    return all(a >= b for a, b in zip(more, fewer, strict=True))
