"""Floating-point operations of a training step, term by term, in the two conventions that published figures use.

*Algorithmic*: the arithmetic of the architecture, causal to the key, each sub-layer on its one collapsed stream.
*Reported*: the published pretraining convention, which takes every term of a layer but its mixers at `hc_mult` times
the tokens, gives each CSA query its full selection, and lets the indexer score every pooled entry. One
multiply-add is two operations. Nothing here imports torch.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from undertow.config.model import ModelConfig

TERMS: tuple[str, ...] = ("projections", "scores", "compressor", "indexer", "moe", "mixers", "mtp", "logits")


@dataclass(frozen=True)
class Work:
    """Floating-point operations of one term. Backward is twice forward; what is recomputed does not count."""

    forward: float
    backward: float

    @property
    def total(self) -> float:
        """Both together."""
        return self.forward + self.backward


@dataclass(frozen=True)
class StepFlops:
    """Work of a step by the names in `TERMS`, in both conventions; `indexer` is the variant that was counted."""

    algorithmic: dict[str, Work]
    reported: dict[str, Work]
    indexer: Literal["shared", "own_rank"]


def visible_pairs(length: int, ratio: int, most: int | None = None) -> int:
    """Pairs of query and compressed entry: `sum over t < length of min((t + 1) // ratio, most)`."""
    entries = length // ratio if most is None else min(length // ratio, most)
    return ratio * entries * (entries - 1) // 2 + entries * (length - ratio * entries + 1)


def _window(length: int, window: int) -> int:
    """Pairs of query and key in the sliding window, itself included."""
    inside = min(length, window)
    return inside * length - inside * (inside - 1) // 2


def index_scores(config: ModelConfig, length: int, *, reported: bool = False) -> int:
    """Forward operations of the indexer's scores on one row: the part of its term that has no weights."""
    ratio = config.csa_ratio
    pairs = length * (length // ratio) if reported else visible_pairs(length, ratio)
    return 2 * config.index_n_heads * config.index_head_dim * pairs


def _indexer(config: ModelConfig, length: int, reported: bool) -> int:
    d, heads, width = config.hidden_size, config.index_n_heads, config.index_head_dim
    own = config.indexer == "own_rank"
    query = d * width + width * heads * width if own else config.q_lora_rank * heads * width
    return 2 * length * (query + d * heads + 4 * d * width) + index_scores(config, length, reported=reported)


def layer_flops(
    config: ModelConfig, layer: int, length: int, *, reported: bool = False, dense: bool = False
) -> dict[str, int]:
    """Forward operations of one layer on one row of `length` tokens, by term; the MTP block is layer
    `num_hidden_layers`.

    `dense`: CSA attends to every visible entry; the reported convention knows no such stage. The gate of a hash
    layer is not counted, in either convention, nor are norms, rotary embedding, softmax, pooling, Sinkhorn and the
    indexer's Hadamard matrix.
    """
    tokens = length * config.hc_mult if reported else length
    d, n, c = config.hidden_size, config.num_attention_heads, config.head_dim
    q, streams, kind, ratio = config.q_lora_rank, config.hc_mult, config.kind(layer), config.compress_ratios[layer]
    up = n * c * config.o_lora_rank + config.o_groups * config.o_lora_rank * d
    pairs = _window(tokens, config.sliding_window)
    if kind == "csa" and reported:
        pairs += tokens * min(config.index_topk, tokens // ratio)
    elif kind != "swa":
        pairs += visible_pairs(tokens, ratio, config.index_topk if kind == "csa" and not dense else None)
    experts = 3 * d * config.moe_intermediate_size * (config.num_experts_per_tok + config.n_shared_experts)
    gate = 0 if config.is_hash(layer) else d * config.n_routed_experts
    return {
        "projections": 2 * tokens * (d * q + q * n * c + d * c + up),
        "scores": 4 * n * c * pairs,
        "compressor": 2 * tokens * d * c * {"swa": 0, "csa": 4, "hca": 2}[kind],
        "indexer": _indexer(config, tokens, reported) if kind == "csa" else 0,
        "moe": 2 * tokens * (experts + gate),
        "mixers": 2 * length * 2 * (2 + streams) * streams * streams * d,
    }


def _row(config: ModelConfig, length: int, mtp: bool, reported: bool, dense: bool) -> dict[str, int]:
    """Forward operations of the whole model on one row."""
    d, streams = config.hidden_size, config.hc_mult
    blocks = config.num_nextn_predict_layers if mtp else 0
    row = dict.fromkeys(TERMS, 0)
    for layer in range(config.num_hidden_layers + blocks):
        for term, work in layer_flops(config, layer, length, reported=reported, dense=dense).items():
            row[term] += work
    row["mixers"] += 2 * length * (1 + blocks) * streams * streams * d  # head collapses
    row["mtp"] = blocks * 2 * length * 2 * d * d
    row["logits"] = 2 * length * (1 + blocks) * d * config.vocab_size
    return row


def step_flops(
    config: ModelConfig,
    sequence_length: int,
    tokens: int,
    *,
    frozen_indexer: bool = False,
    mtp: bool = True,
    dense: bool = False,
) -> StepFlops:
    """Work of a step over `tokens` tokens in rows of `sequence_length`.

    Packed documents count by the length of their row, as if it were one document. `mtp` counts the MTP block, where the
    model has one, over whole rows, its projection of the trunk on one stream. A frozen indexer has no backward in the
    algorithmic convention, and nothing to do at all where attention is `dense`; the reported one, whose published run
    had it frozen, counts it all the same.
    """
    rows = tokens / sequence_length
    forward = {reported: _row(config, sequence_length, mtp, reported, dense) for reported in (False, True)}

    def work(term: str, reported: bool) -> Work:
        idle = term == "indexer" and frozen_indexer and not reported
        ahead = 0.0 if idle and dense else forward[reported][term] * rows
        return Work(ahead, 0.0 if idle else 2 * ahead)

    algorithmic, published = ({term: work(term, reported) for term in TERMS} for reported in (False, True))
    return StepFlops(algorithmic, published, config.indexer)


def flops_per_token(
    config: ModelConfig,
    sequence_length: int,
    *,
    frozen_indexer: bool = False,
    mtp: bool = True,
    dense: bool = False,
) -> tuple[float, float]:
    """Operations of training per token, forward and backward: (algorithmic, reported). See `step_flops`."""
    step = step_flops(config, sequence_length, 1, frozen_indexer=frozen_indexer, mtp=mtp, dense=dense)
    algorithmic = sum(work.total for work in step.algorithmic.values())
    return algorithmic, sum(work.total for work in step.reported.values())
