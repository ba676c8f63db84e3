"""Calibrations: measured runs, and what is fitted to them: rates of time, and memory that closed forms leave out."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import cached_property

from undertow.config.errors import ConfigError
from undertow.config.gpus import Gpu
from undertow.config.model import LayerKind, ModelConfig
from undertow.planner.geometry import Batch, Geometry
from undertow.planner.memory.activations import Implementation, Microbatch, symmetric_heap
from undertow.planner.memory.state import StateProfile
from undertow.planner.pipeline.schedules import ScheduleName
from undertow.planner.timing.rates import Core, Rates


@dataclass(frozen=True)
class Row:
    """One measured run: layout, what was recomputed (as `--recompute` takes it), schedule, microbatches a rank; seconds
    of an iteration and the peak of the fullest GPU, as far as they are known."""

    layout: str
    recompute: str = "none"
    schedule: ScheduleName = "1f1b"
    microbatches: int = 1
    seconds: float | None = None
    peak_bytes: int | None = None

    def __str__(self) -> str:
        return f"{self.layout}, recompute {self.recompute}"


@dataclass(frozen=True)
class Measurements:
    """Runs of one model on one cluster that differ in layout, recomputation and schedule.

    `core` are measured times of the attention core, empty if they are not known; `saved` measured bytes of one layer by
    kind for one microbatch, which replace the table; `transfer_seconds` the time of one microbatch from a stage to the
    next, 0 if it is not known. `date` and `commit` say `unknown` where they are.
    """

    name: str
    source: str
    date: str
    commit: str
    gpu: Gpu
    config: ModelConfig
    preset: str
    frozen_indexer: bool
    sequence_length: int
    micro_batch: int
    geometry: Geometry
    implementation: Implementation
    profile: StateProfile
    rows: tuple[Row, ...]
    core: Mapping[LayerKind, Core] = field(default_factory=dict)
    saved: Mapping[str, int] = field(default_factory=dict)
    transfer_seconds: float = 0.0

    def microbatch(self, microbatches: int = 1) -> Microbatch:
        """The forward pass of those runs."""
        size = microbatches * self.micro_batch * self.geometry.data
        return Microbatch(
            self.config, self.geometry, Batch(size, self.sequence_length, self.micro_batch), self.implementation
        )


@dataclass(frozen=True)
class MemoryCalibration:
    """A constant fitted to measured peaks, and the runs that it was fitted to.

    `constant` are the bytes of a rank beyond state and saved activations; they contain `heap`, the symmetric heap of
    those runs, transients of the backward pass, collectives, the allocator's slack and the runtime. `saved` are
    measured bytes of one layer by kind of attention, for one microbatch, and replace the table. The other fields are
    the implementation, state profile and widths of those runs, and the tokens of a microbatch on one rank.
    """

    name: str
    source: str
    implementation: Implementation
    profile: str
    constant: int
    heap: int
    tensor: int
    context: int
    expert: int
    tokens: int
    saved: Mapping[str, int] = field(default_factory=dict)


def check_constant(measured: Measurements, constant: int | None) -> None:
    """Raises `ConfigError` for a constant that leaves less than nothing for what it is of."""
    if constant is None:
        return
    heap = memory_calibration(measured, constant).heap
    if constant < heap:
        beside = f"the symmetric heap alone is {heap / 1e9:,.2f} GB" if heap else "it cannot be negative"
        raise ConfigError(
            f"calibration {measured.name}: the memory constant is {constant / 1e9:,.2f} GB, but {beside}; "
            f"implementation {measured.implementation} with such recomputation keeps more than the runs did, so check "
            "peak_bytes, recompute, state and implementation"
        )


def memory_calibration(measured: Measurements, constant: int) -> MemoryCalibration:
    """A constant beside the runs that it is of."""
    m, geometry = measured.microbatch(), measured.geometry
    return MemoryCalibration(
        measured.name,
        measured.source,
        measured.implementation,
        measured.profile.name,
        constant,
        symmetric_heap(m.config, geometry, m.own) if measured.implementation == "primus" else 0,
        geometry.tensor,
        geometry.context,
        geometry.expert,
        m.rows,
        measured.saved,
    )


@dataclass(frozen=True)
class Errors:
    """Of a row, fitted over measured less 1: of its seconds and of its peak, None where there is none."""

    seconds: float | None = None
    peak_bytes: float | None = None


@dataclass(frozen=True)
class Calibration:
    """Measured runs and what was fitted to them. `constant` are bytes, None where no peak was measured; `errors` has an
    entry a row; `warnings` are sentences on how good the fit is."""

    measured: Measurements
    rates: Rates
    constant: int | None = None
    errors: tuple[Errors, ...] = ()
    warnings: tuple[str, ...] = ()

    @property
    def name(self) -> str:
        """Of the runs."""
        return self.measured.name

    @property
    def rows(self) -> tuple[Row, ...]:
        """The runs."""
        return self.measured.rows

    @property
    def of_operators(self) -> bool:
        """Whether single operators were measured on one GPU, and no runs: then `rows` are empty, and implementation,
        state and widths of `measured` say nothing."""
        return self.rates.operators is not None

    @cached_property
    def memory(self) -> MemoryCalibration | None:
        """The fitted constant, if there is one."""
        return None if self.constant is None else memory_calibration(self.measured, self.constant)

    def memory_of(self, implementation: Implementation) -> MemoryCalibration | None:
        """The constant, for the implementation that it was measured with: for another one it says nothing."""
        return self.memory if implementation == self.measured.implementation else None

    def rates_of(self, gpu: Gpu) -> Rates:
        """The rates, or for another GPU their guess in proportion to the peak in BF16."""
        home = self.measured.gpu
        return self.rates if gpu == home else self.rates.scaled(gpu.name, gpu.bf16 / home.bf16)


def uncalibrated(m: Microbatch, profile: StateProfile, calibration: MemoryCalibration | None) -> tuple[str, ...]:
    """In sentences, what of a memory projection no measured row covers."""
    if calibration is None:
        out = "transients, collectives, allocator and runtime are left out"
        if m.implementation == "reference":
            out = "transients are those of one GPU; collectives, allocator and runtime are left out"
        return (f"memory: no peak was measured for implementation {m.implementation} in this geometry; {out}",)
    given = {
        "profile": profile.name,
        "tensor": m.geometry.tensor,
        "context": m.geometry.context,
        "expert": m.geometry.expert,
        "tokens": m.rows,
    }
    return tuple(
        f"memory: {name} is {value}, the calibration {calibration.name} was measured at {getattr(calibration, name)}"
        for name, value in given.items()
        if value != getattr(calibration, name)
    )
