"""Families of optimisations as one table: what each switch sets, what it needs, and whether it is built."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any

from undertow.config.errors import ConfigError
from undertow.config.layer import Entry, Layer, Rank, put
from undertow.config.schema import OptimizationsConfig


@dataclass(frozen=True)
class Family:
    """One switch: the keys it sets in either position, its conditions as a sentence, and whether it can run."""

    conditions: str
    built: bool = False
    on: Mapping[str, Any] = field(default_factory=dict)
    off: Mapping[str, Any] = field(default_factory=dict)


FUSED = (
    *("wide_linear", "rms_norm", "rotary", "head_norm_rotary", "hyper_in", "hyper_expand", "hyper_head"),
    *(
        "compress_pool",
        "route",
        "dispatch_order",
        "permute",
        "unpermute",
        "permute_weights",
        "swiglu",
        "linear_cross_entropy",
        "linear_cross_entropy_mean",
    ),
)
"""Operators of the family `fusion`."""


def _backends(ops: Iterable[str], backend: str) -> dict[str, str]:
    return {f"ops.{op}": backend for op in ops}


FAMILIES: dict[str, Family] = {
    "fusion": Family(
        "a GPU with Triton kernels for norms, rotary, hyper-connections, compressors, router, permutations, SwiGLU and "
        "the loss",
        built=True,
        on=_backends(FUSED, "auto"),
        off=_backends(FUSED, "reference"),
    ),
    "attention": Family(
        "a GPU with a Triton kernel for its architecture and for the head width in use",
        built=True,
        on={"attention.backend": "auto", "attention.csa_backend": "auto"},
        off={"attention.backend": "reference", "attention.csa_backend": "reference"},
    ),
    "dispatch": Family("expert parallelism over more than one GPU, and router weights in float32"),
    "grouped_gemm": Family(
        "a GPU with a grouped matrix product for the expert widths in use",
        built=True,
        on=_backends(("grouped_linear",), "auto"),
        off=_backends(("grouped_linear",), "reference"),
    ),
    "mega_moe": Family(
        "2 to 8 expert-parallel GPUs of one node that divide the experts, bfloat16 weights and no tensor parallelism; "
        "it replaces dispatch and grouped_gemm"
    ),
    "layout": Family(
        "a pipeline of more than one stage",
        off={"parallel.layout": None},
    ),
    "recompute": Family(
        "no special hardware; it trades time for memory",
        built=True,
        on={"recompute.layers": "all"},
        off={"recompute.layers": "none"},
    ),
    "fp8": Family("a GPU with 8-bit matrix units; its dialect (ocp or fnuz) follows from the architecture"),
}


def resolve(switches: Mapping[str, Any]) -> dict[str, Any]:
    """The keys, with values, that these switches (family to `on`, `off` or a boolean) set; unknown ones set none."""
    keys: dict[str, Any] = {}
    for name, value in switches.items():
        family = FAMILIES.get(name)
        if family and value in ("on", True):
            keys |= family.on
        elif family and value in ("off", False):
            keys |= family.off
    return keys


def expand(layer: Layer) -> Layer:
    """What the switches of one layer set.

    A switch in a recipe works just beneath the recipe's own keys, so a field set there, or in a recipe that extends it,
    wins; one from the environment or the command line stands above every recipe and below any field set likewise.
    """
    expanded: Layer = {}
    for name in FAMILIES:
        entry = layer.get(f"optimizations.{name}")
        if entry is not None:
            rank = Rank.FILE if entry.rank is Rank.FILE else Rank.SWITCH
            for key, value in resolve({name: entry.value}).items():
                put(expanded, key, Entry(value, f"optimizations.{name} ({entry.source})", rank))
    return expanded


def unbuilt(config: OptimizationsConfig) -> dict[str, str]:
    """Families that are switched on without being built, each with its conditions."""
    on = {name: family for name, family in FAMILIES.items() if getattr(config, name) == "on"}
    return {name: family.conditions for name, family in on.items() if not family.built}


def refuse_unbuilt(config: OptimizationsConfig) -> None:
    """Refuse to launch with a family that is not built yet. Raises `ConfigError` naming each, and its conditions."""
    missing = unbuilt(config)
    if missing:
        needs = "; ".join(f"{name} needs {conditions}" for name, conditions in missing.items())
        keys = ", ".join(f"optimizations.{name}" for name in missing)
        raise ConfigError(f"{keys}: not built yet, so it cannot run; set it to off ({needs})")
