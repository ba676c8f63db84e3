"""Indexer distillation (model card 4.2): KL from the attention's own weight on entries to the indexer's softmax.

Query blocks meet their document's entries in chunks, as in attention. Forward makes one pass with running sums and
keeps two numbers a query; backward recomputes the scores. Memory is linear in tokens.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import NamedTuple

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from undertow.ops.reference.precision import wide
from undertow.ops.reference.router import stable_topk
from undertow.ops.reference.tiles import ANCHORED_BLOCK, block_size, entry_step, gather_queries, groups_of_blocks
from undertow.ops.segments import QueryBlocks, RowLayout, Rows, Segments

# Least total weight on entries that a target is divided by.
EPS = 1e-10


class _Problem(NamedTuple):
    """Everything about one call that is not a tensor of values."""

    blocks: QueryBlocks
    heads: int
    key_layout: RowLayout
    entry_layout: RowLayout
    selected: Tensor | None
    ratio: int
    scale: float
    invariant: bool


class _Tile(NamedTuple):
    """Entries for a group of blocks: rows of keys and of latents `[G, N]`, and who counts them `[G, size, N]`."""

    keys: Tensor
    entries: Tensor
    seen: Tensor


def _problem(
    heads: int, keys: RowLayout, entries: Rows, selected: Tensor | None, segments: Segments,
    ratio: int, scale: float, invariant: bool,
) -> _Problem:  # fmt: skip
    blocks = segments.blocks(ANCHORED_BLOCK if invariant else block_size(segments))
    return _Problem(blocks, heads, keys, entries.layout, selected, ratio, scale, invariant)


def _groups(p: _Problem) -> Iterator[tuple[slice, int]]:
    """Groups of query blocks and the entries that their last query sees; groups that see none are left out."""
    for group in groups_of_blocks(p.blocks, p.heads, lambda last: (last + 1) // p.ratio, p.invariant):
        visible = max((last + 1) // p.ratio for last in p.blocks.last[group])
        if visible:
            yield group, visible


def _chosen(p: _Problem, selected: Tensor, group: slice, width: int) -> Tensor:
    """The selection of each query as a table `[G, size, width]`."""
    query = p.blocks.query[group]
    picks = selected[query.clamp(min=0)]
    table = torch.zeros(*query.shape, width + 1, dtype=torch.bool, device=picks.device)
    return table.scatter_(-1, torch.where((picks < 0) | (picks >= width), width, picks), True)[..., :-1]


def _tiles(p: _Problem, group: slice, visible: int) -> Iterator[_Tile]:
    blocks = p.blocks
    query, document = blocks.query[group], blocks.document[group, None]
    limit = (blocks.first[group, None] + torch.arange(blocks.size, device=query.device) + 1) // p.ratio
    limit = limit.masked_fill(query < 0, 0)
    step = entry_step(blocks, p.heads, visible, p.invariant)
    chosen = None if p.selected is None else _chosen(p, p.selected, group, -(-visible // step) * step)
    for start in range(0, visible, step):
        entry = torch.arange(start, start + step, device=query.device)
        keys, held = p.key_layout.locate(document, entry.expand(len(document), -1))
        entries, also = p.entry_layout.locate(document, entry.expand(len(document), -1))
        seen = (entry < limit[..., None]) & (held & also)[:, None]
        yield _Tile(keys, entries, seen if chosen is None else seen & chosen[..., start : start + step])


def _dots(q: Tensor, keys: Tensor) -> Tensor:
    """`q [G, size, h, c]` with `keys [G, N, c]` -> `[G, size, h, N]`."""
    return torch.matmul(q.flatten(1, 2), keys.transpose(1, 2)).view(*q.shape[:3], -1)


def _mass(p: _Problem, qb: Tensor, lb: Tensor, entries: Tensor, tile: _Tile) -> Tensor:
    """Attention probability of each entry summed over heads, 0 where it does not count, `[G, size, N]`."""
    share = _dots(qb, wide(entries[tile.entries])).mul_(p.scale).sub_(lb[..., None]).exp_()
    return share.sum(2).masked_fill_(~tile.seen, 0.0)


class _Distillation(torch.autograd.Function):
    @staticmethod
    def forward(ctx, q: Tensor, keys: Tensor, weights: Tensor, attention_q: Tensor, entries: Tensor, lse: Tensor,
                p: _Problem) -> Tensor:  # fmt: skip
        loss, total, normaliser = (torch.zeros(len(q), dtype=wide(q[:0]).dtype, device=q.device) for _ in range(3))
        for group, visible in _groups(p):
            qb, wb, ab, lb = (gather_queries(x, p.blocks, group) for x in (q, weights, attention_q, lse))
            mass, entropy, agreed, below = (torch.zeros_like(qb[..., 0, 0]) for _ in range(4))
            top = torch.full_like(mass, -torch.inf)
            for tile in _tiles(p, group, visible):
                m = _mass(p, ab, lb, entries, tile)
                score = torch.matmul(wb[:, :, None], _dots(qb, wide(keys[tile.keys])).relu_())[:, :, 0]
                mass += m.sum(-1)
                entropy += torch.xlogy(m, m).sum(-1)
                agreed += (m * score).sum(-1)
                score.masked_fill_(~tile.seen, -torch.inf)
                new = torch.maximum(top, score.amax(-1))
                base = new.masked_fill(torch.isneginf(new), 0.0)
                below = below * torch.exp(top - base) + torch.exp(score - base[..., None]).sum(-1)
                top = new
            log_sum = torch.where(below > 0, top + torch.log(below), 0.0)
            floored = mass.clamp(min=EPS)
            # sum t (log t - score + log_sum), t = m / floored, from sums over m.
            kl = (entropy - agreed + mass * (log_sum - torch.log(floored))) / floored
            here = p.blocks.query[group] >= 0
            rows = p.blocks.query[group][here]
            loss[rows], total[rows], normaliser[rows] = kl[here], mass[here], log_sum[here]
        ctx.save_for_backward(q, keys, weights, attention_q, entries, lse, total, normaliser)
        ctx.problem = p
        return loss

    @staticmethod
    @once_differentiable
    def backward(ctx, grad: Tensor):  # type: ignore[override]
        q, keys, weights, attention_q, entries, lse, total, normaliser = ctx.saved_tensors
        p: _Problem = ctx.problem
        grad_q, grad_keys, grad_weights = (torch.zeros_like(wide(x)) for x in (q, keys, weights))
        # d KL / d score = t sum - t: `pull` times the indexer's softmax, `push` times the attention's mass.
        push = grad / total.clamp(min=EPS)
        pull = push * total
        for group, visible in _groups(p):
            qb, wb, ab, lb = (gather_queries(x, p.blocks, group) for x in (q, weights, attention_q, lse))
            pushed, pulled, nb = (gather_queries(x, p.blocks, group)[..., None] for x in (push, pull, normaliser))
            grad_qb, grad_wb = torch.zeros_like(qb), torch.zeros_like(wb)
            for tile in _tiles(p, group, visible):
                kb = wide(keys[tile.keys])
                dots = _dots(qb, kb).relu_()
                score = torch.matmul(wb[:, :, None], dots)[:, :, 0].masked_fill_(~tile.seen, -torch.inf)
                slope = score.sub_(nb).exp_().mul_(pulled).sub_(_mass(p, ab, lb, entries, tile).mul_(pushed))
                grad_wb += torch.matmul(dots, slope[..., None])[..., 0]
                each = (slope[:, :, None] * wb[..., None]).mul_(dots > 0).flatten(1, 2)
                grad_qb += torch.matmul(each, kb).view_as(qb)
                of_keys = torch.matmul(each.transpose(1, 2), qb.flatten(1, 2))
                grad_keys.index_add_(0, tile.keys.flatten(), of_keys.flatten(0, 1))
            here = p.blocks.query[group] >= 0
            rows = p.blocks.query[group][here]
            grad_q[rows], grad_weights[rows] = grad_qb[here], grad_wb[here]
        none = (None,) * 4
        return grad_q.to(q.dtype), grad_keys.to(keys.dtype), grad_weights.to(weights.dtype), *none


def indexer_distillation(
    q: Tensor,
    keys: Rows,
    weights: Tensor,
    attention_q: Tensor,
    entries: Rows,
    lse: Tensor,
    selected: Tensor | None,
    segments: Segments,
    *,
    ratio: int,
    scale: float,
    invariant: bool = False,
) -> Tensor:
    """`KL(target || softmax of the indexer's scores)` of each query in nats, `[T]` float32; 0 where it sees no entry.

    `q [T, hI, cI]`, `keys` rows `[., cI]` and `weights [T, hI]` are the indexer's, as in `indexer_scores`, and get
    gradients. `attention_q [T, h, D]`, `entries` rows `[., D]` and `lse [T, h]` are what `sparse_attention` took and
    returned and get none: the target is its probability of each entry, summed over heads and divided by the sum over
    entries (at least 1e-10). `selected [T, k]`, entry numbers or -1, restricts both sides; None takes all visible.
    """
    heads = max(q.shape[1], attention_q.shape[1])
    problem = _problem(heads, keys.layout, entries, selected, segments, ratio, scale, invariant)
    taught = attention_q.detach(), entries.data.detach(), lse.detach()
    return _Distillation.apply(q, keys.data, weights, *taught, problem)


@torch.no_grad()
def indexer_recall(
    attention_q: Tensor,
    entries: Rows,
    lse: Tensor,
    selected: Tensor,
    k: int,
    segments: Segments,
    *,
    ratio: int,
    scale: float,
    invariant: bool = False,
) -> Tensor:
    """How many of each query's `k` heaviest entries are in `selected [T, k]`, and how many there are: `[2]` int64.

    Weight is the attention probability summed over heads; `lse [T, h]` must come from attention to every visible
    entry. Only queries that see more than `k` entries count; of equal entries the lowest is the heavier.
    """
    p = _problem(attention_q.shape[1], entries.layout, entries, None, segments, ratio, scale, invariant)
    found = torch.zeros(2, dtype=torch.int64, device=attention_q.device)
    for group, visible in _groups(p):
        qb, lb = (gather_queries(x, p.blocks, group) for x in (attention_q, lse))
        tiles = list(_tiles(p, group, visible))
        seen = torch.cat([tile.seen for tile in tiles], -1)
        mass = torch.cat([_mass(p, qb, lb, entries.data, tile) for tile in tiles], -1).masked_fill_(~seen, -1.0)
        chooses = seen.sum(-1) > k
        best = stable_topk(mass[chooses], k)
        hit = _chosen(p, selected, group, mass.shape[-1])[chooses].gather(-1, best)
        found += torch.stack([hit.sum(), torch.tensor(hit.numel(), device=hit.device)])
    return found
