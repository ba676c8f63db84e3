"""What a serving replica has room for: weights in their stored format, cache, and sequences of a length."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Literal, get_args

from undertow.config.errors import ConfigError
from undertow.config.model import ModelConfig
from undertow.config.presets import nearest
from undertow.model.parameters import hash_table_entries, router_biases
from undertow.model.weights import Weight, all_weights
from undertow.planner.geometry import Geometry, check_model
from undertow.planner.memory.parameters import local
from undertow.planner.serving.cache import CacheBytes, CacheFormat

WeightFormat = Literal["bf16", "fp8", "fp4"]
"""`bf16`: all, less what stays float32; `fp8`: FP8 with scales of 128 x 128 where the release has FP8 or FP4, float32
scales for experts; `fp4`: as released, experts in FP4 with one-byte scales of 32 values."""

_BLOCK, _FP4_GROUP = 128, 32


def weight_format_of(name: str) -> WeightFormat:
    """The format of that name. Raises `ConfigError` with the nearest one."""
    known = get_args(WeightFormat)
    if name not in known:
        raise ConfigError(f"unknown weight format '{name}'{nearest(name, list(known))} (formats: {', '.join(known)})")
    return name  # type: ignore[return-value]


def stored_bytes(weight: Weight, form: WeightFormat) -> int:
    """Bytes of one tensor with its scales."""
    if weight.stored == "fp32":
        return 4 * weight.elements
    if form == "bf16" or weight.stored == "bf16":
        return 2 * weight.elements
    *lead, rows, columns = weight.shape
    experts = lead[0] if lead else 1
    if form == "fp4" and weight.stored == "fp4":
        return experts * rows * (-(-columns // 2) + -(-columns // _FP4_GROUP))
    blocks = experts * -(-rows // _BLOCK) * -(-columns // _BLOCK)
    return weight.elements + blocks * (4 if weight.stored == "fp4" else 1)


def weights_bytes(
    config: ModelConfig, form: WeightFormat, geometry: Geometry | None = None, *, mtp: bool = True
) -> int:
    """Bytes of all weights, buffers included, on one rank; without a geometry, of the whole model.

    Hash tables, in int64, and router biases are whole on every rank.
    """
    ranks = geometry or Geometry()
    weights: Iterable[Weight] = all_weights(config)
    biases = router_biases(config)
    if not mtp:
        weights = (weight for weight in weights if not weight.name.startswith("mtp."))
        biases -= config.num_nextn_predict_layers * config.n_routed_experts
    held = sum(stored_bytes(local(weight, ranks), form) for weight in weights)
    return held + 8 * hash_table_entries(config) + 4 * biases


def active_bytes(config: ModelConfig, form: WeightFormat, geometry: Geometry | None = None, tokens: int = 1) -> float:
    """Bytes of weights that a rank reads for a step of so many tokens, on average over ranks: everything but the
    embedding, and of the routed experts those that a token takes. MTP blocks do not count.

    Of E experts, n tokens that take k each by chance need E (1 - (1 - k/E)^n).
    """
    ranks, experts = geometry or Geometry(), config.n_routed_experts
    share = 1 - (1 - config.num_experts_per_tok / experts) ** tokens
    return sum(
        stored_bytes(local(weight, ranks), form) * (share if weight.split == "experts" else 1)
        for weight in all_weights(config)
        if not weight.name.startswith(("mtp.", "embed."))
    )


@dataclass(frozen=True)
class ServingPlan:
    """Memory of one GPU of a replica. `sequences` of `length` tokens fit at once, or `tokens` of one sequence.

    `form` is that of the stored weights.
    """

    length: int
    form: WeightFormat
    weights: int
    update_buckets: int
    workspace: int
    cache: CacheBytes
    budget: int

    @property
    def room(self) -> int:
        """Bytes for the cache, negative if not even the weights fit."""
        return self.budget - self.weights - self.update_buckets - self.workspace

    @property
    def sequence_bytes(self) -> int:
        """Cache of one sequence of `length` tokens."""
        return self.cache.of_length(self.length)

    @property
    def sequences(self) -> int:
        """Sequences of `length` tokens that fit."""
        return max(0, self.room // self.sequence_bytes)

    @property
    def tokens(self) -> int:
        """Longest context that fits if one sequence has all the room, at most what the model is made for."""
        if self.room < self.cache.fixed:
            return 0
        most = self.cache.config.max_position_embeddings
        return (
            most if not self.cache.per_token else min(most, int((self.room - self.cache.fixed) / self.cache.per_token))
        )

    @property
    def fits(self) -> bool:
        """Whether at least one sequence of `length` fits."""
        return self.sequences >= 1


def plan_serving(
    config: ModelConfig,
    geometry: Geometry,
    gpu_memory: int,
    length: int,
    *,
    weights: WeightFormat = "fp4",
    cache: CacheFormat = "fp8",
    online: bool = True,
    mtp: bool = False,
    memory_fraction: float = 0.9,
    update_buckets: int = 0,
    bucket_bytes: int = 512 << 20,
    workspace: int = 0,
) -> ServingPlan:
    """Room of a replica of `geometry.gpus` ranks, at `memory_fraction` of `gpu_memory` bytes a GPU.

    Every rank has the whole cache: there is one key-value head, which tensor parallelism cannot cut. `update_buckets`
    are buffers of `bucket_bytes` that receive new weights; `workspace` is what activations and libraries take.
    Raises `ConfigError` for a geometry the model does not divide into, for a pipeline, and for values out of bounds.
    """
    check_model(config, geometry)
    if geometry.pipeline != 1 or geometry.context != 1:
        raise ConfigError(
            f"serving replicas have neither stages nor context parallelism, given pipeline {geometry.pipeline} and "
            f"context {geometry.context}; set both to 1"
        )
    if not 0 < memory_fraction <= 1:
        raise ConfigError(f"memory_fraction is {memory_fraction}; allowed: above 0, at most 1")
    if not 1 <= length <= config.max_position_embeddings:
        raise ConfigError(f"length is {length}; allowed: 1 to max_position_embeddings {config.max_position_embeddings}")
    for name, value in (("update_buckets", update_buckets), ("bucket_bytes", bucket_bytes), ("workspace", workspace)):
        if value < 0:
            raise ConfigError(f"{name} is {value}; allowed: at least 0")
    return ServingPlan(
        length,
        weights,
        weights_bytes(config, weights, geometry, mtp=mtp),
        update_buckets * bucket_bytes,
        workspace,
        CacheBytes(config, cache, online, mtp),
        int(gpu_memory * memory_fraction),
    )
