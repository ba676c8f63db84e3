"""What attention gives each entry: `m[t, n] = sum_h exp(scale q[t, h] . e[n] - lse[t, h])` for a run of tokens.

As in scoring, entries are the rows of the product and heads its columns, so that their sum stays in registers.
"""

# pyright: basic, reportArgumentType=false, reportOperatorIssue=false, reportAssignmentType=false, reportCallIssue=false
# pyright: reportGeneralTypeIssues=false
# The language of kernels has types of its own.
from __future__ import annotations

import triton
import triton.language as tl
from torch import Tensor

from undertow.ops.segments import Segments
from undertow.ops.triton.attention.geometry import sight
from undertow.ops.triton.attention.tiles import dividing
from undertow.ops.triton.attention.window_forward import LOG2E
from undertow.ops.triton.indexer.runs import Run, together
from undertow.ops.triton.indexer.scoring import matrix
from undertow.ops.triton.indexer.tiles import tiles


@triton.jit
def indexer_mass(
    q, latents, lse, low, high, out, start, stop, width, scale,
    HEADS: tl.constexpr, WIDTH: tl.constexpr, ENTRIES: tl.constexpr, TOKENS: tl.constexpr, CHUNK: tl.constexpr,
    STAGES: tl.constexpr,
):  # fmt: skip
    """Program (i, j): the i-th ENTRIES of those that the j-th TOKENS tokens from the end see together."""
    first = start + (tl.num_programs(1) - 1 - tl.program_id(1)) * TOKENS
    last = tl.minimum(first + TOKENS, stop)
    n0 = tl.load(low + first) + tl.program_id(0) * ENTRIES
    if n0 < tl.load(high + last - 1):
        dots = tl.zeros((ENTRIES, TOKENS * HEADS), tl.float32)
        for c in tl.range(0, WIDTH, CHUNK, num_stages=STAGES):
            dots = tl.dot(latents.load([n0, c]), q.load([first * HEADS, c]).T, dots)
        head = first * HEADS + tl.arange(0, TOKENS * HEADS)
        below = tl.load(lse + head, head < stop * HEADS, other=0.0) * LOG2E
        share = tl.exp2(dots * (scale * LOG2E) - below[None, :])
        total = tl.sum(tl.reshape(share, (ENTRIES, TOKENS, HEADS)), 2)
        n = n0 + tl.arange(0, ENTRIES)
        token = first + tl.arange(0, TOKENS)
        begin = tl.load(low + token, token < last, other=0)
        end = tl.load(high + token, token < last, other=0)
        seen = (n[:, None] >= begin[None, :]) & (n[:, None] < end[None, :])
        place = (token - start).to(tl.int64)[None, :] * width + (n[:, None] - begin[None, :])
        tl.store(out + place, total, seen)


def mass_of(
    q: Tensor, latents: Tensor, lse: Tensor, segments: Segments, ratio: int, scale: float, run: Run, out: Tensor
) -> Tensor:
    """Mass of a run into `out [run.tokens, run.width]` float32, which stays as it is where nothing is visible.

    `q [T, h, D]` and `latents [N, D]` bfloat16, `lse [T, h]` float32 in nats, all contiguous.
    """
    heads = q.shape[1]
    tile = tiles(q.device, "mass", heads)
    seen = together(segments, ratio, run, tile["TOKENS"])
    if seen == 0:
        return out
    tile["CHUNK"] = dividing(tile["CHUNK"], q.shape[2])
    view = sight(segments, ratio)
    indexer_mass[triton.cdiv(seen, tile["ENTRIES"]), triton.cdiv(run.tokens, tile["TOKENS"])](
        matrix(q, tile["TOKENS"] * heads, tile["CHUNK"]), matrix(latents, tile["ENTRIES"], tile["CHUNK"]), lse,
        view.low, view.high, out, run.start, run.stop, run.width, scale, HEADS=heads, WIDTH=q.shape[2], **tile,
    )  # fmt: skip
    return out
