"""Arithmetic intensity of the operations of a step, for a roofline: operations over bytes, and the seconds planned."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator
from dataclasses import dataclass, replace
from math import prod

from undertow.config.model import LayerKind, ModelConfig
from undertow.model.flops import layer_flops
from undertow.model.weights import Weight, collapse_weights, layer_weights, table_weight
from undertow.planner.memory.parameters import local
from undertow.planner.task import Task
from undertow.planner.timing.costs import MicrobatchShape
from undertow.planner.timing.operators import layer_seconds

_BF16 = 2
_PLACES = {"attn.compressor.": "compressor", "attn.indexer.": "indexer", "attn.w": "projections", "ffn.": "moe"}
_NAMES = {
    "projections": "attention projections",
    "scores": "attention core",
    "compressor": "compressor",
    "indexer": "indexer",
    "moe": "experts and routers",
    "mixers": "mixers of streams",
}
_BY_KIND = ("scores", "compressor")


@dataclass(frozen=True)
class Operation:
    """Operations of one name on one GPU: a forward pass of one microbatch through all `count` places of the model.

    `flops` and `bytes` are of the forward pass, `bytes` those of weights, operands and results, each read or written
    once. `forward` are the planned seconds of that pass, `seconds` those of an iteration, forward and backward, without
    what is recomputed, for a pipeline rank on average.
    """

    name: str
    count: int
    flops: float
    bytes: float
    forward: float
    seconds: float

    @property
    def intensity(self) -> float:
        """Operations a byte."""
        return self.flops / self.bytes

    @property
    def rate(self) -> float:
        """Operations a second, as planned."""
        return self.flops / self.forward


def operations(task: Task) -> tuple[Operation, ...]:
    """The operations of a step, in the order of the model; those that the rates do not count apart are left out.

    As in the times of a task, tensor and context parallelism divide all work and what goes in and out evenly. What GPUs
    send each other is none of them.
    """
    sums: dict[str, list[_Piece]] = defaultdict(list)
    for piece in _pieces(task):
        sums[piece.name].append(piece)
    share = task.microbatches / task.geometry.pipeline
    return tuple(
        Operation(
            name,
            len(pieces),
            sum(piece.flops for piece in pieces),
            sum(piece.bytes for piece in pieces),
            sum(piece.forward for piece in pieces),
            sum(piece.forward + piece.backward for piece in pieces) * share,
        )
        for name, pieces in sums.items()
    )


@dataclass(frozen=True)
class _Piece:
    name: str
    flops: float
    bytes: float
    forward: float
    backward: float


def _pieces(task: Task) -> Iterator[_Piece]:
    config, rates, length = task.config, task.rates, task.batch.sequence_length
    rows = task.batch.micro_batch / task.geometry.sequence_ranks
    tokens, width, streams = rows * length, config.hidden_size, config.hc_mult
    matrix, heads = rates.matrix_tflops.value * 1e12, rates.head_tflops.value * 1e12

    def piece(name: str, flops: float, values: float, weights: list[Weight], rate: float) -> _Piece:
        size = values * tokens * _BF16 + sum(_weight_bytes(weight, task) for weight in weights)
        return _Piece(name, flops, size, flops / rate, 2 * flops / rate)

    head = [weight for weight in collapse_weights(config) if weight.name == "hc_head.fn"]
    shape = MicrobatchShape(
        config, length, task.batch.micro_batch, task.geometry.sequence_ranks, task.frozen_indexer, task.geometry.expert
    )
    operators = rates.operators
    for layer in range(len(config.compress_ratios)):
        timed = {} if operators is None else layer_seconds(shape, operators, layer)
        kind, weights = config.kind(layer), layer_weights(config, layer)
        for term, flops in layer_flops(config, layer, length).items():
            if not flops:
                continue
            held = [weight for weight in weights if _term(weight) == term]
            name = f"{_NAMES[term]}, {kind.upper()}" if term in _BY_KIND else _NAMES[term]
            made = piece(name, rows * flops, _values(config, term, layer, length), held, matrix)
            if term in timed:
                made = replace(made, forward=float(timed[term].forward), backward=float(timed[term].backward))
            elif term == "indexer" and task.frozen_indexer:
                made = replace(made, backward=0.0)
            yield _core(task, kind, made) if term == "scores" else made
        if layer >= config.num_hidden_layers:
            joined = [weight for weight in weights if weight.name in ("e_proj.weight", "h_proj.weight")]
            yield piece("projections of MTP", 4 * tokens * width**2, 4 * width, joined, matrix)
        if layer >= config.num_hidden_layers - 1:  # the trunk's end, and every MTP block's
            yield piece("collapse of streams", 2 * tokens * streams**2 * width, (streams + 1) * width, head, matrix)
            table = [table_weight(config, "head")]
            logits = 2 * tokens * config.vocab_size * width
            yield piece("logits", logits, width + config.vocab_size, table, heads)


def _core(task: Task, kind: LayerKind, made: _Piece) -> _Piece:
    """With the seconds of the measured core, scaled by its operations."""
    core = task.rates.core[kind]
    share = made.flops / core.operations * 1e-3
    return replace(made, forward=core.forward.value * share, backward=core.backward.value * share)


def _term(weight: Weight) -> str:
    """The term of operations that a matrix of a layer belongs to; none for vectors, which are not counted."""
    if len(weight.shape) < 2 or weight.name.endswith(".ape"):
        return ""
    if weight.name in ("hc_attn.fn", "hc_ffn.fn"):
        return "mixers"
    return next((term for place, term in _PLACES.items() if weight.name.startswith(place)), "")


def _weight_bytes(weight: Weight, task: Task) -> int:
    return prod(local(weight, task.geometry).shape) * (4 if weight.high else _BF16)


def _values(c: ModelConfig, term: str, layer: int, length: int) -> float:
    """Values that a term reads and writes for each token, in the type of the activations, weights apart.

    What stays inside of one kernel (scores, the gathered keys) does not count, nor does what a product hands on to the
    next one a second time.
    """
    d, q, inner, narrow = c.hidden_size, c.q_lora_rank, c.num_attention_heads * c.head_dim, c.o_groups * c.o_lora_rank
    experts, hidden = c.num_experts_per_tok + c.n_shared_experts, c.moe_intermediate_size
    ratio = c.compress_ratios[layer]
    if term == "projections":
        return d + q + inner + c.head_dim + inner + narrow + d
    if term == "scores":
        return 2 * inner + c.head_dim * (1 + (1 / ratio if ratio else 0))
    if term == "compressor":
        return d + c.head_dim * {"swa": 0, "csa": 4, "hca": 2}[c.kind(layer)]
    if term == "indexer":
        chosen = min(c.index_topk, length // c.csa_ratio) * 2  # four bytes each
        query = q if c.indexer == "shared" else c.index_head_dim
        return query + d + c.index_n_heads * (c.index_head_dim + 1) + 4 * c.index_head_dim + chosen
    if term == "moe":
        return experts * (2 * d + 3 * hidden) + d + 2 * c.n_routed_experts  # scores of the router in float32
    return 2 * (c.hc_mult * d + 2 * (2 + c.hc_mult) * c.hc_mult)  # mixers, of which there are two a layer
