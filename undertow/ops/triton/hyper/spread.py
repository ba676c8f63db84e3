"""The gradient of the streams, and sums over tokens for the parameters that made their coefficients."""

# pyright: basic, reportArgumentType=false, reportOperatorIssue=false, reportAssignmentType=false, reportCallIssue=false
# pyright: reportGeneralTypeIssues=false, reportIndexIssue=false, reportAttributeAccessIssue=false
# The language of kernels has types of its own.
from __future__ import annotations

import triton
import triton.language as tl

from undertow.ops.triton.hyper.sinkhorn import sigmoid


@triton.jit
def _in_two(x):
    """Two bfloat16 numbers that sum to nearly all of `x`."""
    high = x.to(tl.bfloat16)
    return high, (x - high.to(tl.float32)).to(tl.bfloat16)


@triton.jit
def _scales(scale, o, N: tl.constexpr):
    """For each coefficient the scale of its group."""
    return tl.where(o < N, tl.load(scale), tl.where(o < 2 * N, tl.load(scale + 1), tl.load(scale + 2)))


@triton.jit
def _of_base(logits, slopes, add_base, chunk, first, end, ROWS: tl.constexpr, OUT: tl.constexpr, M: tl.constexpr):
    """Sums over the chunk's tokens of the slopes, for base, and of slopes times logits, for scale."""
    o = tl.arange(0, OUT)
    of_base = tl.zeros((M, OUT), tl.float32)
    of_scale = tl.zeros((M, OUT), tl.float32)
    for start in tl.range(first, end, M):
        row = start + tl.arange(0, M)
        at = row.to(tl.int64)[:, None] * ROWS + o[None, :]
        known = (row < end)[:, None] & (o < ROWS)[None, :]
        slope = tl.load(slopes + at, known, other=0.0)
        of_base += slope
        of_scale += slope * tl.load(logits + at, known, other=0.0)
    tl.store(add_base + chunk * (2 * OUT) + o, tl.sum(of_base, 0))
    tl.store(add_base + chunk * (2 * OUT) + OUT + o, tl.sum(of_scale, 0))


@triton.jit(do_not_specialize=["tokens", "each", "chunks"])
def hyper_spread(
    x, grad_y, grad_streams, parts, logits, slopes, root, scale, base, out, add_fn, add_base, stride, stride_stream,
    tokens, each, chunks, eps,
    D: tl.constexpr, N: tl.constexpr, OUT: tl.constexpr, M: tl.constexpr, BD: tl.constexpr,
):  # fmt: skip
    """BD columns of a stream, `each` tokens, M at a time, the last ones first, which the cache still has.

    `add_fn [chunks, ROWS, N D]` and `add_base [chunks, 2, OUT]` are what these tokens add to the gradients.
    """
    ROWS: tl.constexpr = (2 + N) * N
    blocks: tl.constexpr = (D + BD - 1) // BD
    # Programs of one tile of y follow each other.
    j = tl.program_id(0) % N
    column = tl.program_id(0) // N % blocks
    chunk = chunks - 1 - tl.program_id(0) // (N * blocks)
    end = tl.minimum(chunk * each + each, tokens)
    if (column == 0) & (j == 0):
        _of_base(logits, slopes, add_base, chunk, chunk * each, end, ROWS, OUT, M)
    o = tl.arange(0, OUT)
    c = column * BD + tl.arange(0, BD)
    here = c < D
    at = o[:, None] * (N * D) + j * D + c[None, :]
    f_high = tl.load(parts + at, (o < ROWS)[:, None] & here[None, :], other=0.0)
    f_low = tl.load(parts + ROWS * N * D + at, (o < ROWS)[:, None] & here[None, :], other=0.0)
    by_group = _scales(scale, o, N)[None, :]
    of_pre = tl.load(scale)
    shift = tl.load(base + j)
    of_fn = tl.zeros((BD, OUT), tl.float32)
    for first in tl.range(chunk * each, end, M, num_stages=1):
        row = first + tl.arange(0, M)
        inside = row < end
        t = row.to(tl.int64)
        seen = inside[:, None] & here[None, :]
        place = t[:, None] * (N * D) + j * D + c[None, :]
        now = tl.load(x + t[:, None] * stride + j * stride_stream + c[None, :], seen, other=0.0)
        total = tl.load(grad_y + t[:, None] * D + c[None, :], seen, other=0.0).to(tl.float32)
        if grad_streams is not None:
            given = tl.load(grad_streams + place, seen, other=0.0)
        known = inside[:, None] & (o < ROWS)[None, :]
        slope = tl.load(slopes + t[:, None] * ROWS + o[None, :], known, other=0.0) * by_group
        logit = tl.load(logits + t[:, None] * ROWS + o[None, :], known, other=0.0)
        of_root = tl.load(root + t, inside, other=0.0)
        by_x = -of_root * of_root * tl.sum(slope * logit, 1) / (N * D)
        pre = sigmoid(tl.load(logits + t * ROWS + j, inside, other=0.0) * of_pre + shift) + eps
        total = total * pre[:, None] + now.to(tl.float32) * by_x[:, None]
        if grad_streams is not None:
            total += given.to(tl.float32)
        high, low = _in_two(slope * of_root[:, None])
        made = tl.dot(high, f_high, tl.dot(high, f_low, tl.dot(low, f_high)))
        tl.store(out + place, (total + made).to(out.dtype.element_ty), seen)
        turned = now.T
        of_fn = tl.dot(turned, high, tl.dot(turned, low, of_fn))
    at = (chunk * ROWS + o)[None, :].to(tl.int64) * (N * D) + j * D + c[:, None]
    tl.store(add_fn + at, of_fn, here[:, None] & (o < ROWS)[None, :])


@triton.jit
def _sum(adds, out, first, count, chunks, ROWS: tl.constexpr, COLUMNS: tl.constexpr):
    """COLUMNS numbers of all chunks added, ROWS chunks at a time."""
    r = tl.arange(0, ROWS)[:, None]
    i = first + tl.arange(0, COLUMNS)
    total = tl.zeros((ROWS, COLUMNS), tl.float32)
    for chunk in tl.range(0, chunks, ROWS):
        here = (chunk + r < chunks) & (i < count)[None, :]
        total += tl.load(adds + (chunk + r) * count + i[None, :], here, other=0.0)
    tl.store(out + i, tl.sum(total, 0).to(out.dtype.element_ty), i < count)


@triton.jit(do_not_specialize=["chunks", "groups"])
def hyper_finish(
    add_fn, add_weight, add_base, of_fn, of_weight, of_base, of_scale, chunks, groups,
    D: tl.constexpr, N: tl.constexpr, OUT: tl.constexpr, BLOCK: tl.constexpr, COLUMNS: tl.constexpr,
):  # fmt: skip
    """What all chunks of tokens add, and all groups of them to the weight: of base and scale by the first program, of
    BLOCK numbers of fn, or COLUMNS of the weight, by each other."""
    ROWS: tl.constexpr = (2 + N) * N
    whole: tl.constexpr = (ROWS * N * D + BLOCK - 1) // BLOCK
    if tl.program_id(0) == 0:
        o = tl.arange(0, OUT)
        of_slopes = tl.zeros((OUT,), tl.float32)
        of_logits = tl.zeros((OUT,), tl.float32)
        for chunk in tl.range(0, chunks):
            of_slopes += tl.load(add_base + chunk * (2 * OUT) + o)
            of_logits += tl.load(add_base + chunk * (2 * OUT) + OUT + o)
        tl.store(of_base + o, of_slopes, o < ROWS)
        for group in tl.static_range(3):
            mine = (o >= group * N) & ((o < group * N + N) | (group == 2))
            tl.store(of_scale + group, tl.sum(tl.where(mine, of_logits, 0.0), 0))
    elif tl.program_id(0) <= whole:
        _sum(add_fn, of_fn, (tl.program_id(0) - 1) * BLOCK, ROWS * N * D, chunks, 2, BLOCK)
    else:
        _sum(add_weight, of_weight, (tl.program_id(0) - 1 - whole) * COLUMNS, D, groups, 32, COLUMNS)
