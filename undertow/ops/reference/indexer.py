"""Lightning indexer (model card 4.1): `I[t, s] = sum_j w[t, j] relu(q[t, j] . k[s])` over visible entries, and its
top-k."""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import Tensor

from undertow.ops.reference.precision import wide
from undertow.ops.reference.router import stable_topk
from undertow.ops.reference.tiles import ANCHORED_BLOCK, block_size, entry_step, gather_queries, groups_of_blocks
from undertow.ops.segments import QueryBlocks, Rows, Segments


def _scored(
    q: Tensor, keys: Rows, weights: Tensor, segments: Segments, ratio: int, invariant: bool
) -> Iterator[tuple[QueryBlocks, slice, Tensor]]:
    """Scores `[G, size, N]` of consecutive groups of query blocks, `-inf` where an entry is not visible."""
    blocks = segments.blocks(ANCHORED_BLOCK if invariant else block_size(segments))
    heads = q.shape[1]
    for group in groups_of_blocks(blocks, heads, lambda last: (last + 1) // ratio, invariant):
        visible = max((last + 1) // ratio for last in blocks.last[group])
        step = entry_step(blocks, heads, visible, invariant)
        qb = gather_queries(q, blocks, group)
        wb = gather_queries(weights, blocks, group)[:, :, None]
        document = blocks.document[group, None]
        parts = []
        for start in range(0, visible, step):
            entry = torch.arange(start, start + step, device=q.device)
            row, held = keys.locate(document, entry.expand(len(document), -1))
            kb = wide(keys.data[row]).masked_fill(~held[..., None], 0.0)
            dots = torch.matmul(qb.flatten(1, 2), kb.transpose(1, 2)).view(*qb.shape[:3], step)
            score = torch.matmul(wb, dots.relu_())[:, :, 0]
            limit = (blocks.first[group, None] + torch.arange(blocks.size, device=q.device) + 1) // ratio
            hidden = (entry >= limit[..., None]) | ~held[:, None]
            parts.append(score.masked_fill_(hidden, -torch.inf))
        yield blocks, group, torch.cat(parts, -1) if parts else qb.new_empty(*qb.shape[:2], 0)


def indexer_scores(
    q: Tensor, keys: Rows, weights: Tensor, segments: Segments, ratio: int, *, invariant: bool = False
) -> Tensor:
    """All scores at once, `[T, N]` with `N` the longest document's entries and `-inf` where not visible: for short
    inputs.

    `q [T, h, c]`, `keys` rows `[., c]` one per entry, `weights [T, h]` already scaled by `(h c)^-1/2`.
    """
    longest = max(((p + n) // ratio for p, n in zip(segments.past, segments.new, strict=True)), default=0)
    out = torch.full((segments.tokens, longest), -torch.inf, dtype=wide(q[:0]).dtype, device=q.device)
    for blocks, group, score in _scored(q, keys, weights, segments, ratio, invariant):
        query = blocks.query[group]
        columns = min(score.shape[-1], longest)
        out[query[query >= 0], :columns] = score[query >= 0][:, :columns]
    return out


@torch.no_grad()
def indexer_select(
    q: Tensor, keys: Rows, weights: Tensor, k: int, segments: Segments, ratio: int, *, invariant: bool = False
) -> Tensor:
    """Entries each query keeps: `[T, k]` int64 entry numbers within the document, -1 where fewer than `k` are visible.

    Shapes as `indexer_scores`; scores exist for one group of query blocks at a time. Ties go to the lowest entry. Not
    differentiable, as in the released model.
    """
    out = torch.full((segments.tokens, k), -1, dtype=torch.int64, device=q.device)
    for blocks, group, score in _scored(q, keys, weights, segments, ratio, invariant):
        query = blocks.query[group]
        score = score[query >= 0]
        best = stable_topk(score, k)
        best = torch.where(torch.isneginf(score.gather(-1, best)), -1, best)
        out[query[query >= 0], : best.shape[-1]] = best
    return out
