"""The gradient of the streams, and sums over tokens for the parameters that made their coefficients."""

# pyright: basic, reportArgumentType=false, reportOperatorIssue=false, reportAssignmentType=false, reportCallIssue=false
# pyright: reportGeneralTypeIssues=false, reportIndexIssue=false, reportAttributeAccessIssue=false
# The language of kernels has types of its own.
from __future__ import annotations

import triton
import triton.language as tl


@triton.jit
def _fn_tiles(
    fn, j, c, here, D: tl.constexpr, N: tl.constexpr, ROWS: tl.constexpr, OUT: tl.constexpr, TOGETHER: tl.constexpr
):
    """Columns `c` of fn, of TOGETHER streams from `j` on, `[2 OUT, columns]` each: twice the same rows."""
    o = tl.arange(0, 2 * OUT) % OUT
    seen = (o < ROWS)[:, None] & here[None, :]
    found = ()
    for k in tl.static_range(TOGETHER):
        f = tl.load(fn + o[:, None] * (N * D) + (j + k) * D + c[None, :], seen, other=0.0)
        found += (f.to(tl.bfloat16),)
    return found


@triton.jit(do_not_specialize=["tokens", "each", "chunks"])
def hyper_spread(
    x, grad_y, grad_streams, fn, slopes, by_x, pres, out, add_fn, stride, stride_stream, tokens, each, chunks,
    D: tl.constexpr, N: tl.constexpr, ROWS: tl.constexpr, OUT: tl.constexpr, TOGETHER: tl.constexpr, M: tl.constexpr,
    BD: tl.constexpr, STAGES: tl.constexpr,
):  # fmt: skip
    """BD columns of TOGETHER streams, `each` tokens, M at a time, the last ones first, which the cache still has.

    `add_fn [chunks, ROWS, N D]` is what these tokens add to the gradient of fn, to float32: slopes are in two parts.
    The gradient of the streams is rounded in the end, so fn is rounded for it.
    """
    blocks: tl.constexpr = (D + BD - 1) // BD
    # Programs of one tile of y follow each other.
    j = tl.program_id(0) % (N // TOGETHER) * TOGETHER
    c = tl.program_id(0) // (N // TOGETHER) % blocks * BD + tl.arange(0, BD)
    chunk = chunks - 1 - tl.program_id(0) // (N // TOGETHER * blocks)
    start = chunk * each
    end = tl.minimum(start + each, tokens)
    here = c < D
    o = tl.arange(0, 2 * OUT)
    fs = _fn_tiles(fn, j, c, here, D, N, ROWS, OUT, TOGETHER)
    of_fn = ()
    for _ in tl.static_range(TOGETHER):
        of_fn += (tl.zeros((BD, 2 * OUT), tl.float32),)
    count = tl.cdiv(end - start, M)
    for i in tl.range(0, count, num_stages=STAGES):
        row = start + (count - 1 - i) * M + tl.arange(0, M)
        inside = row < end
        t = row.to(tl.int64)
        seen = inside[:, None] & here[None, :]
        # The head's slopes have nothing behind those of pre.
        known = inside[:, None] & (o % OUT < N)[None, :] if ROWS == N else inside[:, None]
        slope = tl.load(slopes + t[:, None] * (2 * OUT) + o[None, :], known, other=0.0)
        of_y = tl.load(grad_y + t[:, None] * D + c[None, :], seen, other=0.0)
        through = tl.load(by_x + t, inside, other=0.0)
        if ROWS > N:
            through += tl.load(by_x + tokens + t, inside, other=0.0)
        sums = ()
        for k in tl.static_range(TOGETHER):
            pre = tl.load(pres + t * N + j + k, inside, other=0.0)
            now = tl.load(x + t[:, None] * stride + (j + k) * stride_stream + c[None, :], seen, other=0.0)
            total = of_y.to(tl.float32) * pre[:, None] + now.to(tl.float32) * through[:, None]
            at = t[:, None] * (N * D) + (j + k) * D + c[None, :]
            if grad_streams is not None:
                total += tl.load(grad_streams + at, seen, other=0.0).to(tl.float32)
            total += tl.dot(slope, fs[k])
            # The same numbers, but not what was loaded: what a product and registers share is not pipelined rightly.
            sums += (tl.dot(tl.where(seen, now, 0.0).T, slope, of_fn[k]),)
            tl.store(out + at, total.to(out.dtype.element_ty), seen)
        of_fn = sums
    o = tl.arange(0, OUT)
    for k in tl.static_range(TOGETHER):
        total = tl.sum(tl.reshape(of_fn[k], (BD, 2, OUT)), 1)
        at = (chunk * ROWS + o)[None, :].to(tl.int64) * (N * D) + (j + k) * D + c[:, None]
        tl.store(add_fn + at, total, here[:, None] & (o < ROWS)[None, :])


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


@triton.jit
def _columns(adds, chunks, count: tl.constexpr, OUT: tl.constexpr, ROWS: tl.constexpr):
    """Sums of the `count` columns of `adds [chunks, count]`, as `[OUT]`."""
    r = tl.arange(0, ROWS)[:, None]
    o = tl.arange(0, OUT)[None, :]
    total = tl.zeros((ROWS, OUT), tl.float32)
    for chunk in tl.range(0, chunks, ROWS):
        total += tl.load(adds + (chunk + r) * count + o, (chunk + r < chunks) & (o < count), other=0.0)
    return tl.sum(total, 0)


@triton.jit(do_not_specialize=["chunks", "groups", "blocks"])
def hyper_finish(
    add_fn, add_weight, add_pre, add_rest, of_fn, of_weight, of_base, of_scale, chunks, groups, blocks,
    D: tl.constexpr, N: tl.constexpr, ROWS: tl.constexpr, OUT: tl.constexpr, BLOCK: tl.constexpr,
    COLUMNS: tl.constexpr,
):  # fmt: skip
    """Sums over all chunks of tokens, groups or blocks of them: base and scale by the first two programs, BLOCK numbers
    of fn, or COLUMNS of the weight, by each other."""
    REST: tl.constexpr = ROWS - N
    whole: tl.constexpr = (ROWS * N * D + BLOCK - 1) // BLOCK
    o = tl.arange(0, OUT)
    if tl.program_id(0) == 0:
        total = _columns(add_pre, groups, N + 1, OUT, 128)
        tl.store(of_base + o, total, o < N)
        tl.store(of_scale + o - N, total, o == N)
    elif tl.program_id(0) == 1:
        if ROWS > N:
            total = _columns(add_rest, blocks, REST + 2, OUT, 128)
            tl.store(of_base + N + o, total, o < REST)
            tl.store(of_scale + 1 + o - REST, total, (o >= REST) & (o < REST + 2))
    elif tl.program_id(0) < 2 + whole:
        _sum(add_fn, of_fn, (tl.program_id(0) - 2) * BLOCK, ROWS * N * D, chunks, 2, BLOCK)
    else:
        _sum(add_weight, of_weight, (tl.program_id(0) - 2 - whole) * COLUMNS, D, groups, 128, COLUMNS)
