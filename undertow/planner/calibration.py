"""Measured memory that closed forms leave out, under a name and with its source."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from undertow.planner.activations import Implementation, Microbatch
from undertow.planner.state import StateProfile


@dataclass(frozen=True)
class MemoryCalibration:
    """A constant fitted to measured peaks, and the runs that it was fitted to.

    `constant` are the bytes of a rank beyond state and saved activations; they contain `heap`, the symmetric heap of
    those runs, transients of the backward pass, collectives, the allocator's slack and the runtime. `saved` are
    measured bytes of one layer by kind of attention, for one microbatch, and replace the table. `peaks` are the
    measured peaks in bytes by layout and number of recomputed layers at the start of each stage. The other fields are
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
    peaks: Mapping[str, int] = field(default_factory=dict)
    saved: Mapping[str, int] = field(default_factory=dict)


MI355X_FLASH = MemoryCalibration(
    name="mi355x-v4-flash",
    source="fitted to the four peaks of AMD's published V4-Flash pretraining on 32 MI355X (bf16, sequences of 4,096)",
    implementation="primus",
    profile="published-bf16",
    constant=10_750_000_000,
    heap=3_556_769_792,
    tensor=1,
    context=1,
    expert=8,
    tokens=4096,
    peaks={
        "Et*10|t*11|t*11|t*11mL, 3": 217_200_000_000,
        "Et*10|t*12|t*12|t*9mL, 3": 225_900_000_000,
        "Et*10|t*11|t*11|t*11mL, 0": 260_900_000_000,
        "Et*10|t*12|t*12|t*9mL, 0": 260_900_000_000,
    },
)
"""Used for a plan in `primus` and nothing else: the constant is that implementation's."""


def calibration_for(implementation: Implementation) -> MemoryCalibration | None:
    """The shipped calibration of an implementation, if there is one."""
    return MI355X_FLASH if implementation == MI355X_FLASH.implementation else None


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
