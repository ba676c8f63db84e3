"""One way to run a case: a layout and what is computed again, with what it takes and holds."""

from __future__ import annotations

from dataclasses import dataclass

from undertow.config.layout import Layout
from undertow.planner.geometry import Batch, Geometry
from undertow.planner.memory.model import Memory
from undertow.planner.memory.recompute import Recompute
from undertow.planner.pipeline.schedules import ScheduleName
from undertow.planner.tuner.case import Case
from undertow.planner.tuner.trials import Trial


@dataclass(frozen=True)
class Candidate:
    """An iteration takes `seconds` in simulation, and `memory` tells every rank.

    `proven`: no other layout of this geometry and schedule is faster within the limit.
    """

    case: Case
    layout: Layout
    recompute: Recompute
    seconds: float
    memory: Memory
    proven: bool

    @property
    def schedule(self) -> ScheduleName:
        """Of the case."""
        return self.case.schedule

    @property
    def chunks(self) -> int:
        """Stages of each pipeline rank."""
        return self.case.chunks

    @property
    def geometry(self) -> Geometry:
        """Of the case."""
        return self.case.memory.m.geometry

    @property
    def batch(self) -> Batch:
        """Of the case."""
        return self.case.memory.m.batch

    @property
    def peak_bytes(self) -> int:
        """Of the fullest rank."""
        return self.memory.peak.total_bytes

    @property
    def key(self) -> tuple[object, ...]:
        """The same for equal ways to run."""
        return self.geometry, self.batch, self.case.memory.m.implementation, self.schedule, self.layout

    @property
    def order(self) -> tuple[float, int, int, str]:
        """Faster first, then of lower peak, then with less computed again."""
        return round(self.seconds, 10), self.peak_bytes, len(self.recompute), str(self.layout)


def candidate_of(case: Case, trial: Trial, proven: bool) -> Candidate:
    """A trial, its memory told by the memory model itself."""
    layout, recompute = case.layout(trial.cuts), trial.recompute
    memory = case.weigh(layout, recompute, max(case.limits))
    return Candidate(case, layout, recompute, trial.seconds, memory, proven)
