"""Interleaved partial rotary embedding of rows: the operator of `undertow.ops.reference.rotary`, out of place."""

# pyright: basic, reportArgumentType=false, reportOperatorIssue=false, reportAssignmentType=false, reportCallIssue=false
# pyright: reportGeneralTypeIssues=false, reportIndexIssue=false
# The language of kernels has types of its own.
from __future__ import annotations

import math

import torch
import triton
import triton.language as tl
from torch import Tensor
from torch.autograd.function import once_differentiable

from undertow.ops.triton.attention.descriptors import aligned
from undertow.ops.triton.norm.tiles import LONGEST, tile


@triton.jit
def turned(
    x, cos, sin, token, inside,
    D: tl.constexpr, BLOCK: tl.constexpr, ROWS: tl.constexpr, R: tl.constexpr, INVERSE: tl.constexpr,
):  # fmt: skip
    """`x [ROWS, BLOCK]` float32 with the pairs `(2i, 2i + 1)` of the last 2R of D columns rotated by row `token` of the
    tables `[T, R]`, back if INVERSE. The others pass unchanged, whatever they hold."""
    pair = tl.arange(0, BLOCK // 2)[None, :] - (D // 2 - R)
    tail = (pair >= 0) & (pair < R)
    at = token.to(tl.int64)[:, None] * R + pair
    cosine = tl.load(cos + at, tail & inside[:, None], other=1.0).to(tl.float32)
    sine = tl.load(sin + at, tail & inside[:, None], other=0.0).to(tl.float32)
    if INVERSE:
        sine = -sine
    even, odd = tl.split(tl.reshape(x, (ROWS, BLOCK // 2, 2)))
    first = tl.where(tail, even * cosine - odd * sine, even)
    second = tl.where(tail, even * sine + odd * cosine, odd)
    return tl.reshape(tl.join(first, second), (ROWS, BLOCK))


@triton.jit(do_not_specialize=["rows"])
def rotate_rows(
    x, cos, sin, out, rows,
    HEADS: tl.constexpr, R: tl.constexpr, INVERSE: tl.constexpr,
    D: tl.constexpr, BLOCK: tl.constexpr, ROWS: tl.constexpr, STAGES: tl.constexpr,
):  # fmt: skip
    """Tiles of ROWS rows, HEADS of them a token."""
    c = tl.arange(0, BLOCK)
    for i in tl.range(tl.program_id(0), tl.cdiv(rows, ROWS), tl.num_programs(0), num_stages=STAGES):
        row = i * ROWS + tl.arange(0, ROWS)
        here = (row < rows)[:, None] & (c < D)[None, :]
        at = row.to(tl.int64)[:, None] * D + c[None, :]
        a = tl.load(x + at, here, other=0.0).to(tl.float32)
        a = turned(a, cos, sin, row // HEADS, row < rows, D, BLOCK, ROWS, R, INVERSE)
        tl.store(out + at, a.to(out.dtype.element_ty), here)


def refusal(x: Tensor, cos: Tensor, sin: Tensor) -> str | None:
    """Why the kernels do not serve such a call of `rotary`, or None if they do."""
    if x.dtype not in (torch.bfloat16, torch.float32):
        return f"the kernels take rows in bfloat16 or float32, not {str(x.dtype).removeprefix('torch.')}"
    if cos.dtype != torch.float32 or sin.dtype != torch.float32:
        return f"the kernels take tables in float32, not {str(cos.dtype).removeprefix('torch.')}"
    if x.shape[-1] % 2 or not 2 <= x.shape[-1] <= LONGEST:
        return f"the kernels take rows of an even number up to {LONGEST:,}, not of {x.shape[-1]:,}"
    if cos.dim() != 2 or len(cos) != len(x) or sin.shape != cos.shape:
        return f"the kernels take tables of a row for each of {len(x)} tokens, not of {list(cos.shape)}"
    if not 0 < 2 * cos.shape[1] <= x.shape[-1]:
        return f"the kernels rotate 2 to {x.shape[-1]} numbers of such rows, not {2 * cos.shape[1]}"
    return None


class _Rotary(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x: Tensor, cos: Tensor, sin: Tensor, inverse: bool) -> Tensor:
        cos, sin = aligned(cos), aligned(sin)
        ctx.save_for_backward(cos, sin)
        ctx.inverse = inverse
        return _rotated(x, cos, sin, inverse)

    @staticmethod
    @once_differentiable
    def backward(ctx, grad: Tensor):  # type: ignore[override]
        return _rotated(grad, *ctx.saved_tensors, not ctx.inverse), None, None, None


def _rotated(x: Tensor, cos: Tensor, sin: Tensor, inverse: bool) -> Tensor:
    x, width = aligned(x), x.shape[-1]
    out = torch.empty(x.shape, dtype=x.dtype, device=x.device)
    rows = x.numel() // width
    if rows:
        found = tile(x.device, "rotary", rows, width)
        rotate_rows[(found.programs,)](
            x, cos, sin, out, rows, HEADS=math.prod(x.shape[1:-1]), R=cos.shape[1], INVERSE=inverse, **found.sizes
        )
    return out


def rotary(x: Tensor, cos: Tensor, sin: Tensor, *, inverse: bool = False) -> Tensor:
    """Rotate the last `2R` dimensions of `x [T, ..., D]` by tables `cos`, `sin [T, R]` float32; `inverse` rotates back.

    Saves the tables alone. A row's result and its gradient have the same bits whatever shares the call.
    """
    return _Rotary.apply(x, cos, sin, inverse)
