"""Scores, mass and gradients of the entries that each token selected alone: what pays where far more are visible.

Matrices are `[tokens, columns]` as in a run, but column `c` of a token is the `c`-th entry that it selected.
"""

# pyright: basic, reportArgumentType=false, reportOperatorIssue=false, reportAssignmentType=false, reportCallIssue=false
# pyright: reportGeneralTypeIssues=false
# The language of kernels has types of its own.
from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from undertow.ops.segments import Segments
from undertow.ops.triton.attention.geometry import sight
from undertow.ops.triton.attention.selection import chosen_rows, row_read
from undertow.ops.triton.attention.tiles import dividing
from undertow.ops.triton.attention.window_forward import LOG2E
from undertow.ops.triton.indexer.runs import Run
from undertow.ops.triton.indexer.scoring import matrix
from undertow.ops.triton.indexer.tiles import tiles

_PAYS = 2.0
"""Where tokens see more than so many times the entries that they select, on average, to go by the selection pays."""


@triton.jit
def indexer_measure(
    q, keys, weights, attention_q, latents, lse, rows, counts, scores, mass, start, columns, scale,
    HEADS: tl.constexpr, WIDTH: tl.constexpr, TAUGHT: tl.constexpr, LATENT: tl.constexpr, ENTRIES: tl.constexpr,
    CHUNK: tl.constexpr, STAGES: tl.constexpr,
):  # fmt: skip
    """Program (i, j): scores and mass of the i-th ENTRIES that the run's token j selected."""
    token = start + tl.program_id(1)
    count = tl.load(counts + token)
    if tl.program_id(0) * ENTRIES < count:
        slot = tl.program_id(0) * ENTRIES + tl.arange(0, ENTRIES)
        n = tl.load(rows + token.to(tl.int64) * columns + slot, slot < count, other=0).to(tl.int64)[:, None]
        weight = tl.load(weights + token * HEADS + tl.arange(0, HEADS)).to(tl.float32)
        below = tl.load(lse + token * TAUGHT + tl.arange(0, TAUGHT)) * LOG2E
        dots = tl.dot(tl.load(keys + n * WIDTH + tl.arange(0, WIDTH)[None, :]), q.load([token * HEADS, 0]).T)
        dots = tl.maximum(dots, 0.0, propagate_nan=tl.PropagateNan.ALL) * weight[None, :]
        place = tl.program_id(1).to(tl.int64) * columns + slot
        tl.store(scores + place, tl.sum(dots, 1), slot < count)
        logits = tl.zeros((ENTRIES, TAUGHT), tl.float32)
        for c in tl.range(0, LATENT, CHUNK, num_stages=STAGES):
            part = tl.load(latents + n * LATENT + (c + tl.arange(0, CHUNK))[None, :])
            logits = tl.dot(part, attention_q.load([token * TAUGHT, c]).T, logits)
        share = tl.exp2(logits * (scale * LOG2E) - below[None, :])
        tl.store(mass + place, tl.sum(share, 1), slot < count)


@triton.jit
def indexer_of_chosen(
    q, keys, weights, slope, rows, counts, dq, dk, dw, start, columns,
    HEADS: tl.constexpr, WIDTH: tl.constexpr, ENTRIES: tl.constexpr, STAGES: tl.constexpr,
):  # fmt: skip
    """One token: its heads' dq and dw; what it gives to the keys that it selected is added to `dk [N, c]`."""
    token = start + tl.program_id(0)
    count = tl.load(counts + token)
    head, c = tl.arange(0, HEADS), tl.arange(0, WIDTH)
    a = q.load([token * HEADS, 0])
    weight = tl.load(weights + token * HEADS + head).to(tl.float32)
    rows += token.to(tl.int64) * columns
    slope += tl.program_id(0).to(tl.int64) * columns
    sums = tl.zeros((HEADS, WIDTH), tl.float32)
    of_weight = tl.zeros((HEADS,), tl.float32)
    for s in tl.range(0, count, ENTRIES, num_stages=STAGES):
        slot = s + tl.arange(0, ENTRIES)
        n = row_read(tl.load(rows + slot)).to(tl.int64)[:, None]
        g = tl.load(slope + slot, slot < count, other=0.0)[:, None]
        k = tl.load(keys + n * WIDTH + c[None, :])
        dots = tl.dot(k, a.T)
        of_weight += tl.sum(tl.maximum(dots, 0.0) * g, 0)
        # Zero times a slope that is NaN is NaN.
        each = tl.where(dots > 0.0, g, g * 0.0)
        sums = tl.dot(tl.trans(each.to(tl.bfloat16)), k, sums)
        given = tl.dot((each * weight[None, :]).to(tl.bfloat16), a)
        tl.atomic_add(dk + n * WIDTH + c[None, :], given, (slot < count)[:, None], sem="relaxed")
    place = (token * HEADS + head).to(tl.int64)
    tl.store(dq + place[:, None] * WIDTH + c[None, :], sums * weight[:, None])
    tl.store(dw + place, of_weight)


def pays(selected: Tensor | None, segments: Segments, ratio: int) -> bool:
    """Whether to go by the selection: tokens see, on average, more than twice the entries that they may select.

    Never where torch is to be deterministic: the keys' gradient is then added in an order that varies.
    """
    if selected is None or torch.are_deterministic_algorithms_enabled():
        return False
    keep = selected.shape[1]

    def make() -> bool:
        low, high = sight(segments, ratio).seen
        seen = (high - low).double()
        return bool(seen.sum() > _PAYS * seen.clamp(max=keep).sum())

    return segments.once(("indexer pays", ratio, keep), make)


def rows_of(selected: Tensor, segments: Segments, ratio: int) -> tuple[Tensor, Tensor]:
    """Rows of the entries that each token selected, int32 `[T, columns]`, valid ones first, and their count `[T]`."""
    view = sight(segments, ratio)
    return chosen_rows(selected.contiguous(), view.low, view.high)


def measure_chosen(
    q: Tensor, keys: Tensor, weights: Tensor, attention_q: Tensor, latents: Tensor, lse: Tensor,
    picked: tuple[Tensor, Tensor], scale: float, run: Run, scores: Tensor, mass: Tensor,
) -> None:  # fmt: skip
    """Scores and mass of a run, float32 `[run.tokens, columns]`, for the entries of `picked` (see `rows_of`)."""
    heads, taught, wide = q.shape[1], attention_q.shape[1], attention_q.shape[2]
    tile = tiles(q.device, "measure")
    tile["CHUNK"] = dividing(tile["CHUNK"], wide)
    rows, counts = picked
    indexer_measure[triton.cdiv(run.width, tile["ENTRIES"]), run.tokens](
        matrix(q, heads), keys, weights, matrix(attention_q, taught, tile["CHUNK"]), latents, lse, rows, counts,
        scores, mass, run.start, run.width, scale, HEADS=heads, WIDTH=q.shape[2], TAUGHT=taught, LATENT=wide, **tile,
    )  # fmt: skip


def gradients_of_chosen(
    q: Tensor, keys: Tensor, weights: Tensor, picked: tuple[Tensor, Tensor], run: Run, slope: Tensor,
    of_q: Tensor, of_keys: Tensor, of_weights: Tensor,
) -> None:  # fmt: skip
    """From `slope [run.tokens, columns]`: the run's rows of `of_q` and `of_weights`; `of_keys` float32 grows."""
    rows, counts = picked
    indexer_of_chosen[(run.tokens,)](
        matrix(q, q.shape[1]), keys, weights, slope, rows, counts, of_q, of_keys, of_weights, run.start, run.width,
        HEADS=q.shape[1], WIDTH=q.shape[2], **tiles(q.device, "of chosen"),
    )  # fmt: skip
