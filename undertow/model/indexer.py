"""Lightning indexer (model card 4): chooses the compressed entries that a CSA query attends to."""

from __future__ import annotations

from functools import lru_cache
from typing import NamedTuple

import torch
from torch import Tensor, nn

from undertow.config.model import ModelConfig
from undertow.model.cache import LayerCache
from undertow.model.compressor import Compressor
from undertow.model.layers import Linear
from undertow.model.rotary import Table
from undertow.ops import Ops
from undertow.ops.segments import Rows, Segments, entry_rows


@lru_cache(maxsize=8)
def hadamard_signs(width: int, dtype: torch.dtype, device: torch.device) -> Tensor:
    """The Hadamard matrix of a power of two, entries +-1 (exact in every type), `[width, width]`."""
    # Made outside inference mode even when first asked for within it: the cached matrix may serve training later.
    with torch.inference_mode(False):
        signs = torch.ones(1, 1, dtype=dtype, device=device)
        while len(signs) < width:
            signs = torch.cat([torch.cat([signs, signs], 1), torch.cat([signs, -signs], 1)])
    return signs


class Reading(NamedTuple):
    """The indexer's side of a call: query heads `[T, h, c]`, head weights `[T, h]`, and one key per entry."""

    q: Tensor
    weights: Tensor
    keys: Rows


def of_indexer(name: str) -> bool:
    """Whether a parameter of that name in a model belongs to an indexer."""
    return ".indexer." in name


class Indexer(nn.Module):
    """Scores entries with its own small heads and keys, `sum_j w_j relu(q_j . k)`, and keeps the `index_topk` best.

    Its query reads the attention's query latent (`indexer: shared`, the release) or a latent of its own (`own_rank`).
    The choice has no gradient; the indexer learns by distillation.
    """

    def __init__(self, config: ModelConfig, ops: Ops):
        super().__init__()
        self.ops, self.config = ops, config
        heads, width = config.index_n_heads, config.index_head_dim
        rank = config.q_lora_rank
        if config.indexer == "own_rank":
            rank = width
            self.wq_a = Linear(config.hidden_size, rank, ops)
        self.wq_b = Linear(rank, heads * width, ops)
        self.weights_proj = Linear(config.hidden_size, heads, ops)
        self.compressor = Compressor(config, config.csa_ratio, width, True, ops)

    def _spread(self, x: Tensor) -> Tensor:
        """`x @ H / sqrt(width)`: no effect on scores in exact arithmetic, evens out what a low-precision type must
        hold."""
        if not self.config.index_hadamard:
            return x
        return self.ops.linear(x, hadamard_signs(x.shape[-1], x.dtype, x.device)) * x.shape[-1] ** -0.5

    def queries(self, x: Tensor, latent: Tensor, rope: Table) -> tuple[Tensor, Tensor]:
        """Query heads `[T, h, c]` and head weights `[T, h]`, the latter times `(h c)^-1/2`."""
        config = self.config
        heads, width = config.index_n_heads, config.index_head_dim
        source = self.wq_a(x) if config.indexer == "own_rank" else latent
        q = self.wq_b(source).view(-1, heads, width)
        q = self._spread(self.ops.rotary(q, rope.cos, rope.sin))
        return q, self.weights_proj(x) * (heads * width) ** -0.5

    def keys(self, x: Tensor, rope: Table, segments: Segments, cache: LayerCache) -> Rows:
        """One key per entry, rows `[., c]`."""
        keys = self._spread(self.compressor(x, rope, segments, cache, "index_tail"))
        return cache.append("index_keys", keys, segments.layout(entry_rows(self.config.csa_ratio)))

    def drops(self, segments: Segments) -> bool:
        """Whether some query sees more entries than it may keep."""
        longest = max((p + n for p, n in zip(segments.past, segments.new, strict=True)), default=0)
        return longest // self.config.csa_ratio > self.config.index_topk

    def forward(self, reading: Reading, segments: Segments) -> Tensor:
        """The choice: entry numbers `[T, index_topk]`, -1 where fewer are visible. It has no gradient."""
        q, weights, keys = reading
        return self.ops.indexer_select(q, keys, weights, self.config.index_topk, segments, self.config.csa_ratio)
