"""Sparse attention (model card 2.3): one softmax over the sliding window, the visible compressed entries and a sink.

The latent of a key is also its value. Queries are cut into blocks of consecutive positions; a block meets its window as
one rectangle of `window + size - 1` keys and its document's entries in chunks, with a running softmax across them that
starts from the sink. Backward recomputes the probabilities from the saved log-sum-exp. Memory is linear in tokens.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import NamedTuple

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from undertow.ops.reference.precision import wide
from undertow.ops.reference.tiles import ANCHORED_BLOCK, block_size, entry_step, gather_queries, groups_of_blocks
from undertow.ops.segments import QueryBlocks, RowLayout, Rows, Segments


class _Problem(NamedTuple):
    """Everything about one call that is not differentiated."""

    segments: Segments
    blocks: QueryBlocks
    window: int
    window_layout: RowLayout
    entry_layout: RowLayout | None
    ratio: int
    selected: Tensor | None
    scale: float
    invariant: bool

    def visible(self, last: int) -> int:
        """Compressed entries that a query at position `last` may see."""
        return (last + 1) // self.ratio if self.entry_layout is not None else 0


class _Tile(NamedTuple):
    """A rectangle of keys for a group of blocks: rows `[G, J]` of one source, and who sees them `[G, size, 1, J]`."""

    entries: bool
    rows: Tensor
    held: Tensor
    seen: Tensor


def _window_tile(p: _Problem, group: slice, positions: Tensor) -> _Tile:
    blocks = p.blocks
    key = blocks.first[group, None] - (p.window - 1) + torch.arange(p.window + blocks.size - 1, device=positions.device)
    rows, held = p.window_layout.locate(blocks.document[group, None], key)
    distance = positions[..., None] - key[:, None]
    seen = (distance >= 0) & (distance < p.window) & held[:, None]
    return _Tile(False, rows, held, seen[:, :, None])


def _chosen(p: _Problem, group: slice, entries: int) -> Tensor | None:
    if p.selected is None:
        return None
    query = p.blocks.query[group]
    picks = p.selected[query.clamp(min=0)]
    table = torch.zeros(*query.shape, entries + 1, dtype=torch.bool, device=picks.device)
    return table.scatter_(-1, torch.where((picks < 0) | (picks >= entries), entries, picks), True)


def _tiles(p: _Problem, group: slice, heads: int) -> Iterator[_Tile]:
    blocks = p.blocks
    positions = blocks.first[group, None] + torch.arange(blocks.size, device=blocks.first.device)
    present = (blocks.query[group] >= 0)[:, :, None, None]
    tile = _window_tile(p, group, positions)
    yield tile._replace(seen=tile.seen & present)
    visible = max(p.visible(last) for last in blocks.last[group])
    if p.entry_layout is None or visible == 0:
        return
    step = entry_step(blocks, heads, visible, p.invariant)
    chosen = _chosen(p, group, -(-visible // step) * step)
    limit = (positions + 1) // p.ratio
    for start in range(0, visible, step):
        entry = torch.arange(start, start + step, device=positions.device)
        rows, held = p.entry_layout.locate(blocks.document[group, None], entry.expand(len(positions), -1))
        seen = (entry < limit[..., None]) & held[:, None]
        if chosen is not None:
            seen = seen & chosen[..., start : start + step]
        yield _Tile(True, rows, held, seen[:, :, None] & present)


def _keys(tile: _Tile, window: Tensor, entries: Tensor | None) -> Tensor:
    source = entries if tile.entries else window
    assert source is not None
    gathered = source[tile.rows.flatten()].view(*tile.rows.shape, -1)
    return wide(gathered).masked_fill(~tile.held[..., None], 0.0)


def _scores(q: Tensor, keys: Tensor, tile: _Tile, scale: float) -> Tensor:
    heads = q.shape[2]
    dots = torch.matmul(q.flatten(1, 2), keys.transpose(1, 2)).mul_(scale)
    return dots.view(len(q), -1, heads, keys.shape[1]).masked_fill_(~tile.seen, -torch.inf)


def _groups(p: _Problem, heads: int) -> Iterator[slice]:
    fixed = p.window + p.blocks.size - 1
    return groups_of_blocks(p.blocks, heads, lambda last: max(fixed, p.visible(last)), p.invariant)


class _SparseAttention(torch.autograd.Function):
    @staticmethod
    def forward(ctx, q: Tensor, window: Tensor, entries: Tensor | None, sink: Tensor, p: _Problem):
        out = torch.empty_like(q)
        lse = torch.empty(q.shape[:2], dtype=wide(sink).dtype, device=q.device)
        for group in _groups(p, q.shape[1]):
            qb = gather_queries(q, p.blocks, group)
            top = wide(sink)[None, None, :].expand(qb.shape[:3]).to(qb.dtype)
            total, mixed = torch.ones_like(top), torch.zeros_like(qb)
            for tile in _tiles(p, group, q.shape[1]):
                keys = _keys(tile, window, entries)
                score = _scores(qb, keys, tile, p.scale)
                new = torch.maximum(top, score.amax(-1))
                share = score.sub_(new[..., None]).exp_()
                keep = torch.exp(top - new)
                total = total * keep + share.sum(-1)
                mixed = mixed * keep[..., None] + torch.matmul(share.flatten(1, 2), keys).view_as(mixed)
                top = new
            query = p.blocks.query[group]
            here = slice(None) if p.blocks.full else query >= 0
            out[query[here].flatten()] = (mixed / total[..., None])[here].view(-1, *q.shape[1:]).to(q.dtype)
            lse[query[here].flatten()] = (top + torch.log(total))[here].view(-1, q.shape[1]).to(lse.dtype)
        ctx.save_for_backward(q, window, entries, sink, out, lse)
        ctx.problem = p
        ctx.mark_non_differentiable(lse)
        return out, lse

    @staticmethod
    @once_differentiable
    def backward(ctx, grad: Tensor, _: Tensor):  # type: ignore[override]
        q, window, entries, sink, out, lse = ctx.saved_tensors
        p: _Problem = ctx.problem
        delta = (wide(grad) * wide(out)).sum(-1)
        grad_q = torch.empty_like(q)
        grads = [torch.zeros_like(wide(window)), None if entries is None else torch.zeros_like(wide(entries))]
        for group in _groups(p, q.shape[1]):
            qb, gb, db, lb = (gather_queries(x, p.blocks, group) for x in (q, grad, delta, lse))
            grad_qb = torch.zeros_like(qb)
            for tile in _tiles(p, group, q.shape[1]):
                keys = _keys(tile, window, entries)
                share = _scores(qb, keys, tile, p.scale).sub_(lb[..., None]).exp_()
                slope = torch.matmul(gb.flatten(1, 2), keys.transpose(1, 2)).view_as(share)
                slope = slope.sub_(db[..., None]).mul_(share).mul_(p.scale).flatten(1, 2)
                grad_qb += torch.matmul(slope, keys).view_as(qb)
                grad_keys = torch.matmul(slope.transpose(1, 2), qb.flatten(1, 2))
                grad_keys += torch.matmul(share.flatten(1, 2).transpose(1, 2), gb.flatten(1, 2))
                target = grads[tile.entries]
                assert target is not None
                grad_keys.masked_fill_(~tile.held[..., None], 0.0)
                target.index_add_(0, tile.rows.flatten(), grad_keys.flatten(0, 1))
            query = p.blocks.query[group]
            here = slice(None) if p.blocks.full else query >= 0
            grad_q[query[here].flatten()] = grad_qb[here].view(-1, *q.shape[1:]).to(q.dtype)
        grad_sink = -(torch.exp(wide(sink) - lse) * delta).sum(0)
        grad_entries = None if entries is None or grads[1] is None else grads[1].to(entries.dtype)
        return grad_q, grads[0].to(window.dtype), grad_entries, grad_sink.to(sink.dtype), None  # type: ignore[union-attr]


def sparse_attention(
    q: Tensor,
    window: Rows,
    entries: Rows | None,
    selected: Tensor | None,
    sink: Tensor,
    segments: Segments,
    *,
    window_size: int,
    ratio: int = 0,
    scale: float,
    invariant: bool = False,
) -> tuple[Tensor, Tensor]:
    """Attention of every query to its window, its document's visible entries and a sink; value = key.

    `q [T, h, D]`, `window` rows `[., D]` (one a token), `entries` rows `[., D]` (one per `ratio` tokens) or None for
    SWA, `selected [T, k]` entry numbers, each of which counts once, or -1 (CSA), or None for all visible (HCA),
    `sink [h]`. A query at position `t` sees window keys `t - window_size < j <= t` and entries `s < (t + 1) // ratio`.
    Returns `o [T, h, D]` and the log-sum-exp including the sink `[T, h]` float32 (not differentiable).
    """
    blocks = segments.blocks(ANCHORED_BLOCK if invariant else block_size(segments))
    entry_layout = None if entries is None else entries.layout
    problem = _Problem(segments, blocks, window_size, window.layout, entry_layout, ratio, selected, scale, invariant)
    return _SparseAttention.apply(q, window.data, None if entries is None else entries.data, sink, problem)
