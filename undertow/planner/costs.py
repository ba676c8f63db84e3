"""Seconds of a layer and of a stage, from operations at fitted rates and measured times of the attention core.

Two classes of rate are the fewest that reproduce the published runs: the large products of the heads run nearer to the
peak than the rest. What is not counted (collectives, the optimizer's step, waits of the host) is in the fitted rates.
"""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass

from undertow.config.errors import ConfigError
from undertow.config.model import LayerKind, ModelConfig
from undertow.model.flops import layer_flops, step_flops
from undertow.planner.layout import Layout
from undertow.planner.rates import Rates
from undertow.planner.timeline import StageTime


@dataclass(frozen=True)
class MicrobatchShape:
    """What a stage works on at once: `rows` of `sequence_length` tokens, over `sharing` GPUs (tensor times context
    parallel, taken to divide all work evenly), and whether the indexer is frozen."""

    config: ModelConfig
    sequence_length: int
    rows: int = 1
    sharing: int = 1
    frozen_indexer: bool = False


@dataclass(frozen=True)
class ModelTimes:
    """Seconds of each decoder layer and then of each MTP block, a head of its own included, and of the output head."""

    config: ModelConfig
    blocks: tuple[StageTime, ...]
    head: StageTime


def add(*times: StageTime) -> StageTime:
    """Times one after the other."""
    return StageTime(*(sum(part) for part in zip(*times, strict=True)))


def model_times(shape: MicrobatchShape, rates: Rates) -> ModelTimes:
    """Seconds of every part of the model for one microbatch.

    All but the attention core: operations over the matrix rate, twice of them backward, half of that for the weights.
    The measured times of the core are scaled by its operations where the shape is another. Logits run at the heads'
    rate.
    """
    config, length = shape.config, shape.sequence_length
    rows = shape.rows / shape.sharing
    matrix, heads = rates.matrix_tflops.value * 1e12, rates.head_tflops.value * 1e12
    measured = _measured_scores(rates)
    width = config.hidden_size
    head = add(
        _product(2 * rows * length * config.hc_mult**2 * width / matrix),
        _product(2 * rows * length * config.vocab_size * width / heads),
    )
    projection = _product(2 * rows * length * 2 * width * width / matrix)

    def block(layer: int) -> StageTime:
        kind, work = config.kind(layer), layer_flops(config, layer, length)
        share = rows * work.pop("scores") / measured[kind] * 1e-3
        forward = rows * sum(work.values()) / matrix
        learnt = forward - (rows * work["indexer"] / matrix if shape.frozen_indexer else 0)
        core = rates.core[kind]
        time = StageTime(forward + core.forward.value * share, 2 * learnt + core.backward.value * share, learnt)
        return time if layer < config.num_hidden_layers else add(time, projection, head)

    return ModelTimes(config, tuple(block(layer) for layer in range(len(config.compress_ratios))), head)


def _measured_scores(rates: Rates) -> dict[LayerKind, int]:
    """Operations of the attention core that was measured, by kind of layer."""
    config = ModelConfig.from_preset(rates.preset)
    layers: dict[LayerKind, int] = {config.kind(layer): layer for layer in range(len(config.compress_ratios))}
    return {kind: layer_flops(config, at, rates.sequence_length)["scores"] for kind, at in layers.items()}


def _product(seconds: float) -> StageTime:
    return StageTime(seconds, 2 * seconds, seconds)


def first_layers(layout: Layout, count: int) -> frozenset[int]:
    """The first `count` decoder layers of every stage."""
    return frozenset(layer for stage in range(len(layout.stages)) for layer in layout.layers(stage)[:count])


def stage_times(times: ModelTimes, layout: Layout, recompute: Collection[int] = ()) -> tuple[StageTime, ...]:
    """Seconds of every stage of a layout for one microbatch.

    A layer in `recompute` runs its forward once more in its backward; MTP blocks do not, and the embedding takes no
    time. Raises `ConfigError` for what is not a decoder layer.
    """
    last = times.config.num_hidden_layers - 1
    if wrong := sorted(layer for layer in recompute if not 0 <= layer <= last):
        raise ConfigError(f"recomputed layers {wrong}: only decoder layers are recomputed, 0 to {last} in this model")

    def seconds(stage: int) -> StageTime:
        parts = [StageTime(0.0, 0.0, 0.0)]
        for layer in layout.layers(stage):
            time = times.blocks[layer]
            parts.append(time._replace(backward=time.backward + time.forward) if layer in recompute else time)
        parts += [times.blocks[block] for block in layout.mtp_blocks(stage)]
        return add(*parts, *[times.head] * layout.stages[stage].count("L"))

    return tuple(seconds(stage) for stage in range(len(layout.stages)))


def tflops_per_gpu(
    config: ModelConfig, sequence_length: int, tokens: int, seconds: float, gpus: int
) -> tuple[float, float]:
    """TFLOP/s of one GPU when an iteration over `tokens` tokens takes `seconds`: (algorithmic, reported)."""
    step = step_flops(config, sequence_length, tokens)
    each = seconds * gpus * 1e12
    algorithmic, reported = (sum(w.total for w in terms.values()) for terms in (step.algorithmic, step.reported))
    return algorithmic / each, reported / each
