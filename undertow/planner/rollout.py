"""GPUs that sample for reinforcement learning: replicas of a serving engine beside the GPUs that train."""

from __future__ import annotations

from dataclasses import dataclass

from undertow.config.clusters import Pool
from undertow.config.errors import ConfigError
from undertow.config.model import ModelConfig
from undertow.planner.geometry import Geometry, build_geometry
from undertow.planner.memory import GB
from undertow.planner.serving import ServingPlan, WeightFormat, plan_serving

BUCKETS = 2
"""Buffers that receive new weights: one is filled while the other is read."""

WEIGHTS: WeightFormat = "fp8"
"""Stored weights: FP8, which every GPU of the catalogue computes in."""


@dataclass(frozen=True)
class Rollout:
    """Replicas of `geometry.gpus` GPUs each, in `pool`; `serving` is the memory of one GPU."""

    pool: Pool
    geometry: Geometry
    serving: ServingPlan

    @property
    def replicas(self) -> int:
        """Copies of the model that sample side by side."""
        return self.pool.count // self.geometry.gpus

    @property
    def fits(self) -> bool:
        """Whether each replica has room for a sequence."""
        return self.serving.fits

    @property
    def sequences(self) -> int:
        """Sequences that all replicas hold at once."""
        return self.replicas * self.serving.sequences


def plan_rollout(config: ModelConfig, pool: Pool, length: int) -> Rollout:
    """Replicas as small as fit, for most of them; if none fits, one over as many GPUs as can share the model.

    Tensor parallelism cuts attention, expert parallelism deals the experts out, both over all GPUs of a replica.
    `length` are the tokens of a sequence, prompt and answer.
    """
    found = None
    for width in range(1, pool.count + 1):
        if pool.count % width:
            continue
        geometry = build_geometry(width, tensor=width, expert=width)
        try:
            serving = plan_serving(config, geometry, pool.gpu.memory, length, weights=WEIGHTS, update_buckets=BUCKETS)
        except ConfigError:
            if found is None:
                raise
            continue
        found = Rollout(pool, geometry, serving)
        if found.fits:
            break
    assert found is not None
    return found


def refusal(rollout: Rollout) -> str | None:
    """In a sentence, what does not fit."""
    if rollout.fits:
        return None
    serving, width = rollout.serving, rollout.geometry.gpus
    if serving.room < 0:
        need = serving.budget - serving.room
        what = f"weights and update buckets take {need / GB:,.1f} GB of the {serving.budget / GB:,.1f} GB to use"
    else:
        what = (
            f"a sequence of {serving.length} tokens takes {serving.sequence_bytes / GB:,.1f} GB of cache, "
            f"{serving.room / GB:,.1f} GB are left"
        )
    return (
        f"rollout does not fit {rollout.pool}: on each GPU of a replica of {width}, {what}; take more GPUs or "
        "ones with more memory"
    )
