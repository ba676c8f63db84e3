"""Attention (model card 2): one key-value latent, a sliding window, compressed entries, sinks, grouped output
projection."""

from __future__ import annotations

from functools import partial
from typing import NamedTuple

import torch
from torch import Tensor, nn

from undertow.config.model import ModelConfig
from undertow.model.cache import LayerCache
from undertow.model.compressor import Compressor
from undertow.model.context import Context
from undertow.model.indexer import Indexer, Reading
from undertow.model.layers import Linear, RMSNorm, float32_parameter
from undertow.model.recompute import Choices
from undertow.model.remake import Remake, kept
from undertow.model.rotary import Table
from undertow.ops import Ops
from undertow.ops.segments import Rows, Segments, entry_rows, window_rows


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


class Indexed(NamedTuple):
    """What concerns the indexer of a CSA layer in one call; all None in other layers.

    `selected [T, index_topk]` are the entries that attention read, None for every visible one. `distillation [T]` (KL
    in nats) and `recall [2]` int64 (hits, of) are there if `Indexing` asks for them.
    """

    selected: Tensor | None = None
    distillation: Tensor | None = None
    recall: Tensor | None = None


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

    def forward(
        self, x: Tensor, context: Context, cache: LayerCache, recorded: Choices | None = None, again: Remake = kept
    ) -> tuple[Tensor, Indexed]:
        """`x [T, d]` (collapsed and normalised) -> `[T, d]`. Compressors run before attention: a group that a token
        completes is visible to that token. `recorded` are the choices of an earlier run of this call, to be repeated;
        `again` runs the modules.
        """
        ops, config, segments, indexing = self.ops, self.config, context.segments, context.indexing
        rope = self._rope(context)
        latent = self.q_norm(self.wq_a(x))
        q = again("query", partial(self._queries, context), latent)
        kv = ops.rotary(self.kv_norm(self.wkv(x)), rope.cos, rope.sin)
        window = cache.append("window", kv, segments.layout(window_rows(config.sliding_window)))
        entries = self._entries(x, context, cache)
        reading, chosen = self._index(x, latent, context, cache, recorded)
        selected = None if indexing.dense else chosen
        o, lse = again("attention_core", partial(self._core, context, selected), q, window, entries)
        y = again("output", self._output, o)
        if entries is None or self.kind != "csa":
            return y, Indexed()
        distillation = recall = None
        if indexing.distil and reading is not None:
            distillation = ops.indexer_distillation(
                reading.q, reading.keys, reading.weights, q, entries, lse, selected, segments,
                ratio=self.ratio, scale=config.head_dim**-0.5,
            )  # fmt: skip
        if indexing.recall and recorded is None:
            recall = self._recall(q, window, entries, lse if selected is None else None, chosen, segments)
        return y, Indexed(selected, distillation, recall)

    def _rope(self, context: Context) -> Table:
        return context.rope(compressed=self.kind != "swa")

    def _queries(self, context: Context, latent: Tensor) -> Tensor:
        """`[T, h, c]`, normalised and rotated, of the query latent."""
        config, rope = self.config, self._rope(context)
        q = self.wq_b(latent).view(-1, config.num_attention_heads, config.head_dim)
        return self.ops.head_norm_rotary(q, rope.cos, rope.sin, config.rms_norm_eps)

    def _core(
        self, context: Context, selected: Tensor | None, q: Tensor, window: Rows, entries: Rows | None
    ) -> tuple[Tensor, Tensor]:
        """Heads' outputs, turned back, `[T, h, c]`, and log-sum-exp `[T, h]`."""
        o, lse = self._attend(q, window, entries, selected, context.segments)
        rope = self._rope(context)
        return self.ops.rotary(o, rope.cos, rope.sin, inverse=True), lse

    def _output(self, o: Tensor) -> Tensor:
        return self.wo_b(self.wo_a(o))

    def _attend(
        self, q: Tensor, window: Rows, entries: Rows | None, selected: Tensor | None, segments: Segments
    ) -> tuple[Tensor, Tensor]:
        """Heads' outputs `[T, h, c]` and log-sum-exp `[T, h]`."""
        attend = self.ops.csa_attention if self.kind == "csa" else self.ops.sparse_attention
        return attend(
            q, window, entries, selected, self.attn_sink, segments,
            window_size=self.config.sliding_window, ratio=self.ratio, scale=self.config.head_dim**-0.5,
        )  # fmt: skip

    @torch.no_grad()
    def _recall(
        self, q: Tensor, window: Rows, entries: Rows, lse: Tensor | None, chosen: Tensor | None, segments: Segments
    ) -> Tensor:
        """Hits of the indexer's choice among the entries that dense attention weighs most, and their number. `lse` is
        that of dense attention, if it ran."""
        if chosen is None:
            return torch.zeros(2, dtype=torch.int64, device=q.device)
        if lse is None:
            lse = self._attend(q, window, entries, None, segments)[1]
        return self.ops.indexer_recall(
            q, entries, lse, chosen, self.config.index_topk, segments,
            ratio=self.ratio, scale=self.config.head_dim**-0.5,
        )  # fmt: skip

    def _entries(self, x: Tensor, context: Context, cache: LayerCache) -> Rows | None:
        """All compressed entries of this layer; None in a sliding-window layer."""
        if self.kind == "swa":
            return None
        segments = context.segments
        new = self.compressor(x, context.entry_rope(self.ratio), segments, cache, "tail")
        return cache.append("entries", new, segments.layout(entry_rows(self.ratio)))

    def _index(
        self, x: Tensor, latent: Tensor, context: Context, cache: LayerCache, recorded: Choices | None
    ) -> tuple[Reading | None, Tensor | None]:
        """The indexer's reading of the call, if something needs it, and its choice: None for every visible entry.

        Its inputs are detached: what it learns from moves no other parameter.
        """
        indexing, segments = context.indexing, context.segments
        if self.kind != "csa" or (recorded is not None and not indexing.distil):
            return None, None if recorded is None else recorded.entries
        x, latent = x.detach(), latent.detach()
        with torch.set_grad_enabled(indexing.distil and torch.is_grad_enabled()):
            keys = self.indexer.keys(x, context.entry_rope(self.ratio), segments, cache)
            chooses = self.indexer.drops(segments) and (indexing.recall or not indexing.dense)
            if not chooses and not indexing.distil:
                return None, None
            reading = Reading(*self.indexer.queries(x, latent, context.rope(compressed=True)), keys)
        if recorded is not None:
            return reading, recorded.entries
        return reading, self.indexer(reading, segments) if chooses else None
