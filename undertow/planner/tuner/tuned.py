"""What the tuner chose for a plan, what it compared, and what would make it faster."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any, NamedTuple

from undertow.config.layout import Layout
from undertow.planner.geometry import Batch, Geometry
from undertow.planner.memory.recompute import Recompute
from undertow.planner.pipeline.schedules import ScheduleName
from undertow.planner.tuner.fragment import FILE, Origin, fragment_of
from undertow.planner.tuner.gains import Gain
from undertow.planner.tuner.price import RoomPrice, StagePrice


@dataclass(frozen=True)
class Way:
    """One way to run, as compared: what it takes an iteration, and the peak of its fullest GPU."""

    stages: Layout
    schedule: ScheduleName
    geometry: Geometry
    batch: Batch
    recompute: Recompute
    seconds_per_iteration: float
    peak_bytes: int

    @property
    def layout(self) -> str:
        """In its canonical spelling."""
        return str(self.stages)

    def json(self) -> dict[str, Any]:
        """As plain values."""
        g = self.geometry
        return {
            "layout": self.layout,
            "schedule": self.schedule,
            "tensor": g.tensor,
            "pipeline": g.pipeline,
            "expert": g.expert,
            "context": g.context,
            "data": g.data,
            "micro_batch": self.batch.micro_batch,
            "recompute": self.recompute.json(),
            "seconds_per_iteration": self.seconds_per_iteration,
            "peak_bytes": self.peak_bytes,
        }


class FrontierPoint(NamedTuple):
    """The fastest way within a limit of bytes a GPU."""

    limit_bytes: int
    tokens_per_second_per_gpu: float
    way: Way

    def json(self) -> dict[str, Any]:
        """As plain values, those of the way among them."""
        rate = self.tokens_per_second_per_gpu
        return {"limit_bytes": self.limit_bytes, "tokens_per_second_per_gpu": rate, **self.way.json()}


@dataclass(frozen=True)
class Tuned:
    """The fastest way within `limit_bytes` a GPU, `margin` below its memory.

    `start` is the plan without tuning; `runners_up` the next fastest; `binding` says what holds the best back, `prices`
    what more memory on each rank would buy, `gains` what faster kernels would. `compared` of `cases` geometries and
    schedules were searched. `room` is what more on every GPU would buy, `kept` a sentence on widths that were not
    widened. `origin` says what was tuned. `proven`: no other layout of this geometry and schedule is faster within the
    limit.
    """

    best: Way
    start: Way
    runners_up: tuple[Way, ...]
    binding: str
    prices: tuple[StagePrice, ...]
    gains: tuple[Gain, ...]
    unlimited_seconds: float
    limit_bytes: int
    margin: float
    compared: int
    cases: int
    proven: bool
    origin: Origin
    room: tuple[RoomPrice, ...]
    kept: str
    trace: Callable[[], tuple[FrontierPoint, ...]] = field(repr=False, compare=False)

    @property
    def layout(self) -> str:
        """Of the best."""
        return self.best.layout

    @property
    def recompute(self) -> Recompute:
        """Of the best."""
        return self.best.recompute

    @property
    def seconds_per_iteration(self) -> float:
        """Of the best."""
        return self.best.seconds_per_iteration

    @property
    def peak_bytes(self) -> int:
        """Of the best."""
        return self.best.peak_bytes

    @property
    def fragment(self) -> str:
        """The best as sections of a recipe, in YAML."""
        return self.fragment_in(FILE)

    def fragment_in(self, file: str) -> str:
        """The fragment for a file of this name, which the comment in it tells."""
        way = self.best
        return fragment_of(way.stages, way.schedule, way.geometry, way.batch, way.recompute, self.origin, file)

    @cached_property
    def frontier(self) -> tuple[FrontierPoint, ...]:
        """Throughput against the limit of memory, from the smallest that fits to one that does not bind; searched for
        when it is asked for."""
        return self.trace()

    def json(self) -> dict[str, Any]:
        """As plain values, but for the frontier."""
        return {
            **self.best.json(),
            "start": self.start.json(),
            "runners_up": [way.json() for way in self.runners_up],
            "binding": self.binding,
            "prices": [
                {"rank": p.rank, "gb": p.gb, "seconds": p.seconds, "seconds_per_gb": p.seconds_per_gb}
                for p in self.prices
            ],
            "room": [{"gb": price.gb, "seconds": price.seconds} for price in self.room],
            "kept": self.kept,
            "gains": [{"work": gain.work, "seconds": gain.seconds} for gain in self.gains],
            "unlimited_seconds": self.unlimited_seconds,
            "limit_bytes": self.limit_bytes,
            "margin": self.margin,
            "compared": self.compared,
            "cases": self.cases,
            "proven": self.proven,
            "fragment": self.fragment,
        }
