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

from undertow.ops.triton.hyper.project import padded
from undertow.ops.triton.hyper.rows import streams_at, widened
from undertow.ops.triton.hyper.sinkhorn import back, sigmoid
from undertow.ops.triton.hyper.spread import hyper_finish, hyper_spread
from undertow.ops.triton.hyper.tiles import stages, tiles


@triton.jit
def _in_two(x):
    """Two bfloat16 numbers that sum to nearly all of `x`."""
    high = x.to(tl.bfloat16)
    return high, (x - high.to(tl.float32)).to(tl.bfloat16)


@triton.jit
def _of_coefficients(
    logits, root, scale, base, grad_post, grad_mix, slopes, by_x, add, block, tokens, eps,
    D: tl.constexpr, N: tl.constexpr, OUT: tl.constexpr, ITERATIONS: tl.constexpr, TOKENS: tl.constexpr,
):  # fmt: skip
    """Slopes of post and mix of TOKENS tokens, and what they add to the gradients of base and scale."""
    ROWS: tl.constexpr = (2 + N) * N
    t = block * TOKENS + tl.arange(0, TOKENS)
    here = t < tokens
    t = t.to(tl.int64)
    i = tl.arange(0, N)
    of_root = tl.load(root + t, here, other=0.0)
    add += block * (ROWS - N + 2)

    logit = tl.load(logits + t[:, None] * ROWS + N + i[None, :], here[:, None], other=0.0)
    of_post = tl.load(scale + 1)
    out = sigmoid(logit * of_post + tl.load(base + N + i)[None, :])
    slope = 2.0 * tl.load(grad_post + t[:, None] * N + i[None, :], here[:, None], other=0.0) * out * (1.0 - out)
    at = slopes + t[:, None] * (2 * OUT) + N + i[None, :]
    high, low = _in_two(slope * of_post * of_root[:, None])
    tl.store(at, high, here[:, None])
    tl.store(at + OUT, low, here[:, None])
    tl.store(add + i, tl.sum(slope, 0))
    along = tl.sum(slope * logit, 1)
    tl.store(add + ROWS - N, tl.sum(along, 0))
    total = along * of_post

    # A matrix is a row of numbers but for the iteration, so that its numbers are those of neighbouring threads.
    q = tl.arange(0, N * N)
    logit = tl.load(logits + t[:, None] * ROWS + 2 * N + q[None, :], here[:, None], other=0.0)
    of_mix = tl.load(scale + 2)
    grad = tl.load(grad_mix + t[:, None] * (N * N) + q[None, :], here[:, None], other=0.0)
    z = logit * of_mix + tl.load(base + 2 * N + q)[None, :]
    slope = back(tl.reshape(z, (TOKENS, N, N)), tl.reshape(grad, (TOKENS, N, N)), eps, ITERATIONS)
    slope = tl.reshape(slope, (TOKENS, N * N))
    at = slopes + t[:, None] * (2 * OUT) + 2 * N + q[None, :]
    high, low = _in_two(slope * of_mix * of_root[:, None])
    tl.store(at, high, here[:, None])
    tl.store(at + OUT, low, here[:, None])
    tl.store(add + N + q, tl.sum(slope, 0))
    along = tl.sum(slope * logit, 1)
    tl.store(add + ROWS - N + 1, tl.sum(along, 0))
    total += along * of_mix
    tl.store(by_x + tokens + t, -of_root * of_root / (N * D) * total, here)

    rest = tl.arange(0, OUT - ROWS)
    at = slopes + t[:, None] * (2 * OUT) + ROWS + rest[None, :]
    none = tl.zeros((TOKENS, OUT - ROWS), tl.bfloat16)
    tl.store(at, none, here[:, None])
    tl.store(at + OUT, none, here[:, None])


@triton.jit
def _add_four(a, b, c, d, e, f, g, h):
    return a + e, b + f, c + g, d + h


@triton.jit
def _add_eight(a, b, c, d, e, f, g, h, i, j, k, l, m, n, o, p):  # noqa: E741
    return a + i, b + j, c + k, d + l, e + m, f + n, g + o, h + p


@triton.jit
def _along(xs, g, y, N: tl.constexpr):
    """Sums over the row of each of the streams times `g`, then of each times `y`, in one exchange between threads."""
    if N == 2:
        return tl.reduce((xs[0] * g, xs[1] * g, xs[0] * y, xs[1] * y), 0, _add_four)
    else:
        products = (xs[0] * g, xs[1] * g, xs[2] * g, xs[3] * g)
        products += (xs[0] * y, xs[1] * y, xs[2] * y, xs[3] * y)
        return tl.reduce(products, 0, _add_eight)


@triton.jit
def _of_rows(
    x, grad, logits, root, inverse, scale, base, weight, slopes, by_x, pres, grad_y, add, add_weight, group, groups,
    tokens, stride, stride_stream, eps,
    D: tl.constexpr, N: tl.constexpr, ROWS: tl.constexpr, OUT: tl.constexpr, BD: tl.constexpr, STAGES: tl.constexpr,
):  # fmt: skip
    """A group of tokens, one after the other: slopes of pre, the gradient of y, and what is added to the gradients of
    base, scale and the weight.

    With g the gradient of out times the norm's weight, that of y is inverse g - along y, where along = inverse^3
    mean(g y); pre has that of y times the streams, in sums over the row, which are made of those of the streams with g
    and with y.
    """
    each = tl.cdiv(tokens, groups)
    c = tl.arange(0, BD)
    here = c < D
    n = tl.arange(0, N)
    one = tl.arange(0, 1)
    of_pre = tl.load(scale)
    shift = tl.load(base + n)
    w = tl.load(weight + c, here, other=0.0)
    first = group.to(tl.int64) * each
    of_weight = tl.zeros((BD,), tl.float32)
    of_base = tl.zeros((N,), tl.float32)
    of_scale = 0.0
    for i in tl.range(0, tl.minimum(each, tokens - first), num_stages=STAGES):
        t = first + i
        xs = streams_at(x + t * stride, stride_stream, c, here, N)
        g = tl.load(grad + t * D + c, here, other=0.0).to(tl.float32)
        # As rows, even if of one number: loads of rows are under way ahead of their step.
        of_y = tl.sum(tl.load(inverse + t + one), 0)
        of_root = tl.sum(tl.load(root + t + one), 0)
        logit = tl.load(logits + t * ROWS + n)
        out = sigmoid(logit * of_pre + shift)
        pre = ()
        y = tl.zeros((BD,), tl.float32)
        xs = widened(xs, N)
        for j in tl.static_range(N):
            pre += (tl.sum(tl.where(n == j, out, 0.0), 0) + eps,)
            y += pre[j] * xs[j]
        of_weight += g * y * of_y
        g *= w.to(tl.float32)
        found = _along(xs, g, y, N)
        along = 0.0
        for j in tl.static_range(N):
            along += pre[j] * found[j]
        along *= of_y * of_y * of_y / D
        tl.store(grad_y + t * D + c, (of_y * g - along * y).to(grad_y.dtype.element_ty), here)
        slope = tl.zeros((N,), tl.float32)
        for j in tl.static_range(N):
            slope = tl.where(n == j, of_y * found[j] - along * found[N + j], slope)
        slope *= out * (1.0 - out)
        high, low = _in_two(slope * of_pre * of_root)
        tl.store(slopes + t * (2 * OUT) + n, high)
        tl.store(slopes + t * (2 * OUT) + OUT + n, low)
        tl.store(pres + t * N + n, out + eps)
        total = tl.sum(slope * logit, 0)
        tl.store(by_x + t, -of_root * of_root / (N * D) * total * of_pre)
        of_base += slope
        of_scale += total
    tl.store(add + group * (N + 1) + n, of_base)
    tl.store(add + group * (N + 1) + N, of_scale)
    tl.store(add_weight + group.to(tl.int64) * D + c, of_weight, here)


@triton.jit(do_not_specialize=["tokens", "groups"])
def hyper_slopes(
    x, grad, logits, root, inverse, scale, base, weight, grad_post, grad_mix, slopes, by_x, pres, grad_y, add_pre,
    add_rest, add_weight, stride, stride_stream, tokens, groups, eps,
    D: tl.constexpr, N: tl.constexpr, ROWS: tl.constexpr, OUT: tl.constexpr, ITERATIONS: tl.constexpr,
    TOKENS: tl.constexpr, BD: tl.constexpr, AHEAD: tl.constexpr,
):  # fmt: skip
    """The first programs go back along Sinkhorn's iteration for TOKENS tokens each, under the reading of the others,
    which take a group of tokens each. The head has these others alone.

    For the next pass: slopes times scale and root, in two `[T, 2, OUT]`, 0 behind the last; pre; and two numbers a
    token that sum to what the gradient of its streams has of them through their RMS. For the last: `add_pre [groups, N
    + 1]` and `add_rest [blocks, ROWS - N + 2]`, gradients of base, then of scale.
    """
    blocks = tl.cdiv(tokens, TOKENS) if ROWS > N else 0
    if tl.program_id(0) < blocks:
        if ROWS > N:
            _of_coefficients(
                logits, root, scale, base, grad_post, grad_mix, slopes, by_x, add_rest, tl.program_id(0), tokens, eps,
                D, N, OUT, ITERATIONS, TOKENS,
            )  # fmt: skip
    else:
        _of_rows(
            x, grad, logits, root, inverse, scale, base, weight, slopes, by_x, pres, grad_y, add_pre, add_weight,
            tl.program_id(0) - blocks, groups, tokens, stride, stride_stream, eps, D, N, ROWS, OUT, BD, AHEAD,
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
    grad: Tensor, grad_post: Tensor | None, grad_mix: Tensor | None, grad_streams: Tensor | None, iterations: int,
    eps: float,
) -> Gradients:  # fmt: skip
    """Gradients from those of the results of `hyper_in`, all contiguous; `grad_streams`, if there is one, is added.
    `hyper_head`, whose fn has one row for each stream, has no gradients of post and mix."""
    tokens, count, width = streams.shape
    operands = (streams, fn, scale, base, weight)
    if tokens == 0:
        return Gradients(*(torch.zeros(x.shape, dtype=x.dtype, device=x.device) for x in operands))
    found = Gradients(*(torch.empty(x.shape, dtype=x.dtype, device=x.device) for x in operands))
    strides, sizes = streams.stride()[:2], {"D": width, "N": count, "ROWS": len(fn), "OUT": padded(len(fn))}
    tile, columns = tiles(streams.device, "slopes"), triton.next_power_of_2(width)
    groups, warps = min(tokens, tile.pop("PROGRAMS")), min(max(columns // tile.pop("COLUMNS"), 4), 16)
    tile["AHEAD"] = stages(tile["AHEAD"], (count + 1) * columns)
    # A thread has one number of the matrices: going back along the iteration, it holds one for each step.
    together = warps * 32 // count**2
    blocks = triton.cdiv(tokens, together) if len(fn) > count else 0
    grad_y = torch.empty_like(grad)
    slopes = torch.empty((tokens, 2, sizes["OUT"]), dtype=torch.bfloat16, device=streams.device)
    by_x, pres = _floats(streams, 2, tokens), _floats(streams, tokens, count)
    # What each group of tokens, or block of them, adds.
    adds = (_floats(streams, groups, count + 1), _floats(streams, blocks, len(fn) - count + 2))
    add_weight = _floats(streams, groups, width)
    hyper_slopes[(blocks + groups,)](
        streams, grad, logits, root, inverse, scale, base, weight, grad_post, grad_mix, slopes, by_x, pres, grad_y,
        *adds, add_weight, *strides, tokens, groups, eps,
        ITERATIONS=iterations, TOKENS=together, BD=columns, **sizes, **tile, num_warps=warps,
    )  # fmt: skip
    tile = tiles(streams.device, "spread")
    tile["TOGETHER"] = min(tile["TOGETHER"], count)
    across = count // tile["TOGETHER"] * triton.cdiv(width, tile["BD"])
    most = max(tile.pop("PROGRAMS") // across, 1)
    each = triton.cdiv(triton.cdiv(tokens, tile["M"]), most) * tile["M"]
    chunks = triton.cdiv(tokens, each)
    add_fn = _floats(streams, chunks, *fn.shape)
    hyper_spread[(across * chunks,)](
        streams, grad_y, grad_streams, fn, slopes, by_x, pres, found.streams, add_fn, *strides, tokens, each, chunks,
        **sizes, **tile,
    )  # fmt: skip
    tile = tiles(streams.device, "finish")
    programs = 2 + triton.cdiv(fn.numel(), tile["BLOCK"]) + triton.cdiv(width, tile["COLUMNS"])
    hyper_finish[(programs,)](
        add_fn, add_weight, *adds, found.fn, found.weight, found.base, found.scale, chunks, groups, blocks,
        **sizes, **tile,
    )  # fmt: skip
    return found


def _floats(like: Tensor, *shape: int) -> Tensor:
    return torch.empty(shape, dtype=torch.float32, device=like.device)
