"""Six published switches and the rungs of the published ladder, in terms of Undertow's families.

The ladder is AMD's of V4-Flash: 32 MI355X, 256 sequences of 4,096 tokens a step, one a forward pass, AdamW in bfloat16,
routing forced to be uniform.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import NamedTuple

from undertow.config.optimizations import FAMILIES
from undertow.config.schema import RunConfig


@dataclass(frozen=True)
class PublishedSwitch:
    """Families that a published switch turns on in either position, and the switches that it holds off when it is on.

    A family is on when any switch turns it on, after those that are held off are counted as off."""

    on: tuple[str, ...]
    off: tuple[str, ...] = ()
    holds_off: tuple[str, ...] = ()


SWITCHES: Mapping[str, PublishedSwitch] = {
    "FUSION": PublishedSwitch(on=("fusion",)),
    "ATTENTION": PublishedSwitch(on=("attention",)),
    "DEEPEP": PublishedSwitch(on=("dispatch", "grouped_gemm")),
    "SYNC_FREE": PublishedSwitch(on=("dispatch",)),
    "MEGA_MOE": PublishedSwitch(on=("mega_moe",), holds_off=("DEEPEP", "SYNC_FREE")),
    "LAYOUT": PublishedSwitch(on=("layout",), off=("recompute",)),
}
"""`PRIMUS_OPT_` and these names, to families. Dispatch without waits of the host is part of our `dispatch`. Without its
tuned layout the published run spreads layers evenly and recomputes the first `RECOMPUTED` of each stage."""

RECOMPUTED = 3


def families_of(switches: Mapping[str, bool]) -> dict[str, str]:
    """Each family, `on` or `off`, under published switches; one that is not given is on, as published."""
    given = {name: switches.get(name, True) for name in SWITCHES}
    held = {other for name, switch in SWITCHES.items() if given[name] for other in switch.holds_off}
    on = {
        family
        for name, switch in SWITCHES.items()
        for family in (switch.on if given[name] and name not in held else switch.off)
    }
    return {family: "on" if family in on else "off" for family in FAMILIES}


def words_of(switches: Mapping[str, bool], even: Sequence[int]) -> tuple[str, ...]:
    """`KEY=VALUE` words that put a recipe, whose layout is the tuned one, where published switches would.

    `even` are the layers of each stage when they are spread evenly.
    """
    families = families_of(switches)
    words = [f"optimizations.{family}={position}" for family, position in families.items()]
    if families["recompute"] == "on":
        firsts = (sum(even[:stage]) for stage in range(len(even)))
        layers = [
            layer for first, of in zip(firsts, even, strict=True) for layer in range(first, first + of)[:RECOMPUTED]
        ]
        words.append(f"recompute.layers={layers}")
    return tuple(words)


class Rung(NamedTuple):
    """One rung: what it adds, the families that are on, whether its attention backend is asked for by name, and what
    was measured: reported TFLOP/s/GPU and seconds an iteration."""

    number: int
    adds: str
    families: frozenset[str]
    named_backend: bool
    reported_tflops: float
    seconds: float


def _rung(number: int, adds: str, families: str, tflops: float, seconds: float, named: bool = False) -> Rung:
    return Rung(number, adds, frozenset(families.split()), named, tflops, seconds)


RUNGS: tuple[Rung, ...] = (
    _rung(0, "all off, three layers of a stage recomputed", "recompute", 439.5, 26.81),
    _rung(1, "kernel fusions", "recompute fusion", 875.4, 13.46),
    _rung(2, "attention by a backend asked for by name", "recompute fusion attention", 917.0, 12.85, named=True),
    _rung(3, "attention by the best backend", "recompute fusion attention", 954.3, 12.35),
    _rung(4, "direct dispatch", "recompute fusion attention dispatch", 966.5, 12.19),
    _rung(5, "grouped products", "recompute fusion attention dispatch grouped_gemm", 1042.6, 11.30),
    _rung(6, "dispatch, products and return in one kernel", "recompute fusion attention mega_moe", 1167.2, 10.10),
    _rung(7, "layout 10/12/12/9, nothing recomputed", "fusion attention mega_moe layout", 1378.8, 8.55),
)


class Nearest(NamedTuple):
    """The published rung that is nearest, and the families that are not as there, each `on` or `off` here."""

    rung: Rung
    differs: dict[str, str]
    named_backend: bool
    """Whether the attention backend is named where that rung's is not, or the reverse."""


def nearest_rung(on: Collection[str], *, named_backend: bool = False) -> Nearest:
    """The rung with the fewest families that differ from those that are `on`; of several, the highest."""

    def distance(rung: Rung) -> tuple[int, bool, int]:
        return len(rung.families.symmetric_difference(on)), rung.named_backend != named_backend, -rung.number

    rung = min(RUNGS, key=distance)
    differs = {name: "on" if name in on else "off" for name in FAMILIES if (name in on) != (name in rung.families)}
    return Nearest(rung, differs, "attention" in on and rung.named_backend != named_backend)


def families_on(config: RunConfig, *, tuned_layout: bool) -> frozenset[str]:
    """Families that a configuration has in effect: a switch whose keys were set otherwise counts by its keys.

    `tuned_layout` says that the layout is another than the even one.
    """
    on = {name for name in FAMILIES if getattr(config.optimizations, name) == "on"}
    by_key = {
        "attention": (config.attention.backend, config.attention.csa_backend) != ("reference", "reference"),
        "recompute": config.recompute.layers not in ("none", []) or bool(config.recompute.modules),
        "layout": tuned_layout,
    }
    return frozenset((on - by_key.keys()) | {name for name, found in by_key.items() if found})


def asks_by_name(config: RunConfig) -> bool:
    """Whether a kernel of attention is asked for by name."""
    return bool({config.attention.backend, config.attention.csa_backend} - {"auto", "reference"})
