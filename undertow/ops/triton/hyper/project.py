"""The projection of all streams of a token by fn, to float32: products of bfloat16, in which the streams are given.

fn is cut into three bfloat16 numbers, which hold all bits of a float32. A program takes M tokens and a part of the
columns; the parts of a sum are added by whoever reads them, in their order.
"""

# pyright: basic, reportArgumentType=false, reportOperatorIssue=false, reportAssignmentType=false, reportCallIssue=false
# pyright: reportGeneralTypeIssues=false, reportIndexIssue=false
# The language of kernels has types of its own.
from __future__ import annotations

from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from undertow.ops.triton.hyper.tiles import tiles

_FEWEST, _MOST = 4, 64
"""Parts of a sum."""
_BLOCK = 1024


@triton.jit
def hyper_cut(fn, parts, count, BLOCK: tl.constexpr):
    """Three bfloat16 numbers for each of fn, which sum to it."""
    i = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    here = i < count
    f = tl.load(fn + i, here, other=0.0)
    for part in tl.static_range(3):
        high = f.to(tl.bfloat16)
        tl.store(parts + part * count + i, high, here)
        f -= high.to(tl.float32)


@triton.jit
def _tile(x, at, inside, step, last, stride_stream, D: tl.constexpr, BK: tl.constexpr, STEPS: tl.constexpr):
    """Columns of one step: BK of one stream."""
    c = step % STEPS * BK + tl.arange(0, BK)
    here = inside[:, None] & (c < tl.where(step < last, D, 0))[None, :]
    return tl.load(x + at[:, None] + (step // STEPS) * stride_stream + c[None, :], here, other=0.0)


@triton.jit
def _fn_tile(parts, part: tl.constexpr, step, D: tl.constexpr, N: tl.constexpr, ROWS: tl.constexpr,
             OUT: tl.constexpr, BK: tl.constexpr, STEPS: tl.constexpr):  # fmt: skip
    """Columns of one step of a part of fn, `[OUT, BK]`."""
    o = tl.arange(0, OUT)
    c = step % STEPS * BK + tl.arange(0, BK)
    at = (part * ROWS + o)[:, None] * (N * D) + (step // STEPS) * D + c[None, :]
    return tl.load(parts + at, (o < ROWS)[:, None] & (c < D)[None, :], other=0.0)


@triton.jit(do_not_specialize=["start", "stop"])
def hyper_project(
    x, parts, sums, squares, stride, stride_stream, start, stop,
    D: tl.constexpr, N: tl.constexpr, ROWS: tl.constexpr, OUT: tl.constexpr, M: tl.constexpr, BK: tl.constexpr,
    SPLIT: tl.constexpr,
):  # fmt: skip
    """M tokens: the s-th of SPLIT parts of their projection `[SPLIT, tokens, OUT]` and of their sum of squares."""
    STEPS: tl.constexpr = (D + BK - 1) // BK
    EACH: tl.constexpr = (N * STEPS + SPLIT - 1) // SPLIT
    s = tl.program_id(0) % SPLIT
    row = start + tl.program_id(0) // SPLIT * M + tl.arange(0, M)
    inside = row < stop
    at = row.to(tl.int64) * stride
    first = s * EACH
    last = tl.minimum(first + EACH, N * STEPS)
    acc = tl.zeros((M, OUT), tl.float32)
    square = tl.zeros((M, BK // 8), tl.float32)
    # What the next step multiplies is on its way while this one does.
    ahead = _tile(x, at, inside, first, last, stride_stream, D, BK, STEPS)
    for step in tl.range(first, last, num_stages=1):
        now = ahead
        ahead = _tile(x, at, inside, step + 1, last, stride_stream, D, BK, STEPS)
        wide = now.to(tl.float32)
        square += tl.sum(tl.reshape(wide * wide, (M, BK // 8, 8)), 2)
        for part in tl.static_range(3):
            acc = tl.dot(now, _fn_tile(parts, part, step, D, N, ROWS, OUT, BK, STEPS).T, acc)
    place = s * (stop - start) + row - start
    tl.store(squares + place, tl.sum(square, 1), inside)
    o = tl.arange(0, OUT)
    tl.store(sums + place[:, None] * OUT + o[None, :], acc, inside[:, None])


class Projected(NamedTuple):
    """Parts of the projection `[SPLIT, tokens, OUT]` and of the sums of squares `[SPLIT, tokens]` of a run of tokens,
    float32."""

    sums: Tensor
    squares: Tensor


def padded(rows: int) -> int:
    """Columns that a product has for so many coefficients."""
    return max(triton.next_power_of_2(rows), 16)


def cut(fn: Tensor) -> Tensor:
    """`fn` float32 as three bfloat16 tensors that sum to it, `[3, *fn.shape]`."""
    parts = torch.empty((3, *fn.shape), dtype=torch.bfloat16, device=fn.device)
    hyper_cut[triton.cdiv(fn.numel(), _BLOCK),](fn, parts, fn.numel(), BLOCK=_BLOCK)
    return parts


def project(streams: Tensor, parts: Tensor, start: int, stop: int) -> Projected:
    """Tokens `start` to `stop` of `streams [T, n, d]` bfloat16 by fn in parts, see `cut`."""
    _, count, width = streams.shape
    tile = tiles(streams.device, "project")
    del tile["SLAB"]
    tokens, rows = stop - start, parts.shape[1]
    blocks = triton.cdiv(tokens, tile["M"])
    split = min(max(triton.next_power_of_2(tile.pop("PROGRAMS") // blocks), _FEWEST), _MOST)
    sums = torch.empty((split, tokens, padded(rows)), dtype=torch.float32, device=streams.device)
    squares = torch.empty((split, tokens), dtype=torch.float32, device=streams.device)
    hyper_project[(blocks * split,)](
        streams, parts, sums, squares, *streams.stride()[:2], start, stop,
        D=width, N=count, ROWS=rows, OUT=sums.shape[2], SPLIT=split, **tile,
    )  # fmt: skip
    return Projected(sums, squares)
