"""Scores of the indexer, `I[t, n] = sum_j w[t, j] relu(q[t, j] . k[n])`, for a run of tokens.

A tile of keys stays in a program while tokens pass it. Keys are the rows of the product and heads its columns, which
lie in one thread or its neighbours: ReLU, weights and the sum over heads never leave the registers.
"""

# pyright: basic, reportArgumentType=false, reportOperatorIssue=false, reportAssignmentType=false, reportCallIssue=false
# pyright: reportGeneralTypeIssues=false
# The language of kernels has types of its own.
from __future__ import annotations

import triton
import triton.language as tl
from torch import Tensor
from triton.tools.tensor_descriptor import TensorDescriptor

from undertow.ops.segments import Segments
from undertow.ops.triton.attention.descriptors import described
from undertow.ops.triton.attention.geometry import sight
from undertow.ops.triton.indexer.runs import Run, together
from undertow.ops.triton.indexer.tiles import tiles


@triton.jit
def indexer_score(
    q, keys, weights, key_scales, low, high, out, start, stop, width, entries,
    HEADS: tl.constexpr, SCALED: tl.constexpr, ENTRIES: tl.constexpr, TOKENS: tl.constexpr, BLOCK: tl.constexpr,
    STAGES: tl.constexpr,
):  # fmt: skip
    """Program (i, j): the i-th ENTRIES of those that the j-th BLOCK tokens from the end see together, TOKENS at a time.

    SCALED: keys are multiplied by `key_scales [N]`; those of queries are in the weights.
    """
    first = start + (tl.num_programs(1) - 1 - tl.program_id(1)) * BLOCK
    last = tl.minimum(first + BLOCK, stop)
    n0 = tl.load(low + first) + tl.program_id(0) * ENTRIES
    if n0 < tl.load(high + last - 1):
        k = keys.load([n0, 0])
        n = n0 + tl.arange(0, ENTRIES)
        head = tl.arange(0, TOKENS * HEADS)
        if SCALED:
            key_scale = tl.load(key_scales + n, n < entries, other=0.0)[:, None]
        for t in tl.range(first, last, TOKENS, num_stages=STAGES):
            weight = tl.load(weights + t * HEADS + head, t * HEADS + head < stop * HEADS, other=0.0)
            token = t + tl.arange(0, TOKENS)
            begin = tl.load(low + token, token < last, other=0)
            end = tl.load(high + token, token < last, other=0)
            dots = tl.dot(k, q.load([t * HEADS, 0]).T)
            # relu(NaN) is NaN.
            dots = tl.maximum(dots, 0.0, propagate_nan=tl.PropagateNan.ALL) * weight.to(tl.float32)[None, :]
            total = tl.sum(tl.reshape(dots, (ENTRIES, TOKENS, HEADS)), 2)
            if SCALED:
                total *= key_scale
            seen = (n[:, None] >= begin[None, :]) & (n[:, None] < end[None, :])
            place = (token - start).to(tl.int64)[None, :] * width + (n[:, None] - begin[None, :])
            tl.store(out + place, total, seen)


def scores_of(
    q: Tensor, keys: Tensor, weights: Tensor, segments: Segments, ratio: int, run: Run, out: Tensor,
    key_scales: Tensor | None = None,
) -> Tensor:  # fmt: skip
    """Scores of a run into `out [run.tokens, run.width]` float32, which stays as it is where nothing is visible.

    `q [T, h, c]`, `keys [N, c]` (one entry after the other, no past), `weights [T, h]`, all contiguous;
    `key_scales [N]` float32 multiply the keys.
    """
    heads = q.shape[1]
    tile = tiles(q.device, "scores", heads)
    seen = together(segments, ratio, run, tile["BLOCK"])
    if seen == 0:
        return out
    view = sight(segments, ratio)
    indexer_score[triton.cdiv(seen, tile["ENTRIES"]), triton.cdiv(run.tokens, tile["BLOCK"])](
        matrix(q, tile["TOKENS"] * heads), matrix(keys, tile["ENTRIES"]), weights, key_scales, view.low, view.high, out,
        run.start, run.stop, run.width, view.entries, HEADS=heads, SCALED=key_scales is not None, **tile,
    )  # fmt: skip
    return out


def matrix(x: Tensor, count: int, columns: int = 0) -> TensorDescriptor:
    """`x [..., c]` as a matrix read by `count` rows of `columns` columns (all by default); rows outside are zero."""
    flat = x.view(-1, x.shape[-1])
    return described(flat, count, columns or flat.shape[1])
