"""Whether a run takes the time and the memory that were planned for it."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from statistics import median

from undertow.config.errors import UndertowError
from undertow.config.gpus import find_gpu
from undertow.config.schema import RunConfig
from undertow.planner.memory.model import GB
from undertow.planner.plan import plan

WIDTH = 0.05
"""Share of the projection that a measurement may be off by."""
WARM_UP, STEADY = 3, 5
"""Steps that do not count, for kernels are compiled and memory is found in them, and steps that are judged after."""


@dataclass(frozen=True)
class Band:
    """What was planned: seconds of a step, and bytes of the GPU of rank 0. Made by `band_of`.

    None is what there is no projection of, for the reason in `why`. `notes` are the sentences of the plan on what no
    measurement covers.
    """

    pool: str
    seconds: float | None
    peak_bytes: int | None
    why: str = ""
    notes: tuple[str, ...] = ()

    def sentence(self, seconds: Sequence[float], peak_bytes: int) -> str:
        """Steady steps beside the plan, their median counting, and the peak of rank 0: inside the band, or by how much
        outside, and what the plan was not measured for."""
        if self.peak_bytes is None:
            return f"plan: no prediction for {self.pool}: {self.why}"
        told = [self._told(self.peak_bytes / GB, peak_bytes / GB, "GB on rank 0", "memory")]
        if self.seconds is None:
            told.append(f"seconds are not compared: {self.why}")
        else:
            told.insert(0, self._told(self.seconds, median(seconds), "s a step", "time"))
        return f"plan for {self.pool}: {'; '.join(told)}"

    def _told(self, projected: float, measured: float, unit: str, subject: str) -> str:
        off = measured / projected - 1
        told = f"{measured:,.3g} {unit}, {projected:,.3g} planned"
        if abs(off) <= WIDTH:
            return f"{told}, inside the band of {WIDTH:.0%}"
        told += f", {abs(off):.1%} {'more' if off > 0 else 'less'}, outside the band of {WIDTH:.0%}"
        unsure = [note for note in self.notes if note.startswith(f"{subject}: ")]
        return f"{told} (not calibrated: {unsure[0].partition(': ')[2].replace('; ', ', ')})" if unsure else told


def band_of(config: RunConfig, gpus: int, device_name: str) -> Band:
    """The projection of a run on so many GPUs of the name that torch gives them, or of `cpu`."""
    gpu = find_gpu(device_name)
    if gpu is None:
        return Band(device_name, None, None, "the planner knows no rates of it")
    pool = f"{gpus}x{gpu.name}"
    try:
        found = plan(config, pool)
    except UndertowError as error:
        return Band(pool, None, None, str(error))
    why = _changing(config)
    seconds = None if why else found.time.seconds_per_iteration
    return Band(pool, seconds, found.memory.stages[0].total_bytes, why, found.uncalibrated)


def _changing(config: RunConfig) -> str:
    """Why the first steps are not those of the plan, empty if they are."""
    for name in ("batch_size_schedule", "sequence_length_schedule"):
        if getattr(config.train, name):
            return f"train.{name} changes the steps"
    for name in ("dense_steps", "warmup_steps"):
        if getattr(config.indexer, name):
            return f"indexer.{name} makes the first steps others"
    return ""
