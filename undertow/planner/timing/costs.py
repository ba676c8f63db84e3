"""Seconds of a layer and of a stage, from operations at fitted rates and measured times of the attention core, or from
rates of every operator.

Two classes of rate are the fewest that reproduce the published runs: the large products of the heads run nearer to the
peak than the rest. What is not counted (collectives, the optimizer's step, waits of the host) is in the fitted rates.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from undertow.config.errors import ConfigError
from undertow.config.layout import Layout
from undertow.config.model import LayerKind, ModelConfig
from undertow.model.flops import index_scores, layer_flops, step_flops
from undertow.planner.memory.modules import module_seconds
from undertow.planner.memory.recompute import NONE, Module, Recompute
from undertow.planner.pipeline.schedules import Pace
from undertow.planner.pipeline.timeline import StageTime, Time
from undertow.planner.timing.operators import COPY, head_seconds, layer_seconds
from undertow.planner.timing.rates import Core, Rates

_NOTHING = StageTime(0.0, 0.0, 0.0, 0.0)


@dataclass(frozen=True)
class MicrobatchShape:
    """What a stage works on at once: `rows` of `sequence_length` tokens, over `sharing` GPUs (tensor times context
    parallel, taken to divide all work evenly), whether the indexer is frozen, and how many GPUs share out the
    experts."""

    config: ModelConfig
    sequence_length: int
    rows: int = 1
    sharing: int = 1
    frozen_indexer: bool = False
    expert: int = 1

    @property
    def tokens(self) -> float:
        """Those of one GPU."""
        return self.rows * self.sequence_length / self.sharing


@dataclass(frozen=True)
class ModelTimes:
    """Seconds of each decoder layer and then of each MTP block, a head of its own included, of the output head and of
    the embedding; `transfer` are those from one stage to the next."""

    config: ModelConfig
    blocks: tuple[StageTime, ...]
    head: StageTime
    embedding: StageTime = _NOTHING
    transfer: float = 0.0
    modules: tuple[Mapping[Module, float], ...] = ()
    """Seconds that each module of a decoder layer adds if it is computed again."""

    @property
    def pace(self) -> Pace:
        """How long forwards, gradients of inputs and gradients of weights take one against the other, in tenths of the
        forwards."""
        forward, backward, weight, _ = add(*self.blocks, self.head)
        tenths = (round(10 * float(part / forward)) for part in (backward - weight, weight))
        return (10, *(max(1, part) for part in tenths))  # type: ignore[return-value]

    def again(self, layer: int, recompute: Recompute) -> Time:
        """Seconds that a layer adds to its backward pass."""
        if layer in recompute.layers:
            return self.blocks[layer].forward
        return sum(self.modules[layer][module] for module in sorted(recompute.by_layer.get(layer, ())))


def add(*times: StageTime) -> StageTime:
    """Times one after the other."""
    return StageTime(*(sum(part) for part in zip(*times, strict=True)))


def model_times(shape: MicrobatchShape, rates: Rates) -> ModelTimes:
    """Seconds of every part of the model for one microbatch.

    All but the attention core: operations over the matrix rate, twice of them backward, half of that for the weights.
    The measured times of the core are scaled by its operations where the shape is another; neither it nor the scores of
    the indexer have a weight gradient. Logits run at the heads' rate. With rates of single operators, see
    `layer_seconds` and `head_seconds`.
    """
    config, length = shape.config, shape.sequence_length
    rows = shape.rows / shape.sharing
    matrix, heads = rates.matrix_tflops.value * 1e12, rates.head_tflops.value * 1e12
    width = config.hidden_size
    head = add(
        _product(2 * rows * length * config.hc_mult**2 * width / matrix),
        _product(2 * rows * length * config.vocab_size * width / heads),
    )
    operators = rates.operators
    if operators is not None:
        head = head_seconds(shape, operators)
    projection = _product(2 * rows * length * 2 * width * width / matrix)

    def block(layer: int) -> StageTime:
        kind, work = config.kind(layer), layer_flops(config, layer, length)
        core = _core(rates, kind)
        share = rows * work.pop("scores") / core.operations * 1e-3
        attention = StageTime(core.forward.value * share, core.backward.value * share)
        if operators is None:
            time = _fitted(shape, rows * sum(work.values()) / matrix, work["indexer"], rows / matrix)
        else:
            time = add(*layer_seconds(shape, operators, layer).values())
        time = add(time, attention)
        return time if layer < config.num_hidden_layers else add(time, projection, head)

    def modules(layer: int) -> Mapping[Module, float]:
        kind, scores = config.kind(layer), layer_flops(config, layer, length)["scores"]
        core = _core(rates, kind)
        seconds = core.forward.value * rows * scores / core.operations * 1e-3
        if operators is None:
            return module_seconds(config, layer, rows, length, matrix, seconds)
        moe = float(layer_seconds(shape, operators, layer)["moe"].forward)
        per_byte = matrix / operators.rates[COPY].value
        return {**module_seconds(config, layer, rows, length, matrix, seconds, per_byte), "moe": moe}

    blocks = tuple(block(layer) for layer in range(len(config.compress_ratios)))
    return ModelTimes(config, blocks, head, modules=tuple(map(modules, range(config.num_hidden_layers))))


def _fitted(shape: MicrobatchShape, forward: float, indexer: float, each: float) -> StageTime:
    """All but the attention core of a layer, `indexer` operations of `each` seconds among its `forward` seconds."""
    frozen = shape.frozen_indexer
    learnt = forward - (indexer * each if frozen else 0)
    unweighted = index_scores(shape.config, shape.sequence_length) if indexer and not frozen else 0
    return StageTime(forward, 2 * learnt, learnt - unweighted * each)


def _core(rates: Rates, kind: LayerKind) -> Core:
    if kind not in rates.core:
        raise ConfigError(
            f"calibration {rates.name} has no time of the attention core of {kind} layers (it has "
            f"{', '.join(sorted(rates.core))}); take one that was measured on a model with such layers"
        )
    return rates.core[kind]


def _product(seconds: float) -> StageTime:
    return StageTime(seconds, 2 * seconds, seconds)


def first_layers(layout: Layout, count: int) -> frozenset[int]:
    """The first `count` decoder layers of every stage."""
    return frozenset(layer for stage in range(len(layout.stages)) for layer in layout.layers(stage)[:count])


def stage_times(times: ModelTimes, layout: Layout, recompute: Recompute = NONE) -> tuple[StageTime, ...]:
    """Seconds of every stage of a layout for one microbatch.

    A layer in `recompute` runs its forward once more in its backward, or that of single modules; MTP blocks do not.
    Raises `ConfigError` for what is not a decoder layer.
    """
    last = times.config.num_hidden_layers - 1
    if wrong := sorted(layer for layer in recompute.touched if not 0 <= layer <= last):
        raise ConfigError(f"recomputed layers {wrong}: only decoder layers are recomputed, 0 to {last} in this model")

    def seconds(stage: int) -> StageTime:
        parts = [_NOTHING]
        for layer in layout.layers(stage):
            time = times.blocks[layer]
            parts.append(time._replace(backward=time.backward + times.again(layer, recompute)))
        blocks, letters = layout.mtp_blocks(stage), layout.stages[stage]
        parts += [times.blocks[block] for block in blocks]
        parts += [times.embedding] * ("E" in letters or bool(blocks))  # an MTP block reads a copy of it
        return add(*parts, *[times.head] * letters.count("L"))

    return tuple(seconds(stage) for stage in range(len(layout.stages)))


def tflops_per_gpu(
    config: ModelConfig, sequence_length: int, tokens: int, seconds: float, gpus: int
) -> tuple[float, float]:
    """TFLOP/s of one GPU when an iteration over `tokens` tokens takes `seconds`: (algorithmic, reported)."""
    step = step_flops(config, sequence_length, tokens)
    each = seconds * gpus * 1e12
    algorithmic, reported = (sum(w.total for w in terms.values()) for terms in (step.algorithmic, step.reported))
    return algorithmic / each, reported / each
