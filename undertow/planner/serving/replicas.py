"""Replicas of a serving engine on one pool of GPUs: how wide, how many, and what each has room for."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from math import prod

from undertow.config.clusters import Pool
from undertow.config.errors import ConfigError
from undertow.config.gpus import Gpu
from undertow.config.model import ModelConfig
from undertow.model.weights import all_weights
from undertow.planner.geometry import Geometry, build_geometry, check_model
from undertow.planner.memory.model import GB
from undertow.planner.serving.cache import CacheFormat
from undertow.planner.serving.decode import cache_read_bytes, decode_work
from undertow.planner.serving.room import ServingPlan, WeightFormat, active_bytes, plan_serving

BUCKETS, LEAST_BUCKET = 2, 256 << 20
"""Buffers that receive new weights (one is filled while the other is read), and the fewest bytes of each."""

ROLLOUT_WEIGHTS: WeightFormat = "fp8"
"""Stored weights of GPUs that sample for training: FP8, which every GPU of the catalogue computes in."""

LENGTHS: tuple[int, ...] = (4096, 32_768, 131_072, 1_048_576)
"""Tokens of a sequence that are told unasked."""


@dataclass(frozen=True)
class AtLength:
    """Sequences of `length` tokens: bytes of cache of one, how many all replicas hold, operations for the next token,
    and seconds that a step takes at least, with one sequence a replica and with all that fit (None where none does).

    The seconds are the longer of two: reading from memory the weights of all experts that so many tokens need (see
    `active_bytes`) and the cache, and the operations at the peak rate of the stored weights. A lower bound.
    """

    length: int
    sequence_bytes: int
    sequences: int
    flops_per_token: float
    least_seconds: float
    least_seconds_full: float | None


@dataclass(frozen=True)
class Replicas:
    """Replicas of `geometry.gpus` GPUs each, in `pool`; `serving` is the memory of one GPU."""

    pool: Pool
    geometry: Geometry
    serving: ServingPlan

    @property
    def replicas(self) -> int:
        """Copies of the model that work side by side."""
        return self.pool.count // self.geometry.gpus

    @property
    def idle(self) -> int:
        """GPUs that are left over."""
        return self.pool.count % self.geometry.gpus

    @property
    def fits(self) -> bool:
        """Whether each replica has room for a sequence."""
        return self.serving.fits

    @property
    def sequences(self) -> int:
        """Sequences that all replicas hold at once: data-parallel ranks of a replica have caches of their own."""
        return self.replicas * self.geometry.data * self.serving.sequences

    def at(self, length: int) -> AtLength:
        """What sequences of so many tokens take."""
        here = replace(self, serving=replace(self.serving, length=length))
        serving = here.serving
        return AtLength(
            length,
            serving.sequence_bytes,
            here.sequences,
            decode_work(serving.cache.config, length).total,
            here._least_seconds(1, 1),
            here._least_seconds(serving.sequences, self.geometry.data) if serving.sequences else None,
        )

    def _least_seconds(self, sequences: int, ranks: int) -> float:
        """Of a step of a replica in which so many data-parallel ranks have so many sequences each."""
        serving, gpu, config = self.serving, self.pool.gpu, self.serving.cache.config
        tokens = sequences * ranks
        weights = active_bytes(config, serving.form, self.geometry, tokens)
        read = weights + sequences * cache_read_bytes(serving.cache, serving.length)
        peak = {"bf16": gpu.bf16, "fp8": gpu.fp8, "fp4": gpu.fp4 or gpu.fp8}[serving.form]
        work = tokens * decode_work(config, serving.length).total / (self.geometry.gpus * peak)
        return max(read / gpu.bandwidth, work)

    @property
    def lengths(self) -> tuple[AtLength, ...]:
        """The planned length and the usual ones that the model is made for, shortest first."""
        most = self.serving.cache.config.max_position_embeddings
        return tuple(self.at(n) for n in sorted({self.serving.length, *(n for n in LENGTHS if n <= most)}))


def best_format(gpu: Gpu) -> WeightFormat:
    """The smallest stored weights that a GPU computes in."""
    return "fp4" if gpu.fp4 else "fp8"


def bucket_bytes(config: ModelConfig) -> int:
    """Bytes of a buffer for new weights: 256 MiB, or the largest tensor in bf16, as training sends it, an expert's
    matrices one by one."""
    sizes = (prod(w.shape[1:] if w.split == "experts" else w.shape) for w in all_weights(config))
    return max(LEAST_BUCKET, 2 * max(sizes))


def plan_replicas(
    config: ModelConfig,
    pool: Pool,
    length: int,
    *,
    weights: WeightFormat | None = None,
    cache: CacheFormat = "fp8",
    memory_fraction: float = 0.9,
    buckets: int = 0,
    tensor: int | None = None,
    expert: int | None = None,
) -> Replicas:
    """Replicas as small as fit, for most of them; if none fits, the widest that can share the model. Widths that leave
    no GPU over go first.

    Tensor parallelism cuts attention, as wide as the model allows, expert parallelism deals the experts out over all
    GPUs of a replica. `length` are the tokens of a sequence, prompt and answer; `buckets` the buffers for new weights.
    `weights` are stored in the best format that the GPU computes in. Raises `ConfigError` for widths that cannot be.
    """
    form = weights or best_format(pool.gpu)
    found = None
    for geometry in _geometries(config, pool, tensor, expert):
        serving = plan_serving(
            config, geometry, pool.gpu.memory, length,
            weights=form, cache=cache, memory_fraction=memory_fraction, update_buckets=buckets,
            bucket_bytes=bucket_bytes(config),
        )  # fmt: skip
        here = Replicas(pool, geometry, serving)
        if here.fits:
            return here
        found = here if found is None or geometry.gpus > found.geometry.gpus else found
    assert found is not None  # a replica of one GPU can always be tried
    return found


def plan_rollout(
    config: ModelConfig, pool: Pool, length: int, weights: WeightFormat | None = None, memory_fraction: float = 0.9
) -> Replicas:
    """Replicas that sample for reinforcement learning: FP8 weights unasked, and buffers for new ones."""
    form = weights or ROLLOUT_WEIGHTS
    return plan_replicas(config, pool, length, weights=form, memory_fraction=memory_fraction, buckets=BUCKETS)


def _geometries(config: ModelConfig, pool: Pool, tensor: int | None, expert: int | None) -> Iterator[Geometry]:
    """Replicas from the narrowest on, or the one whose widths are given."""
    if tensor is not None or expert is not None:
        cut, dealt = tensor if tensor is not None else 1, expert if expert is not None else tensor or 1
        geometry = build_geometry(max(cut, dealt), tensor=cut, expert=dealt)
        if geometry.gpus > pool.count:
            raise ConfigError(f"a replica of tensor {cut} and expert {dealt} needs {geometry.gpus} GPUs, given {pool}")
        yield geometry
        return
    widths = [n for n in range(1, config.n_routed_experts + 1) if config.n_routed_experts % n == 0 and n <= pool.count]
    for width in sorted(widths, key=lambda n: (pool.count % n != 0, n)):
        yield next(g for g in _cuts(width) if _divides(config, g))


def _cuts(width: int) -> Iterator[Geometry]:
    for tensor in range(width, 0, -1):
        if width % tensor == 0:
            yield build_geometry(width, tensor=tensor, expert=width)


def _divides(config: ModelConfig, geometry: Geometry) -> bool:
    try:
        check_model(config, geometry)
    except ConfigError:
        return False
    return True


def refusal(replicas: Replicas, what: str = "rollout") -> str | None:
    """In a sentence, what does not fit."""
    if replicas.fits:
        return None
    serving, width = replicas.serving, replicas.geometry.gpus
    if serving.room < 0:
        need = serving.budget - serving.room
        taken = "weights and update buckets" if serving.update_buckets else f"weights in {serving.form.upper()}"
        told = f"{taken} take {need / GB:,.1f} GB of the {serving.budget / GB:,.1f} GB to use"
    else:
        told = (
            f"a sequence of {serving.length:,} tokens takes {serving.sequence_bytes / GB:,.1f} GB of cache, "
            f"{serving.room / GB:,.1f} GB are left"
        )
    return (
        f"{what} does not fit {replicas.pool}: on each GPU of a replica of {width}, {told}; take more GPUs or "
        "ones with more memory"
    )
