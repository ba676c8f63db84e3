"""A serving plan: replicas of a model on one pool of GPUs, with nothing that trains beside them."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from undertow.config.clusters import parse_cluster
from undertow.config.errors import ConfigError
from undertow.config.gpus import Gpu
from undertow.config.model import ModelConfig
from undertow.config.schema import RunConfig
from undertow.model.parameters import closed_counts
from undertow.planner.serving.cache import cache_format_of
from undertow.planner.serving.replicas import Replicas, plan_replicas, refusal
from undertow.planner.serving.room import weight_format_of
from undertow.planner.serving.text import replicas_document, replicas_text, unmeasured
from undertow.planner.subject import read_subject


@dataclass(frozen=True)
class ServePlan:
    """A model under its name, and the replicas that serve it. Built by `plan_serve`."""

    name: str
    config: ModelConfig
    replicas: Replicas

    @property
    def fits(self) -> bool:
        """Whether each replica has room for a sequence of the planned length."""
        return self.replicas.fits

    @property
    def refusal(self) -> str | None:
        """In one sentence, what does not fit."""
        return refusal(self.replicas, self.name)

    @property
    def uncalibrated(self) -> tuple[str, ...]:
        """In sentences, what no measurement covers."""
        return tuple(f"serving: {note}" for note in unmeasured(self.replicas))

    def json(self) -> dict[str, Any]:
        """The plan as plain values under stable names."""
        counts = closed_counts(self.config)
        return {
            "parameters": {
                "main": counts.main,
                "total": counts.total,
                "active": counts.active,
                "by_module": dict(counts.by_module),
            },
            "serving": replicas_document(self.replicas),
            "fits": self.fits,
            "refusal": self.refusal,
            "uncalibrated": list(self.uncalibrated),
        }

    def __str__(self) -> str:
        head = f"{self.name} served on {self.replicas.pool}: {'fits' if self.fits else 'DOES NOT FIT'}"
        notes = ["not calibrated", *(f"  {note}" for note in self.uncalibrated)]
        return "\n".join([head, *replicas_text(self.replicas), "", *notes])


def plan_serve(
    config_or_recipe: str | Path | ModelConfig | RunConfig,
    gpus: str,
    *,
    tensor: int | None = None,
    expert: int | None = None,
    length: int | None = None,
    weights: str | None = None,
    cache: str = "fp8",
    memory_fraction: float = 0.9,
    own_gpus: Sequence[Gpu] = (),
    overrides: Sequence[str] = (),
    environment: Mapping[str, str] | None = None,
) -> ServePlan:
    """What replicas of a model on `NxGPU` have room for. What is None is chosen: the narrowest replica that fits, the
    smallest weights that the GPU computes in, and the sequence length of the model's defaults or recipe.

    Raises `ConfigError` for what cannot be; a plan that does not fit is returned and says so (`fits`, `refusal`).
    """
    pools = parse_cluster(gpus, own_gpus)
    if len(pools) != 1:
        raise ConfigError(f"gpus '{gpus}': {len(pools)} pools; a serving plan is for one")
    subject = read_subject(config_or_recipe, pools[0].count, overrides, environment or {})
    config = subject.run.model
    replicas = plan_replicas(
        config,
        pools[0],
        subject.run.train.sequence_length if length is None else length,
        weights=None if weights is None else weight_format_of(weights),
        cache=cache_format_of(cache),
        memory_fraction=memory_fraction,
        tensor=tensor,
        expert=expert,
    )
    return ServePlan(subject.name, config, replicas)
