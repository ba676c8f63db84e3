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
def _root(squares, place, here, tokens, mean_of, eps, SPLIT: tl.constexpr):
    """1 / RMS of all streams of the tokens at `place`."""
    total = tl.load(squares + place, here, other=0.0)
    for s in tl.static_range(1, SPLIT):
        total += tl.load(squares + s * tokens + place, here, other=0.0)
    return tl.rsqrt(total / mean_of + eps)


@triton.jit
def _total(sums, at, here, step, SPLIT: tl.constexpr):
    """The parts at `at` added."""
    total = tl.load(sums + at, here, other=0.0)
    for s in tl.static_range(1, SPLIT):
        total += tl.load(sums + s * step + at, here, other=0.0)
    return total


@triton.jit
def _coefficients(
    sums, squares, scale, base, logits, root, post, mix, block, start, stop, eps_norm, eps,
    D: tl.constexpr, N: tl.constexpr, OUT: tl.constexpr, SPLIT: tl.constexpr, ITERATIONS: tl.constexpr,
    TOKENS: tl.constexpr,
):  # fmt: skip
    """All coefficients of TOKENS tokens but pre, and what the way back needs of them."""
    ROWS: tl.constexpr = (2 + N) * N
    tokens = stop - start
    place = block * TOKENS + tl.arange(0, TOKENS)
    here = place < tokens
    t = (start + place).to(tl.int64)
    inverse = _root(squares, place, here, tokens, N * D, eps_norm, SPLIT)
    tl.store(root + t, inverse, here)
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
    x, sums, squares, scale, base, weight, out, inverse, place, start, tokens, stride, stride_stream, eps_norm, eps,
    D: tl.constexpr, N: tl.constexpr, OUT: tl.constexpr, SPLIT: tl.constexpr, BD: tl.constexpr,
):  # fmt: skip
    """One token's sum of streams by pre, normalised."""
    t = (start + place).to(tl.int64)
    c = tl.arange(0, BD)
    here = c < D
    xs = streams_at(x + t * stride, stride_stream, c, here, N)
    s = tl.arange(0, SPLIT) * tokens + place
    root = tl.rsqrt(tl.sum(tl.load(squares + s), 0) / (N * D) + eps_norm)
    slope = tl.load(scale)
    y = tl.zeros((BD,), tl.float32)
    for j in tl.static_range(N):
        logit = tl.sum(tl.load(sums + s * OUT + j), 0) * root
        y += (sigmoid(logit * slope + tl.load(base + j)) + eps) * xs[j].to(tl.float32)
    of_y = tl.rsqrt(tl.sum(y * y, 0) / D + eps_norm)
    tl.store(inverse + t, of_y)
    w = tl.load(weight + c, here, other=0.0).to(tl.float32)
    tl.store(out + t * D + c, (y * of_y * w).to(out.dtype.element_ty), here)


@triton.jit(do_not_specialize=["start", "stop"])
def hyper_collapse_in(
    x, sums, squares, scale, base, weight, out, inverse, logits, root, post, mix, stride, stride_stream, start, stop,
    eps_norm, eps,
    D: tl.constexpr, N: tl.constexpr, OUT: tl.constexpr, SPLIT: tl.constexpr, ITERATIONS: tl.constexpr,
    TOKENS: tl.constexpr, BD: tl.constexpr,
):  # fmt: skip
    """The first programs make the coefficients of TOKENS tokens each, under the reading of the others: a token each,
    the last one first, which the cache still has."""
    tokens = stop - start
    blocks = tl.cdiv(tokens, TOKENS)
    if tl.program_id(0) < blocks:
        _coefficients(
            sums, squares, scale, base, logits, root, post, mix, tl.program_id(0), start, stop, eps_norm, eps,
            D, N, OUT, SPLIT, ITERATIONS, TOKENS,
        )  # fmt: skip
    else:
        _collapse(
            x, sums, squares, scale, base, weight, out, inverse, tokens - 1 - (tl.program_id(0) - blocks), start,
            tokens, stride, stride_stream, eps_norm, eps, D, N, OUT, SPLIT, BD,
        )  # fmt: skip


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
        found = project(streams, parts, start, stop)
        hyper_collapse_in[(triton.cdiv(stop - start, tile["TOKENS"]) + stop - start,)](
            streams, found.sums, found.squares, scale, base, weight, read.out, read.inverse, read.logits, read.root,
            read.post, read.mix, *streams.stride()[:2], start, stop, eps_norm, eps,
            D=width, N=count, OUT=found.sums.shape[2], SPLIT=len(found.sums), ITERATIONS=iterations,
            TOKENS=tile["TOKENS"], BD=columns, num_warps=min(max(columns // tile["COLUMNS"], 4), 16),
        )  # fmt: skip
    return read
