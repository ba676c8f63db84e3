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

from undertow.ops.triton.hyper.project import cut, project
from undertow.ops.triton.hyper.rows import streams_at
from undertow.ops.triton.hyper.sinkhorn import doubly_stochastic, sigmoid
from undertow.ops.triton.hyper.tiles import tiles


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
    x, sums, scale, base, weight, out, inverse, root, place, start, tokens, stride, stride_stream, eps_norm, eps,
    D: tl.constexpr, N: tl.constexpr, OUT: tl.constexpr, SPLIT: tl.constexpr, BD: tl.constexpr,
):  # fmt: skip
    """One token's sum of streams by pre, normalised; returns 1 / RMS of its streams."""
    t = (start + place).to(tl.int64)
    c = tl.arange(0, BD)
    here = c < D
    xs = streams_at(x + t * stride, stride_stream, c, here, N)
    s = tl.arange(0, SPLIT) * tokens + place
    told = ()
    squares = tl.zeros((BD,), tl.float32)
    for j in tl.static_range(N):
        told += (tl.sum(tl.load(sums + s * OUT + j), 0),)
        wide = xs[j].to(tl.float32)
        squares += wide * wide
    slope = tl.load(scale)
    of_x = tl.rsqrt(tl.sum(squares, 0) / (N * D) + eps_norm)
    tl.store(root + t, of_x)
    # Read again, behind a store, rather than held: the cache still has them, and registers are few.
    y = tl.zeros((BD,), tl.float32)
    for j in tl.static_range(N):
        again = tl.load(x + t * stride + j * stride_stream + c, here, other=0.0).to(tl.float32)
        y += (sigmoid(told[j] * of_x * slope + tl.load(base + j)) + eps) * again
    of_y = tl.rsqrt(tl.sum(y * y, 0) / D + eps_norm)
    tl.store(inverse + t, of_y)
    w = tl.load(weight + c, here, other=0.0).to(tl.float32)
    tl.store(out + t * D + c, (y * of_y * w).to(out.dtype.element_ty), here)
    return of_x


@triton.jit(do_not_specialize=["start", "stop"])
def hyper_collapse_in(
    x, sums, scale, base, weight, out, inverse, logits, root, post, mix, stride, stride_stream, start, stop,
    eps_norm, eps,
    D: tl.constexpr, N: tl.constexpr, OUT: tl.constexpr, SPLIT: tl.constexpr, ITERATIONS: tl.constexpr,
    TOKENS: tl.constexpr, BD: tl.constexpr,
):  # fmt: skip
    """TOKENS tokens, one after the other, then their coefficients together, under the reading of other programs; the
    last tokens first, which the cache still has."""
    tokens = stop - start
    first = (tl.cdiv(tokens, TOKENS) - 1 - tl.program_id(0)) * TOKENS
    p = tl.arange(0, TOKENS)
    of_x = tl.zeros((TOKENS,), tl.float32)
    for i in tl.range(0, tl.minimum(tokens - first, TOKENS), num_stages=1):
        found = _collapse(
            x, sums, scale, base, weight, out, inverse, root, first + i, start, tokens, stride, stride_stream,
            eps_norm, eps, D, N, OUT, SPLIT, BD,
        )  # fmt: skip
        of_x = tl.where(p == i, found, of_x)
    _coefficients(
        sums, of_x, scale, base, logits, post, mix, first, start, tokens, eps, N, OUT, SPLIT, ITERATIONS, TOKENS
    )


class Read(NamedTuple):
    """What a sub-layer reads, `out [T, d]`, and the coefficients `post [T, n]` and `mix [T, n, n]`; for the way back
    `logits [T, rows of fn]`, `root [T]` and `inverse [T]`. All but `out` float32."""

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
    """Operands of `undertow.ops.reference.hyper.hyper_in`, the streams bfloat16."""
    tokens, count, width = streams.shape
    sizes = ((count,), (count, count), (len(fn),), (), ())
    read = Read(
        torch.empty((tokens, width), dtype=streams.dtype, device=streams.device),
        *(torch.empty((tokens, *size), dtype=torch.float32, device=streams.device) for size in sizes),
    )
    if tokens == 0:
        return read
    parts = cut(fn)
    tile, slab = tiles(streams.device, "collapse"), tiles(streams.device, "project")["SLAB"]
    columns = triton.next_power_of_2(width)
    for start in range(0, tokens, slab):
        stop = min(start + slab, tokens)
        sums = project(streams, parts, start, stop)
        hyper_collapse_in[(triton.cdiv(stop - start, tile["TOKENS"]),)](
            streams, sums, scale, base, weight, read.out, read.inverse, read.logits, read.root, read.post, read.mix,
            *streams.stride()[:2], start, stop, eps_norm, eps,
            D=width, N=count, OUT=sums.shape[2], SPLIT=len(sums), ITERATIONS=iterations, TOKENS=tile["TOKENS"],
            BD=columns, num_warps=min(max(columns // tile["COLUMNS"], 4), 16),
        )  # fmt: skip
    return read
