"""The projection of all streams of a token by fn, to float32: products of bfloat16, in which the streams are given.

fn is cut into three bfloat16 numbers, which hold all bits of a float32. A program takes M tokens and a part of the
columns; the parts of a sum are added by whoever reads them, in their order.
"""

# pyright: basic, reportArgumentType=false, reportOperatorIssue=false, reportAssignmentType=false, reportCallIssue=false
# pyright: reportGeneralTypeIssues=false, reportIndexIssue=false
# The language of kernels has types of its own.
from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

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
def _fn_tile(parts, part: tl.constexpr, j, c, D: tl.constexpr, N: tl.constexpr, ROWS: tl.constexpr, OUT: tl.constexpr):
    """Columns `c` of stream `j` of a part of fn, `[OUT, columns]`."""
    o = tl.arange(0, OUT)
    at = (part * ROWS + o)[:, None] * (N * D) + j * D + c[None, :]
    return tl.load(parts + at, (o < ROWS)[:, None] & (c < D)[None, :], other=0.0)


@triton.jit
def project(
    x, parts, sums, program, stride, stride_stream, start, stop,
    D: tl.constexpr, N: tl.constexpr, ROWS: tl.constexpr, OUT: tl.constexpr, SPLIT: tl.constexpr, M: tl.constexpr,
    BK: tl.constexpr, STAGES: tl.constexpr,
):  # fmt: skip
    """M tokens from `start` to `stop`: the s-th of SPLIT parts of their projection, to `sums [SPLIT, tokens, OUT]`.

    A part takes every SPLIT-th piece of BK columns, so that programs that run together read neighbours of a row. The
    products alone use the streams that are loaded: nothing keeps the loads of later pieces from being under way.
    """
    STEPS: tl.constexpr = (D + BK - 1) // BK
    s = program % SPLIT
    row = start + program // SPLIT * M + tl.arange(0, M)
    inside = row < stop
    at = row.to(tl.int64)[:, None] * stride
    acc = tl.zeros((M, OUT), tl.float32)
    for step in tl.range(s, N * STEPS, SPLIT, num_stages=STAGES):
        j = step // STEPS
        c = step % STEPS * BK + tl.arange(0, BK)
        now = tl.load(x + at + j * stride_stream + c[None, :], inside[:, None] & (c < D)[None, :], other=0.0)
        for part in tl.static_range(3):
            acc = tl.dot(now, _fn_tile(parts, part, j, c, D, N, ROWS, OUT).T, acc)
    o = tl.arange(0, OUT)
    place = s * (stop - start) + row - start
    tl.store(sums + place[:, None] * OUT + o[None, :], acc, inside[:, None])


def padded(rows: int) -> int:
    """Columns that a product has for so many coefficients."""
    return max(triton.next_power_of_2(rows), 16)


def cut(fn: Tensor) -> Tensor:
    """`fn` float32 as three bfloat16 tensors that sum to it, `[3, *fn.shape]`."""
    parts = torch.empty((3, *fn.shape), dtype=torch.bfloat16, device=fn.device)
    hyper_cut[triton.cdiv(fn.numel(), _BLOCK),](fn, parts, fn.numel(), BLOCK=_BLOCK)
    return parts
