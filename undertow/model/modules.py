"""Modules of a layer that the backward pass can compute again by themselves, and the saved tensors that each frees.

Nothing here imports torch.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from typing import get_args

from undertow.config.training import RecomputeConfig, RecomputeModule

Again = int | tuple[int, RecomputeModule]
"""What is computed again: a layer by its number, or one of its modules."""

MODULES: tuple[RecomputeModule, ...] = get_args(RecomputeModule)
WITHIN_MOE: frozenset[RecomputeModule] = frozenset(("expert_activation", "shared_expert"))
"""Modules that `moe` contains."""
AFTER_ATTENTION: frozenset[RecomputeModule] = frozenset((*WITHIN_MOE, "moe"))
"""Modules of the second half of a layer, which the backward pass has done with when it comes to the first."""

_FREED: Mapping[tuple[str, str], RecomputeModule] = {
    ("mixers", "coefficients"): "mixer_norm",
    ("mixers", "output of attention"): "output",
    ("mixers", "output of the experts"): "moe",
    ("norms", "inputs"): "mixer_norm",
    ("norms", "outputs"): "mixer_norm",
    ("attention", "queries"): "query",
    ("attention", "output and log-sum-exp"): "attention_core",
    ("attention", "selection"): "attention_core",
    ("attention", "de-rotated output"): "attention_core",
    ("attention", "output latent"): "output",
    ("moe", "activation"): "expert_activation",
    ("moe", "shared expert"): "shared_expert",
}


def again_of(recompute: RecomputeConfig, layers: int) -> frozenset[Again]:
    """What a recipe computes again of a trunk of so many layers. A layer named whole and by module counts as whole."""
    every = range(layers)
    whole = frozenset(_layers(recompute.layers, every))
    found: set[Again] = set(whole)
    for name, chosen in recompute.modules.items():
        found.update((layer, name) for layer in _layers(chosen, every) if layer not in whole)
    return frozenset(found)


def _layers(chosen: str | Sequence[int], every: range) -> Sequence[int]:
    return {"none": (), "all": every}[chosen] if isinstance(chosen, str) else chosen


def modules_of(recompute: Collection[Again], layer: int) -> frozenset[RecomputeModule]:
    """Modules of a layer that are computed again by themselves."""
    return frozenset(each[1] for each in recompute if isinstance(each, tuple) and each[0] == layer)


def frees(module: str, name: str, scores_stay: bool) -> frozenset[RecomputeModule]:
    """The modules that free a term of a layer's saved tensors if they are computed again.

    `scores_stay`: the balance loss, outside the layer, reads the router's scores.
    """
    found: set[RecomputeModule] = set()
    if own := _FREED.get((module, name)):
        found.add(own)
    if module == "moe" and not (name == "scores" and scores_stay):
        found.add("moe")
    return frozenset(found)


def freed_at_first(module: RecomputeModule, size: int) -> int:
    """Of the bytes that a module frees, those of the first half of the layer, which has the attention."""
    if module == "mixer_norm":  # the same at both sites
        return size - size // 2
    return 0 if module in AFTER_ATTENTION else size
