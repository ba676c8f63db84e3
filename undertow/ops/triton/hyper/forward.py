"""From streams to what a sub-layer reads: projection, coefficients, the weighted sum and its norm."""

# pyright: basic, reportArgumentType=false, reportOperatorIssue=false, reportAssignmentType=false, reportCallIssue=false
# pyright: reportGeneralTypeIssues=false, reportIndexIssue=false, reportAttributeAccessIssue=false
# The language of kernels has types of its own.
from __future__ import annotations

from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from undertow.ops.triton.hyper.project import cut, padded, project
from undertow.ops.triton.hyper.rows import streams_at
from undertow.ops.triton.hyper.sinkhorn import doubly_stochastic, sigmoid
from undertow.ops.triton.hyper.tiles import stages, tiles

_FEWEST, _MOST = 4, 64
"""Parts of a sum."""


@triton.jit
def _total(sums, at, here, step, SPLIT: tl.constexpr):
    """The parts at `at` added, the loads of up to eight at once under way."""
    EIGHT: tl.constexpr = min(SPLIT, 8)
    total = tl.load(sums + at, here, other=0.0)
    for s in tl.static_range(1, EIGHT):
        total += tl.load(sums + s * step + at, here, other=0.0)
    for first in tl.range(EIGHT, SPLIT, EIGHT):
        for s in tl.static_range(EIGHT):
            total += tl.load(sums + (first + s) * step + at, here, other=0.0)
    return total


@triton.jit
def _coefficients(
    sums, inverse, scale, base, logits, post, mix, first, start, tokens, eps,
    N: tl.constexpr, OUT: tl.constexpr, SPLIT: tl.constexpr, ITERATIONS: tl.constexpr, TOKENS: tl.constexpr,
):  # fmt: skip
    """Logits of TOKENS tokens, which the way back needs, and of these all coefficients but pre; `inverse [TOKENS]` is
    1 / RMS."""
    ROWS: tl.constexpr = (2 + N) * N
    place = first + tl.arange(0, TOKENS)
    here = place < tokens
    t = (start + place).to(tl.int64)
    i = tl.arange(0, N)
    for group in tl.static_range(2):
        at = place[:, None] * OUT + group * N + i[None, :]
        told = _total(sums, at, here[:, None], tokens * OUT, SPLIT) * inverse[:, None]
        tl.store(logits + t[:, None] * ROWS + group * N + i[None, :], told, here[:, None])
        if group == 1:
            z = told * tl.load(scale + 1) + tl.load(base + N + i)[None, :]
            tl.store(post + t[:, None] * N + i[None, :], 2.0 * sigmoid(z), here[:, None])
    square = (i[:, None] * N + i[None, :])[None, :, :]
    seen = here[:, None, None]
    told = _total(sums, place[:, None, None] * OUT + 2 * N + square, seen, tokens * OUT, SPLIT)
    told *= inverse[:, None, None]
    tl.store(logits + t[:, None, None] * ROWS + 2 * N + square, told, seen)
    z = told * tl.load(scale + 2) + tl.load(base + 2 * N + square)
    tl.store(mix + t[:, None, None] * (N * N) + square, doubly_stochastic(z, eps, ITERATIONS), seen)


@triton.jit
def _collapse(
    x, sums, scale, base, weight, out, inverse, logits, root, post, mix, block, stride, stride_stream, start, stop,
    eps_norm, eps,
    D: tl.constexpr, N: tl.constexpr, ROWS: tl.constexpr, OUT: tl.constexpr, SPLIT: tl.constexpr,
    ITERATIONS: tl.constexpr, TOKENS: tl.constexpr, BD: tl.constexpr, STAGES: tl.constexpr,
):  # fmt: skip
    """TOKENS tokens, one after the other: their sum of streams by pre, normalised; then their coefficients together,
    under the reading of other programs. The head has no others than pre, and writes their logits at once."""
    tokens = stop - start
    first = block * TOKENS
    p = tl.arange(0, TOKENS)
    c = tl.arange(0, BD)
    here = c < D
    w = tl.load(weight + c, here, other=0.0)
    slope = tl.load(scale)
    shift = ()
    for j in tl.static_range(N):
        shift += (tl.load(base + j),)
    of_x = tl.zeros((TOKENS,), tl.float32)
    for i in tl.range(0, tl.minimum(tokens - first, TOKENS), num_stages=STAGES):
        t = (start + first + i).to(tl.int64)
        xs = streams_at(x + t * stride, stride_stream, c, here, N)
        s = tl.arange(0, SPLIT) * tokens + first + i
        told = ()
        squares = tl.zeros((BD,), tl.float32)
        for j in tl.static_range(N):
            told += (tl.sum(tl.load(sums + s * OUT + j), 0),)
            wide = xs[j].to(tl.float32)
            squares += wide * wide
        found = tl.rsqrt(tl.sum(squares, 0) / (N * D) + eps_norm)
        tl.store(root + t, found)
        of_x = tl.where(p == i, found, of_x)
        y = tl.zeros((BD,), tl.float32)
        for j in tl.static_range(N):
            if ROWS == N:
                tl.store(logits + t * N + j, told[j] * found)
            y += (sigmoid(told[j] * found * slope + shift[j]) + eps) * xs[j].to(tl.float32)
        of_y = tl.rsqrt(tl.sum(y * y, 0) / D + eps_norm)
        tl.store(inverse + t, of_y)
        tl.store(out + t * D + c, (y * of_y * w.to(tl.float32)).to(out.dtype.element_ty), here)
    if ROWS > N:
        _coefficients(
            sums, of_x, scale, base, logits, post, mix, first, start, tokens, eps, N, OUT, SPLIT, ITERATIONS, TOKENS
        )


@triton.jit(do_not_specialize=["start", "stop", "later", "projects"])
def hyper_read(
    x, parts, sums, scale, base, weight, out, inverse, logits, root, post, mix, stride, stride_stream, start, stop,
    later, projects, eps_norm, eps,
    D: tl.constexpr, N: tl.constexpr, ROWS: tl.constexpr, OUT: tl.constexpr, SPLIT: tl.constexpr, SLAB: tl.constexpr,
    ITERATIONS: tl.constexpr, M: tl.constexpr, BK: tl.constexpr, STAGES: tl.constexpr, TOKENS: tl.constexpr,
    BD: tl.constexpr, AHEAD: tl.constexpr,
):  # fmt: skip
    """The first `projects` programs project tokens `stop` to `later`, and the others read those from `start` to `stop`,
    projected by the launch before, which the cache still has: one waits for memory while the other computes.

    `sums` has place for two slabs, which take turns.
    """
    turn: tl.constexpr = SPLIT * SLAB * OUT
    if tl.program_id(0) < projects:
        project(
            x, parts, sums + stop // SLAB % 2 * turn, tl.program_id(0), stride, stride_stream, stop, later,
            D, N, ROWS, OUT, SPLIT, M, BK, STAGES,
        )  # fmt: skip
    else:
        block = tl.program_id(0) - projects
        if projects == 0:  # the last tokens first, which came last
            block = tl.num_programs(0) - 1 - block
        _collapse(
            x, sums + start // SLAB % 2 * turn, scale, base, weight, out, inverse, logits, root, post, mix, block,
            stride, stride_stream, start, stop, eps_norm, eps, D, N, ROWS, OUT, SPLIT, ITERATIONS, TOKENS, BD, AHEAD,
        )  # fmt: skip


class Read(NamedTuple):
    """What a sub-layer reads, `out [T, d]`, and the coefficients `post [T, n]` and `mix [T, n, n]`; for the way back
    `logits [T, rows of fn]`, `root [T]` and `inverse [T]`. All but `out` float32. Of the head, post and mix are
    empty."""

    out: Tensor
    post: Tensor
    mix: Tensor
    logits: Tensor
    root: Tensor
    inverse: Tensor


def forward(
    streams: Tensor, fn: Tensor, scale: Tensor, base: Tensor, weight: Tensor, eps_norm: float, iterations: int,
    eps: float,
) -> Read:  # fmt: skip
    """Operands of `undertow.ops.reference.hyper.hyper_in`, or of `hyper_head`, whose fn has one row for each stream;
    the streams bfloat16."""
    tokens, count, width = streams.shape
    others = ((0,), (0,)) if len(fn) == count else ((count,), (count, count))
    sizes = (*others, (len(fn),), (), ())
    read = Read(
        torch.empty((tokens, width), dtype=streams.dtype, device=streams.device),
        *(torch.empty((tokens, *size), dtype=torch.float32, device=streams.device) for size in sizes),
    )
    if tokens == 0:
        return read
    tile, columns = tiles(streams.device, "read"), triton.next_power_of_2(width)
    slab, together = tile["SLAB"], tile["TOKENS"]
    warps = min(max(columns // tile.pop("COLUMNS"), 4), 16)
    tile["AHEAD"] = stages(tile["AHEAD"], count * columns)
    blocks = triton.cdiv(min(tokens, slab), tile["M"])
    split = min(max(triton.next_power_of_2(tile.pop("PROGRAMS") // blocks), _FEWEST), _MOST)
    sums = torch.empty((2, split, min(slab, tokens), padded(len(fn))), dtype=torch.float32, device=streams.device)
    parts = cut(fn)
    for stop in range(0, tokens + slab, slab):
        start, stop, later = max(stop - slab, 0), min(stop, tokens), min(stop + slab, tokens)
        projects = split * triton.cdiv(max(later - stop, 0), tile["M"])
        hyper_read[(projects + triton.cdiv(stop - start, together),)](
            streams, parts, sums, scale, base, weight, read.out, read.inverse, read.logits, read.root, read.post,
            read.mix, *streams.stride()[:2], start, stop, later, projects, eps_norm, eps,
            D=width, N=count, ROWS=len(fn), OUT=sums.shape[3], SPLIT=split, ITERATIONS=iterations, BD=columns, **tile,
            num_warps=warps,
        )  # fmt: skip
    return read
