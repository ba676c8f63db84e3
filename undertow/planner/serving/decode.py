"""Work and cache of generating one token at a long context, against DeepSeek-V3.2's."""

from __future__ import annotations

from dataclasses import dataclass

from undertow.config.model import ModelConfig
from undertow.model.parameters import closed_counts
from undertow.planner.serving.cache import CacheBytes, key_bytes, record_bytes


@dataclass(frozen=True)
class DecodeWork:
    """Operations for one token: matrix products of the active parameters, attention proper, and indexer scores."""

    products: float
    core: float
    index: float

    def weighted(self, core: float = 2.0, index: float = 1.0) -> float:
        """Operations in units of FP8 ones: bf16 attention counts twice; FP4 indexer scores would count half."""
        return self.products + core * self.core + index * self.index

    @property
    def total(self) -> float:
        """Unweighted."""
        return self.weighted(1.0, 1.0)


def entries(config: ModelConfig, layer: int, context: int) -> float:
    """Keys that a query at the end of so many tokens reads in a layer: its window and compressed entries."""
    kind = config.kind(layer)
    window = min(config.sliding_window, context)
    if kind == "swa":
        return window
    visible = context / config.compress_ratios[layer]
    return window + (min(config.index_topk, visible) if kind == "csa" else visible)


def decode_work(config: ModelConfig, context: int, active: float | None = None) -> DecodeWork:
    """Work for one token after `context` others. `active` parameters default to those counted, LM head included."""
    layers = range(config.num_hidden_layers)
    keys = sum(entries(config, layer, context) for layer in layers)
    indexed = sum(context / config.csa_ratio for layer in layers if config.kind(layer) == "csa")
    return DecodeWork(
        2.0 * (closed_counts(config).active_with_head if active is None else active),
        4.0 * config.num_attention_heads * config.head_dim * keys,
        2.0 * config.index_n_heads * config.index_head_dim * indexed,
    )


def cache_read_bytes(cache: CacheBytes, context: int) -> float:
    """Bytes of cache that one token after `context` others reads: records of the keys it attends to, and every indexer
    key."""
    config = cache.config
    layers = range(config.num_hidden_layers)
    records = sum(entries(config, layer, context) for layer in layers)
    keys = sum(context // config.csa_ratio for layer in layers if config.kind(layer) == "csa")
    return records * record_bytes(config, cache.form) + keys * key_bytes(config, cache.form)


def v32_work(context: int) -> DecodeWork:
    """DeepSeek-V3.2's: 37 B active parameters, 61 layers of 128 heads that read 2,048 selected latents of 512 and 64,
    and an indexer of 64 heads of 128 over the whole context."""
    selected = min(2048, context)
    return DecodeWork(2 * 37e9, 61 * 128 * 2.0 * (576 + 512) * selected, 61 * 2.0 * 64 * 128 * context)


def v32_cache_bytes(context: int) -> int:
    """DeepSeek-V3.2's cache: a record of 656 bytes and an indexer key of 132 in each of 61 layers."""
    return 61 * (656 + 132) * context


@dataclass(frozen=True)
class DecodeComparison:
    """Shares of DeepSeek-V3.2's work and cache at a context; `flops` weighs by precision, `plain_flops` does not."""

    context: int
    flops: float
    plain_flops: float
    cache: float
    cache_bytes: int


def compare_with_v32(config: ModelConfig, context: int = 1_000_000) -> DecodeComparison:
    """A model's decoding against V3.2's: FP8 products and V3.2's FP8 indexer count 1, bf16 attention 2, the FP4 indexer
    of V4 0.5; its cache holds FP8 records and FP4 indexer keys.

    The weights are inferred from two published ratios, not stated anywhere.
    """
    ours, theirs = decode_work(config, context), v32_work(context)
    cache = CacheBytes(config, "fp8-fp4")
    held = cache.window + cache.of_length(context) - cache.fixed
    return DecodeComparison(
        context,
        ours.weighted(index=0.5) / theirs.weighted(),
        ours.total / theirs.total,
        held / v32_cache_bytes(context),
        held,
    )
