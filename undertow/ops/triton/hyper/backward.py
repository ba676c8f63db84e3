"""The way back from a sub-layer's input to the streams and to the parameters of their coefficients.

Two passes over the streams: slopes of all coefficients of a token and the gradient of the sum of its streams, which
need its whole row, then the streams' gradient and sums over tokens on the way.
"""

# pyright: basic, reportArgumentType=false, reportOperatorIssue=false, reportAssignmentType=false, reportCallIssue=false
# pyright: reportGeneralTypeIssues=false, reportIndexIssue=false, reportAttributeAccessIssue=false
# The language of kernels has types of its own.
from __future__ import annotations

from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from undertow.ops.triton.hyper.project import cut, padded
from undertow.ops.triton.hyper.rows import streams_at
from undertow.ops.triton.hyper.sinkhorn import back, sigmoid
from undertow.ops.triton.hyper.spread import hyper_finish, hyper_spread
from undertow.ops.triton.hyper.tiles import tiles


@triton.jit
def _of_coefficients(
    logits, scale, base, grad_post, grad_mix, slopes, block, tokens, eps,
    N: tl.constexpr, ITERATIONS: tl.constexpr, TOKENS: tl.constexpr,
):  # fmt: skip
    """Slopes of post and mix of TOKENS tokens."""
    ROWS: tl.constexpr = (2 + N) * N
    t = block * TOKENS + tl.arange(0, TOKENS)
    here = t < tokens
    t = t.to(tl.int64)
    i = tl.arange(0, N)
    at = t[:, None] * ROWS + N + i[None, :]
    z = tl.load(logits + at, here[:, None], other=0.0) * tl.load(scale + 1) + tl.load(base + N + i)[None, :]
    out = sigmoid(z)
    grad = tl.load(grad_post + t[:, None] * N + i[None, :], here[:, None], other=0.0)
    tl.store(slopes + at, 2.0 * grad * out * (1.0 - out), here[:, None])
    square = (i[:, None] * N + i[None, :])[None, :, :]
    seen = here[:, None, None]
    at = t[:, None, None] * ROWS + 2 * N + square
    z = tl.load(logits + at, seen, other=0.0) * tl.load(scale + 2) + tl.load(base + 2 * N + square)
    grad = tl.load(grad_mix + t[:, None, None] * (N * N) + square, seen, other=0.0)
    tl.store(slopes + at, back(z, grad, eps, ITERATIONS), seen)


@triton.jit
def _of_rows(
    x, grad, logits, inverse, scale, base, weight, slopes, grad_y, add_weight, group, groups, tokens, stride,
    stride_stream, eps,
    D: tl.constexpr, N: tl.constexpr, BD: tl.constexpr,
):  # fmt: skip
    """A group of tokens, one after the other: slopes of pre, the gradient of y, and what is added to the weight's.

    With g the gradient of out times the norm's weight, that of y is inverse g - along y, where along = inverse^3
    mean(g y); pre has that of y times the streams, in sums over the row.
    """
    ROWS: tl.constexpr = (2 + N) * N
    each = tl.cdiv(tokens, groups)
    c = tl.arange(0, BD)
    here = c < D
    w = tl.load(weight + c, here, other=0.0)
    of_weight = tl.zeros((BD,), tl.float32)
    first = group.to(tl.int64) * each
    for i in tl.range(0, tl.minimum(each, tokens - first), num_stages=1):
        t = first + i
        xs = streams_at(x + t * stride, stride_stream, c, here, N)
        g = tl.load(grad + t * D + c, here, other=0.0).to(tl.float32)
        of_y = tl.load(inverse + t)
        pre = ()
        y = tl.zeros((BD,), tl.float32)
        for j in tl.static_range(N):
            z = tl.load(logits + t * ROWS + j) * tl.load(scale) + tl.load(base + j)
            pre += (sigmoid(z),)
            y += (pre[j] + eps) * xs[j].to(tl.float32)
        of_weight += g * y * of_y
        g *= w.to(tl.float32)
        along = of_y * of_y * of_y * tl.sum(g * y, 0) / D
        by_y = of_y * g - along * y
        tl.store(grad_y + t * D + c, by_y.to(grad_y.dtype.element_ty), here)
        # Read again, behind a store, rather than held: the cache still has them, and registers are few.
        for j in tl.static_range(N):
            again = tl.load(x + t * stride + j * stride_stream + c, here, other=0.0).to(tl.float32)
            tl.store(slopes + t * ROWS + j, tl.sum(by_y * again, 0) * pre[j] * (1.0 - pre[j]))
    tl.store(add_weight + group.to(tl.int64) * D + c, of_weight, here)


@triton.jit(do_not_specialize=["tokens", "groups"])
def hyper_slopes(
    x, grad, logits, inverse, scale, base, weight, grad_post, grad_mix, slopes, grad_y, add_weight, stride,
    stride_stream, tokens, groups, eps,
    D: tl.constexpr, N: tl.constexpr, ITERATIONS: tl.constexpr, TOKENS: tl.constexpr, BD: tl.constexpr,
):  # fmt: skip
    """The first programs go back along Sinkhorn's iteration for TOKENS tokens each, under the reading of the others,
    which take a group of tokens each."""
    blocks = tl.cdiv(tokens, TOKENS)
    if tl.program_id(0) < blocks:
        _of_coefficients(
            logits, scale, base, grad_post, grad_mix, slopes, tl.program_id(0), tokens, eps, N, ITERATIONS, TOKENS
        )
    else:
        _of_rows(
            x, grad, logits, inverse, scale, base, weight, slopes, grad_y, add_weight, tl.program_id(0) - blocks,
            groups, tokens, stride, stride_stream, eps, D, N, BD,
        )  # fmt: skip


class Gradients(NamedTuple):
    """Of streams `[T, n, d]`, fn, scale, base and the norm's weight, each in the operand's type."""

    streams: Tensor
    fn: Tensor
    scale: Tensor
    base: Tensor
    weight: Tensor


def backward(
    streams: Tensor, fn: Tensor, scale: Tensor, base: Tensor, weight: Tensor,
    logits: Tensor, root: Tensor, inverse: Tensor,
    grad: Tensor, grad_post: Tensor, grad_mix: Tensor, grad_streams: Tensor | None, iterations: int, eps: float,
) -> Gradients:  # fmt: skip
    """Gradients from those of the results of `hyper_in`, all contiguous; `grad_streams`, if there is one, is added."""
    tokens, count, width = streams.shape
    operands = (streams, fn, scale, base, weight)
    if tokens == 0:
        return Gradients(*(torch.zeros(x.shape, dtype=x.dtype, device=x.device) for x in operands))
    found = Gradients(*(torch.empty(x.shape, dtype=x.dtype, device=x.device) for x in operands))
    slopes, grad_y = torch.empty_like(logits), torch.empty_like(grad)
    strides, sizes = streams.stride()[:2], {"D": width, "N": count}
    tile, columns = tiles(streams.device, "slopes"), triton.next_power_of_2(width)
    groups, warps = min(tokens, tile["PROGRAMS"]), min(max(columns // tile["COLUMNS"], 4), 16)
    # A thread has one number of the matrices: going back along the iteration, it holds one for each step.
    together = warps * 32 // count**2
    # What each group of tokens adds to the weight, and each chunk to fn, and to base and scale.
    add_weight = _added(streams, groups, width)
    hyper_slopes[(triton.cdiv(tokens, together) + groups,)](
        streams, grad, logits, inverse, scale, base, weight, grad_post, grad_mix, slopes, grad_y, add_weight, *strides,
        tokens, groups, eps, ITERATIONS=iterations, TOKENS=together, BD=columns, **sizes, num_warps=warps,
    )  # fmt: skip
    tile, out = tiles(streams.device, "spread"), padded(len(fn))
    across = count * triton.cdiv(width, tile["BD"])
    most = max(tile.pop("PROGRAMS") // across, 1)
    each = triton.cdiv(triton.cdiv(tokens, tile["M"]), most) * tile["M"]
    chunks = triton.cdiv(tokens, each)
    add_fn, add_base = _added(streams, chunks, *fn.shape), _added(streams, chunks, 2, out)
    hyper_spread[(across * chunks,)](
        streams, grad_y, grad_streams, cut(fn), logits, slopes, root, scale, base, found.streams, add_fn, add_base,
        *strides, tokens, each, chunks, eps, OUT=out, **sizes, **tile,
    )  # fmt: skip
    tile = tiles(streams.device, "finish")
    programs = 1 + triton.cdiv(fn.numel(), tile["BLOCK"]) + triton.cdiv(width, tile["COLUMNS"])
    hyper_finish[(programs,)](
        add_fn, add_weight, add_base, found.fn, found.weight, found.base, found.scale, chunks, groups,
        OUT=out, **sizes, **tile,
    )  # fmt: skip
    return found


def _added(like: Tensor, *shape: int) -> Tensor:
    return torch.empty(shape, dtype=torch.float32, device=like.device)
