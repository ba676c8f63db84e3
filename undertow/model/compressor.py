"""Compressors (model card 3): one latent entry per group of tokens, overlapping windows for CSA, plain ones for HCA."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from undertow.config.model import ModelConfig
from undertow.model.cache import LayerCache
from undertow.model.layers import Linear, RMSNorm, float32_parameter
from undertow.model.rotary import Table
from undertow.ops import Ops
from undertow.ops.reference.compress import Running
from undertow.ops.reference.precision import wide
from undertow.ops.segments import RowKind, Rows, Segments, moved, tail_rows


class Compressor(nn.Module):
    """Pools values `wkv(x)` by gates `wgate(x) + ape`, then normalises and rotates each entry.

    With `overlap` (CSA and its indexer) both projections are `2 width` wide: the first half of the channels belongs to
    the *next* group's window, the second half to the own group's. Everything up to the pooled entry is float32.
    """

    def __init__(self, config: ModelConfig, ratio: int, width: int, overlap: bool, ops: Ops):
        super().__init__()
        self.ops, self.ratio, self.width, self.overlap = ops, ratio, width, overlap
        channels = 2 * width if overlap else width
        self.wkv = Linear(config.hidden_size, channels, ops)
        self.wgate = Linear(config.hidden_size, channels, ops)
        self.ape = float32_parameter(ratio, channels)
        self.norm = RMSNorm(width, config.rms_norm_eps, ops)

    def forward(self, x: Tensor, rope: Table, segments: Segments, cache: LayerCache, name: str) -> Tensor:
        """`x [T, d]`, `rope` at the entries this call completes -> those entries `[N, width]`, document after document.

        `name` tells the compressor's open rows apart from another's in the same layer's cache.
        """
        u = self.ops.wide_linear(x, self.wkv.weight)
        v = self.ops.wide_linear(x, self.wgate.weight)
        pool = self._overlapping if self.overlap else self._plain
        pooled, completed = pool(u, v, segments, cache, name), segments.completed(self.ratio)
        entries = self.norm((pooled if completed is None else pooled.index_select(0, completed)).to(x.dtype))
        return self.ops.rotary(entries, rope.cos, rope.sin)

    def _slots(self, rows: Rows, segments: Segments, shift: int) -> Tensor:
        document, number, _ = segments.groups(self.ratio)
        token = (number + shift)[:, None] * self.ratio + torch.arange(self.ratio, device=number.device)
        row, held = rows.locate(document[:, None], token)
        return torch.where(held, row, -1)

    def _overlapping(self, u: Tensor, v: Tensor, segments: Segments, cache: LayerCache, name: str) -> Tensor:
        """The window of a group: the overlap half of the group before it (absent for the first), its own half."""
        both = cache.append(name, torch.stack([u, v], 1), segments.layout(tail_rows(self.ratio)))
        u, v = both.data[:, 0], both.data[:, 1]
        before, own = self._slots(both, segments, -1), self._slots(both, segments, 0)
        slots = torch.cat([before, torch.where(own < 0, -1, own + len(u))], 1)
        u, v, ape = (torch.cat([t[:, : self.width], t[:, self.width :]]) for t in (u, v, wide(self.ape)))
        return self.ops.compress_pool(u, v, ape, slots)[0]

    def _plain(self, u: Tensor, v: Tensor, segments: Segments, cache: LayerCache, name: str) -> Tensor:
        """Windows of the own tokens only; an open one stays in the cache as its running softmax, one per document."""
        document, number, complete = segments.groups(self.ratio)
        new = segments.layout(_this_call)
        token = number[:, None] * self.ratio + torch.arange(self.ratio, device=u.device)
        row, held = new.locate(document[:, None], token)
        kept = cache.load(name)
        state = None
        if kept is not None:
            carried = ((number * self.ratio) < segments.starts[document])[:, None]
            empty = Running.empty(len(number), self.width, u)
            state = Running(*(torch.where(carried, k[document], e) for k, e in zip(kept, empty, strict=True)))
        entry, state = self.ops.compress_pool(u, v, wide(self.ape), torch.where(held, row, -1), state)
        cache.store(name, lambda: _open_windows(kept, state, document[~complete], ~complete, segments))
        return entry


_this_call = RowKind("this call", 1, lambda tokens: 0)


def _open_windows(
    kept: Running | None, state: Running, owner: Tensor, still_open: Tensor, segments: Segments
) -> Running:
    """Running softmax of each document's open window after this call; documents without new tokens keep theirs."""
    after = Running.empty(len(segments.new), state.top.shape[1], state.top)
    if kept is not None:
        idle = moved(torch.tensor([n == 0 for n in segments.new]), owner.device)[:, None]
        after = Running(*(torch.where(idle, k, e) for k, e in zip(kept, after, strict=True)))
    return Running(*(a.index_copy(0, owner, s[still_open]) for a, s in zip(after, state, strict=True)))
