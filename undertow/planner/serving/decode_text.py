"""What generating with a trained model will take, in a few lines and as plain values."""

from __future__ import annotations

from typing import Any

from undertow.config.model import ModelConfig
from undertow.planner.serving.cache import CacheBytes
from undertow.planner.serving.decode import compare_with_v32, decode_work
from undertow.planner.table import short

LONG = 1_000_000
"""Tokens of context at which DeepSeek published its comparison with V3.2."""

_MIB = 2**20


def _cache(config: ModelConfig) -> CacheBytes:
    return CacheBytes(config, online=True)


def _lengths(config: ModelConfig, length: int) -> list[int]:
    return sorted({length, *([LONG] if config.max_position_embeddings >= LONG else [])})


def decode_text(config: ModelConfig, length: int) -> list[str]:
    """Cache and operations for the next token after `length` others, and after a million where the model goes so
    far."""
    cache = _cache(config)
    lines = [
        f"decode, cache in {cache.form}: {cache.per_token:,.0f} bytes a token of context, and "
        f"{short(cache.fixed / _MIB)} MiB a sequence"
    ]
    for n in _lengths(config, length):
        work = decode_work(config, n).total
        lines.append(
            f"  {n:,} tokens: {short(cache.of_length(n) / _MIB)} MiB of cache, {short(work / 1e9)} GFLOP a token"
        )
    if LONG in _lengths(config, length):
        ours = compare_with_v32(config, LONG)
        lines.append(
            f"  at {LONG:,}, of DeepSeek-V3.2's: operations {ours.flops:.1%} by precision ({ours.plain_flops:.1%} "
            f"unweighted), cache with FP4 indexer keys {ours.cache:.1%}"
        )
    return lines


def decode_document(config: ModelConfig, length: int) -> dict[str, Any]:
    """The same in bytes and operations; `of_v32` are shares, None for a model of shorter contexts."""
    cache, lengths = _cache(config), _lengths(config, length)
    ours = compare_with_v32(config, LONG) if LONG in lengths else None
    return {
        "cache_format": cache.form,
        "cache_bytes_per_token": cache.per_token,
        "cache_bytes_per_sequence": cache.fixed,
        "lengths": [
            {"length": n, "sequence_bytes": cache.of_length(n), "flops_per_token": decode_work(config, n).total}
            for n in lengths
        ],
        "of_v32": ours
        and {"length": LONG, "flops": ours.flops, "unweighted_flops": ours.plain_flops, "cache": ours.cache},
    }
