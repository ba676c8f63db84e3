"""What of a configuration cannot go together, in sentences: what, why, and which key to change."""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping
from typing import NamedTuple

from undertow.config.schema import RunConfig

PAIRS: Mapping[tuple[str, str], str] = {
    ("mega_moe", "dispatch"): "mega_moe exchanges tokens in its own kernel, which leaves dispatch nothing to do",
    ("mega_moe", "grouped_gemm"): (
        "mega_moe multiplies by the experts in its own kernel, which leaves grouped_gemm nothing to do"
    ),
    ("mega_moe", "fp8"): "mega_moe multiplies by weights in bfloat16 alone",
}
"""Families that exclude each other: the first, the second, and why."""


class Condition(NamedTuple):
    """What a family needs of the rest of a configuration: the key that it looks at, whether that is as needed (asked
    with the GPUs of a node), why it is needed, and the values that would do."""

    family: str
    key: str
    holds: Callable[[RunConfig, int], bool]
    why: str
    mend: str


CONDITIONS: tuple[Condition, ...] = (
    Condition(
        "dispatch",
        "parallel.expert",
        lambda run, node: run.parallel.expert > 1,
        "there is nobody to send tokens to",
        "2 or more",
    ),
    Condition("mega_moe", "parallel.tensor", lambda run, node: run.parallel.tensor == 1, "it takes whole experts", "1"),
    Condition(
        "mega_moe",
        "parallel.expert",
        lambda run, node: 1 < run.parallel.expert <= min(8, node),
        "its kernel writes to the GPUs of one node, up to 8",
        "2 to 8, within a node",
    ),
    Condition(
        "mega_moe",
        "parallel.expert",
        lambda run, node: run.model.n_routed_experts % run.parallel.expert == 0,
        "every rank must hold as many experts as the next",
        "a divisor of model.n_routed_experts",
    ),
    Condition(
        "mega_moe",
        "numerics.dtype",
        lambda run, node: run.numerics.dtype == "bfloat16",
        "it multiplies by weights in bfloat16 alone",
        "bfloat16",
    ),
    Condition(
        "mega_moe",
        "train.z_loss_weight",
        lambda run, node: run.train.z_loss_weight == 0,
        "it has the plain balance loss alone",
        "0",
    ),
    Condition(
        "mega_moe",
        "train.bias_update_rate",
        lambda run, node: run.train.bias_update_rate == 0,
        "it has no router bias that follows the load",
        "0",
    ),
    Condition(
        "layout",
        "parallel.pipeline",
        lambda run, node: run.parallel.pipeline > 1,
        "one stage has all layers",
        "2 or more",
    ),
    Condition(
        "layout",
        "parallel.layout",
        lambda run, node: run.parallel.pipeline == 1 or run.parallel.layout is not None,
        "there is none to follow",
        "a layout, which undertow plan --tune finds",
    ),
)


def excluded(on: Collection[str]) -> tuple[tuple[str, str], ...]:
    """Pairs of `PAIRS` of which both families are on."""
    return tuple(pair for pair in PAIRS if set(pair) <= set(on))


def conflicts(config: RunConfig, gpus_per_node: int = 8) -> tuple[str, ...]:
    """A sentence for each thing that cannot be: families that exclude each other, then unmet conditions."""
    on = {name for name in type(config.optimizations).model_fields if getattr(config.optimizations, name) == "on"}
    pairs = (
        f"optimizations.{first} and optimizations.{second} are both on: {PAIRS[first, second]}; set "
        f"optimizations.{second}=off, or optimizations.{first}=off"
        for first, second in excluded(on)
    )
    unmet = (
        f"optimizations.{each.family} is on and {each.key} is {_value(config, each.key)}: {each.why}; set "
        f"optimizations.{each.family}=off, or {each.key} to {each.mend}"
        for each in CONDITIONS
        if each.family in on and not each.holds(config, gpus_per_node)
    )
    return (*pairs, *unmet)


def warnings(config: RunConfig) -> tuple[str, ...]:
    """A sentence for each thing that can be and may not be meant."""
    found: list[str] = []
    if config.optimizations.mega_moe == "on":
        found.append(
            f"optimizations.mega_moe is on: its published kernel has no clamp, model.swiglu_limit "
            f"{config.model.swiglu_limit:g} does not bound routed experts; set optimizations.mega_moe=off to have it"
        )
    if config.indexer.frozen and config.init_from is None and config.model.csa_ratio in config.model.compress_ratios:
        found.append(
            "indexer.frozen is true in a run from scratch: compressed sparse attention keeps choosing at random; set "
            "indexer.frozen=false to train its indexer"
        )
    return tuple(found)


def _value(config: RunConfig, key: str) -> object:
    section, name = key.split(".")
    value = getattr(getattr(config, section), name)
    return "null" if value is None else value
