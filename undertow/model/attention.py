"""Attention (model card 2): one key-value latent, a sliding window, compressed entries, sinks, grouped output
projection."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from undertow.config.model import ModelConfig
from undertow.model.cache import LayerCache
from undertow.model.compressor import Compressor
from undertow.model.context import Context
from undertow.model.indexer import Indexer
from undertow.model.layers import Linear, RMSNorm, float32_parameter
from undertow.ops import Ops
from undertow.ops.segments import Rows, entry_rows, window_rows


class GroupedOutput(nn.Module):
    """First half of the output projection: each group of consecutive heads through its own matrix (model card 2.4)."""

    def __init__(self, groups: int, inputs: int, rank: int, ops: Ops):
        super().__init__()
        self.ops, self.groups = ops, groups
        self.weight = nn.Parameter(torch.empty(groups * rank, inputs))

    def forward(self, o: Tensor) -> Tensor:
        """`[T, h, c] -> [T, g r]`."""
        weight = self.weight.view(self.groups, -1, self.weight.shape[1])
        return self.ops.block_linear(o.reshape(len(o), self.groups, weight.shape[-1]), weight).flatten(1)


class Attention(nn.Module):
    """One attention sub-layer; `config.kind(layer)` decides whether it has a compressor (HCA) and an indexer too
    (CSA)."""

    def __init__(self, config: ModelConfig, layer: int, ops: Ops):
        super().__init__()
        self.ops, self.config = ops, config
        self.kind, self.ratio = config.kind(layer), config.compress_ratios[layer]
        heads, width, eps = config.num_attention_heads, config.head_dim, config.rms_norm_eps
        self.wq_a = Linear(config.hidden_size, config.q_lora_rank, ops)
        self.q_norm = RMSNorm(config.q_lora_rank, eps, ops)
        self.wq_b = Linear(config.q_lora_rank, heads * width, ops)
        self.wkv = Linear(config.hidden_size, width, ops)
        self.kv_norm = RMSNorm(width, eps, ops)
        self.wo_a = GroupedOutput(config.o_groups, heads * width // config.o_groups, config.o_lora_rank, ops)
        self.wo_b = Linear(config.o_groups * config.o_lora_rank, config.hidden_size, ops)
        self.attn_sink = float32_parameter(heads)
        if self.kind != "swa":
            self.compressor = Compressor(config, self.ratio, width, self.kind == "csa", ops)
        if self.kind == "csa":
            self.indexer = Indexer(config, ops)

    def forward(self, x: Tensor, context: Context, cache: LayerCache) -> Tensor:
        """`x [T, d]` (collapsed and normalised) -> `[T, d]`. Compressors run before attention: a group that a token
        completes is visible to that token."""
        ops, config, segments = self.ops, self.config, context.segments
        rope = context.rope(compressed=self.kind != "swa")
        latent = self.q_norm(self.wq_a(x))
        q = self.wq_b(latent).view(-1, config.num_attention_heads, config.head_dim)
        q = ops.rotary(ops.rms_norm(q, None, config.rms_norm_eps), rope.cos, rope.sin)
        kv = ops.rotary(self.kv_norm(self.wkv(x)), rope.cos, rope.sin)
        window = cache.append("window", kv, segments.layout(window_rows(config.sliding_window)))
        entries, selected = self._compressed(x, latent, context, cache)
        o, _ = ops.sparse_attention(
            q, window, entries, selected, self.attn_sink, segments,
            window_size=config.sliding_window, ratio=self.ratio, scale=config.head_dim**-0.5,
        )  # fmt: skip
        return self.wo_b(self.wo_a(ops.rotary(o, rope.cos, rope.sin, inverse=True)))

    def _compressed(
        self, x: Tensor, latent: Tensor, context: Context, cache: LayerCache
    ) -> tuple[Rows | None, Tensor | None]:
        """All entries of this layer and each query's selection; None selects every visible entry."""
        if self.kind == "swa":
            return None, None
        segments, entry_rope = context.segments, context.entry_rope(self.ratio)
        new = self.compressor(x, entry_rope, segments, cache, "tail")
        entries = cache.append("entries", new, segments.layout(entry_rows(self.ratio)))
        if self.kind == "hca":
            return entries, None
        return entries, self.indexer(x, latent, context.rope(compressed=True), entry_rope, segments, cache)
