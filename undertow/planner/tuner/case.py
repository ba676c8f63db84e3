"""What a search for a layout works on: one geometry under one schedule, cut into stages and weighed quickly.

The parts of a model in order are the embedding, the decoder layers, the MTP blocks together, and the head. A stage is a
span of them, so that every placement of MTP blocks and head that a layout can spell is a list of cuts.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import pairwise
from typing import Any, NamedTuple

from undertow.config.layout import Layout, check_layout
from undertow.planner.memory.inflight import held_by_schedule
from undertow.planner.memory.model import Held, Memory, MemoryModel
from undertow.planner.memory.parameters import Stage
from undertow.planner.memory.recompute import Recompute
from undertow.planner.options import Granularity
from undertow.planner.pipeline.schedules import EQUAL, Schedule, ScheduleName
from undertow.planner.pipeline.timeline import StageTime, Time
from undertow.planner.timing.costs import ModelTimes, add
from undertow.planner.tuner.order import Order, order_of, simulated

Cuts = tuple[int, ...]
"""Where stages end, in parts: stage k is parts `cuts[k-1]` to `cuts[k]`, the last cut is the number of parts."""


class Span(NamedTuple):
    """Parts `first` to `end` - 1."""

    first: int
    end: int


def spans(cuts: Cuts) -> list[Span]:
    """The stages of a list of cuts."""
    return [Span(*pair) for pair in pairwise((0, *cuts))]


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
    granularity: Granularity = "layer"

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
        return (times.embedding, *times.blocks[:layers], *blocks, times.head)

    @cached_property
    def order(self) -> Order:
        """The order of operations, the same for every layout; of fewer microbatches where there are many."""
        return self._order(simulated(self.ranks, self.microbatches)[0])

    @cached_property
    def shorter(self) -> Order | None:
        """An order of fewer microbatches still: from the two follow the seconds of all; None where there are few."""
        shorter = simulated(self.ranks, self.microbatches)[1:]
        return self._order(*shorter) if shorter else None

    def _order(self, microbatches: int) -> Order:
        pace = self.times.pace if self.schedule == "zbv" else EQUAL
        return order_of(self.schedule, self.ranks, microbatches, self.chunks, pace)

    @property
    def plan(self) -> Schedule:
        """The schedule."""
        return self.order.schedule

    @property
    def rank_of(self) -> tuple[int, ...]:
        """The rank of each stage."""
        return self.order.rank_of

    @property
    def in_flight(self) -> tuple[tuple[tuple[int, ...], ...], ...]:
        """What each rank holds at its worst moments; see `Order.in_flight`."""
        return self.order.in_flight

    def layout(self, cuts: Cuts) -> Layout:
        """Cuts as a layout."""
        return Layout(tuple("".join(self.parts[a:b]) for a, b in spans(cuts)))

    def cuts(self, layout: Layout) -> Cuts | None:
        """A layout as cuts; None if it parts the MTP blocks from one another."""
        cuts: list[int] = []
        at = 0
        for stage in layout.stages:
            first, size = at, 0
            while size < len(stage) and at < len(self.parts):
                size, at = size + len(self.parts[at]), at + 1
            if size != len(stage) or at == first:
                return None
            cuts.append(at)
        return tuple(cuts)

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
        parts, inner = self.part_times[span.first : span.end], self.times.config.num_hidden_layers + 1
        if 0 < span.first <= inner < span.end and len(self.part_times) > inner + 1:
            parts = (*parts, self.times.embedding)  # an MTP block reads a copy of the embedding
        return add(*parts)

    def allows(self, cuts: Cuts) -> bool:
        """Whether the MTP blocks are in the last chunk of their rank."""
        if self.chunks == 1 or not self.times.config.num_nextn_predict_layers:
            return True
        return cuts[self.stages - self.ranks - 1] < len(self.parts) - 1

    def seconds(self, times: Sequence[StageTime]) -> float:
        """Seconds of an iteration over stages of such times, as `simulate` finds them.

        Of many microbatches, those after the first add what the last simulated ones added, and never less than the
        work of a rank.
        """
        lasting, transfer = self._lasting(times), float(self.transfer)
        ends = self.order.ends(lasting, transfer)
        if self.shorter:
            ends = self._extended(ends, self.shorter.ends(lasting, transfer), times)
        return self._stepped(ends, times)

    def exact_seconds(self, times: Sequence[StageTime]) -> float:
        """As `seconds`, every microbatch simulated."""
        order = self._order(self.microbatches) if self.shorter else self.order
        return self._stepped(order.ends(self._lasting(times), float(self.transfer)), times)

    def _lasting(self, times: Sequence[StageTime]) -> list[Any]:
        split = self.plan.split
        return [x for t in times for x in (t.forward, t.backward - t.weight if split else t.backward, t.weight)]

    def _stepped(self, ends: Sequence[float], times: Sequence[StageTime]) -> float:
        steps = [0.0] * self.ranks
        for stage, time in enumerate(times):
            steps[self.rank_of[stage]] += float(time.step)
        return max(end + step for end, step in zip(ends, steps, strict=True))

    def _extended(self, ends: list[float], before: list[float], times: Sequence[StageTime]) -> list[float]:
        """When ranks end after all microbatches, from when they end after those of the two orders."""
        assert self.shorter is not None
        known, fewer = self.plan.microbatches, self.shorter.schedule.microbatches
        more = (self.microbatches - known) / (known - fewer)
        work, ahead, first = [0.0] * self.ranks, 0.0, [0.0] * self.ranks
        for stage, time in enumerate(times):
            if stage < self.ranks:
                first[self.rank_of[stage]] = ahead
            work[self.rank_of[stage]] += float(time.forward + time.backward)
            ahead += float(time.forward)
        least = [start + self.microbatches * each for start, each in zip(first, work, strict=True)]
        return [max(end + more * (end - one), low) for end, one, low in zip(ends, before, least, strict=True)]

    def weigh(self, layout: Layout, recompute: Recompute, gpu_memory: int) -> Memory:
        """Memory of every rank, as the planner tells it. Raises `ConfigError` for a layout that cannot be."""
        check_layout(layout, self.times.config, self.ranks, self.plan.placement)
        held = held_by_schedule(self.plan, layout, self.memory.saved, recompute)
        return self.memory.plan(held, gpu_memory, recompute=recompute)

    def static_bytes(self, rank: int, of: Sequence[Span]) -> int:
        """Bytes of a rank that holds such stages, but no microbatch."""
        return self.memory.rank(rank, [Held(self.stage(span), 0) for span in of]).total_bytes
