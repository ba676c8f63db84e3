"""Seconds of a layer from rates that were measured operator by operator: operations or bytes over the operator's rate.

Products have operations, everything else the bytes that it cannot do without, both of the planned shape. Operators
bound by memory move bfloat16; pooling and the router float32. Launches, waits of the host and what no operator is for
(residual sums, casts, the embedding) are not counted.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field, replace
from math import log
from typing import TYPE_CHECKING, NamedTuple

from undertow.config.model import ModelConfig
from undertow.model.flops import index_scores, layer_flops, visible_pairs
from undertow.planner.pipeline.timeline import StageTime
from undertow.planner.timing.rates import Figure

if TYPE_CHECKING:
    from undertow.planner.timing.costs import MicrobatchShape

DENSE, COPY, LOSS, SELECT = "matmul", "copy", "loss with gradients", "scoring and top-k"
_BOTH = ("forward", "backward")
PRODUCTS: tuple[str, ...] = (DENSE, LOSS, SELECT, *(f"distillation {way}" for way in _BOTH))
"""What has operations a second. The first is the rate of one large product."""
EXPERTS: tuple[str, ...] = ("forward", "gradient of rows", "gradient of weights")
"""The products of routed experts, whose rates depend on the rows of an expert."""
MOVERS: tuple[str, ...] = (
    *(f"{name} {way}" for name in (
        "norm", "norm of heads and rotary", "rotary", "hyper in", "hyper out", "pool csa", "pool hca", "pool indexer",
        "swiglu", "router", "permute", "unpermute", "permute weights") for way in _BOTH), "order", COPY,
)  # fmt: skip
"""What has bytes a second."""
UPDATES: tuple[str, ...] = tuple(
    f"{name} with {width} state" for name in ("adamw", "muon") for width in ("fp32", "bf16")
)
"""Steps of the optimizer, which have elements a second."""

_F32, _I64, _BF16 = 4, 8, 2


@dataclass(frozen=True)
class OperatorRates:
    """Operations, bytes or elements a second by name: `PRODUCTS`, `MOVERS` and, as far as known, `UPDATES`.

    `experts` are operations a second by `EXPERTS`, for each number of rows of an expert that was measured; `unused` are
    measured rows that nothing is timed by.
    """

    rates: Mapping[str, Figure]
    experts: Mapping[float, Mapping[str, Figure]] = field(default_factory=dict)
    unused: tuple[str, ...] = ()

    def seconds(self, name: str, amount: float) -> float:
        """Of so many operations, bytes or elements."""
        return amount / self.rates[name].value

    def of_experts(self, rows: float) -> Mapping[str, Figure]:
        """Rates at the measured number of rows of an expert that is nearest in proportion; without any, all are that of
        one large product."""
        if not self.experts:
            return dict.fromkeys(EXPERTS, self.rates[DENSE])
        return self.experts[min(self.experts, key=lambda measured: abs(log(measured / rows)))]

    def scaled(self, factor: float, why: str) -> OperatorRates:
        """A guess for a GPU that is `factor` times as fast in everything."""

        def each(rates: Mapping[str, Figure]) -> dict[str, Figure]:
            return {name: figure.times(factor, why) for name, figure in rates.items()}

        return replace(self, rates=each(self.rates), experts={n: each(rates) for n, rates in self.experts.items()})


class _Moved(NamedTuple):
    """Bytes of one operator, forward and backward."""

    name: str
    forward: float
    backward: float


def rows_of_expert(config: ModelConfig, tokens: float, expert: int) -> float:
    """Rows that an expert gets on average where `expert` ranks, of `tokens` each, share the experts out."""
    return tokens * config.num_experts_per_tok * expert / config.n_routed_experts


def layer_seconds(shape: MicrobatchShape, rates: OperatorRates, layer: int) -> dict[str, StageTime]:
    """Of one layer by the terms of `layer_flops`, without the attention core, which is timed apart."""
    config, length, tokens = shape.config, shape.sequence_length, shape.tokens
    work = {term: flops * tokens / length for term, flops in layer_flops(config, layer, length).items()}
    routed = 6 * tokens * config.hidden_size * config.moe_intermediate_size * config.num_experts_per_tok
    dense = work | {"moe": work["moe"] - routed, "indexer": 0.0, "mixers": 0.0}
    found = {term: _product(rates.seconds(DENSE, dense[term])) for term in work if term != "scores"}
    if work["indexer"]:
        found["indexer"] = _indexer(shape, rates, work["indexer"])
    found["moe"] = add_times(found["moe"], _experts(config, rates, tokens, shape.expert, routed))
    for term, moved in _moved(config, layer, tokens):
        passes = zip(_BOTH, moved[1:], strict=True)
        forward, backward = (rates.seconds(f"{moved.name} {way}", size) for way, size in passes)
        back = 0.0 if term == "indexer" and shape.frozen_indexer else backward
        found[term] = add_times(found[term], StageTime(forward, back, 0.0, 0.0))
    order = rates.seconds("order", 3 * _I64 * tokens * config.num_experts_per_tok)
    found["moe"] = add_times(found["moe"], StageTime(order, 0.0, 0.0, 0.0))
    return found


def head_seconds(shape: MicrobatchShape, rates: OperatorRates) -> StageTime:
    """Collapse of the streams, norm, and the loss, whose kernel makes all gradients in the forward pass."""
    config, tokens = shape.config, shape.tokens
    streams = tokens * config.hc_mult * config.hidden_size * _BF16
    width = tokens * config.hidden_size
    passes = zip(_BOTH, (streams, 2 * streams), (2, 3), strict=True)
    forward, backward = (
        rates.seconds(f"hyper in {way}", read + width * _BF16) + rates.seconds(f"norm {way}", times * width * _BF16)
        for way, read, times in passes
    )
    loss = rates.seconds(LOSS, 3 * 2.0 * tokens * config.vocab_size * config.hidden_size)
    return StageTime(forward + loss, backward, 0.0, 0.0)


def add_times(*times: StageTime) -> StageTime:
    """Times one after the other."""
    return StageTime(*(sum(part) for part in zip(*times, strict=True)))


def _product(seconds: float) -> StageTime:
    return StageTime(seconds, 2 * seconds, seconds, 0.0)


def _experts(config: ModelConfig, rates: OperatorRates, tokens: float, expert: int, operations: float) -> StageTime:
    known = rates.of_experts(rows_of_expert(config, tokens, expert))
    forward, rows, weights = (operations / known[name].value for name in EXPERTS)
    return StageTime(forward, rows + weights, weights, 0.0)


def _indexer(shape: MicrobatchShape, rates: OperatorRates, operations: float) -> StageTime:
    """Projections, the choice, and with a learning indexer the distillation. The choice has no backward pass."""
    config, length, rows = shape.config, shape.sequence_length, shape.tokens / shape.sequence_length
    scores = rows * index_scores(config, length)
    found = _product(rates.seconds(DENSE, operations - scores))
    choice = StageTime(rates.seconds(SELECT, scores), 0.0, 0.0, 0.0)
    if shape.frozen_indexer:
        return add_times(StageTime(found.forward, 0.0, 0.0, 0.0), choice)
    pairs = rows * visible_pairs(length, config.csa_ratio, config.index_topk)
    taught = 2 * config.num_attention_heads * config.head_dim
    taken = 2 * config.index_n_heads * config.index_head_dim
    amounts = zip(_BOTH, (taught + taken, taught + 3 * taken), strict=True)
    forward, backward = (rates.seconds(f"distillation {way}", pairs * each) for way, each in amounts)
    return add_times(found, choice, StageTime(forward, backward, 0.0, 0.0))


def _moved(c: ModelConfig, layer: int, tokens: float) -> Iterator[tuple[str, _Moved]]:
    """Term and bytes of the operators of a layer that are bound by memory; weights and tables, which are small beside
    activations, are left out."""

    def copied(name: str, values: float, backward: int = 4) -> _Moved:
        """Read and written in bfloat16; backward `backward` bytes for each value."""
        return _Moved(name, 2 * _BF16 * values, backward * values)

    wide, kind, streams = c.num_attention_heads * c.head_dim, c.kind(layer), tokens * c.hc_mult * c.hidden_size * _BF16
    x, coefficients = tokens * c.hidden_size * _BF16, tokens * c.hc_mult * (1 + c.hc_mult) * _F32
    yield "projections", copied("norm", tokens * (c.q_lora_rank + c.head_dim), 6)
    yield "projections", copied("norm of heads and rotary", tokens * wide, 6)
    yield "projections", copied("rotary", tokens * (wide + c.head_dim))
    yield "mixers", _Moved("hyper in", streams + x + coefficients, 3 * streams + x + coefficients)
    out = x + coefficients + streams
    yield "mixers", _Moved("hyper out", out + streams, 2 * out + streams)
    if kind != "swa":
        yield "compressor", _pool(f"pool {kind}", tokens, c.compress_ratios[layer], c.head_dim, kind == "csa")
    if kind == "csa":
        yield "indexer", _pool("pool indexer", tokens, c.csa_ratio, c.index_head_dim, True)
        yield "indexer", copied("rotary", tokens * c.index_n_heads * c.index_head_dim)
    choices = tokens * c.num_experts_per_tok
    values = (choices + tokens * c.n_shared_experts) * c.moe_intermediate_size
    yield "moe", _Moved("swiglu", 3 * _BF16 * values, 5 * _BF16 * values)
    scores, chosen = tokens * c.n_routed_experts * _F32, choices * (_F32 + _I64)
    yield "moe", _Moved("router", 2 * scores + chosen, 3 * scores + chosen)
    sent = choices * c.hidden_size * _BF16 + choices * _I64
    yield "moe", _Moved("permute", x + sent, x + sent)
    yield "moe", _Moved("unpermute", 2 * x + sent, 2 * x + sent)  # sums are float32
    yield "moe", _Moved("permute weights", choices * (2 * _F32 + _I64), choices * (2 * _F32 + _I64))


def _pool(name: str, tokens: float, ratio: int, width: int, overlap: bool) -> _Moved:
    """Values and gates in float32, twice where windows overlap; rows of each window, and its entry."""
    halves, entries = (2 if overlap else 1), tokens / ratio
    values = 2 * halves * tokens * width * _F32
    rest = entries * (width * _F32 + halves * ratio * _I64)
    return _Moved(name, values + rest, 2 * values + rest)
