"""RMSNorm of rows, `x / sqrt(mean(x^2) + eps) * weight`: the operator of `undertow.ops.reference.norm`.

With `n = x inverse` and the upstream gradient `g`, the gradients are `inverse (g w - n mean(g w n))` of x, and `g n`
summed over all rows of w: each program sums over the rows that it has, and a second kernel over programs.
"""

# pyright: basic, reportArgumentType=false, reportOperatorIssue=false, reportAssignmentType=false, reportCallIssue=false
# pyright: reportGeneralTypeIssues=false, reportIndexIssue=false
# The language of kernels has types of its own.
from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor
from torch.autograd.function import once_differentiable

from undertow.ops.triton.attention.descriptors import aligned
from undertow.ops.triton.norm.tiles import LONGEST, tile

_COLUMNS = 32
"""Columns of a program that sums over programs."""


@triton.jit(do_not_specialize=["rows"])
def norm_rows(
    x, weight, out, inverses, rows, eps,
    D: tl.constexpr, BLOCK: tl.constexpr, ROWS: tl.constexpr, STAGES: tl.constexpr,
):  # fmt: skip
    """Tiles of ROWS rows; `weight` may be None. `inverses [rows]` float32."""
    c = tl.arange(0, BLOCK)
    if weight is not None:
        w = tl.load(weight + c, c < D, other=0.0).to(tl.float32)[None, :]
    for i in tl.range(tl.program_id(0), tl.cdiv(rows, ROWS), tl.num_programs(0), num_stages=STAGES):
        row = i * ROWS + tl.arange(0, ROWS)
        here = (row < rows)[:, None] & (c < D)[None, :]
        at = row.to(tl.int64)[:, None] * D + c[None, :]
        a = tl.load(x + at, here, other=0.0).to(tl.float32)
        inverse = tl.rsqrt(tl.sum(a * a, 1) / D + eps)
        a = a * inverse[:, None]
        if weight is not None:
            a = a * w
        tl.store(out + at, a.to(out.dtype.element_ty), here)
        tl.store(inverses + row, inverse, row < rows)


@triton.jit(do_not_specialize=["rows"])
def norm_rows_backward(
    x, weight, inverses, grad, dx, parts, rows,
    D: tl.constexpr, BLOCK: tl.constexpr, ROWS: tl.constexpr, STAGES: tl.constexpr,
):  # fmt: skip
    """Tiles of ROWS rows of `dx`, and a line of `parts [programs, D]` float32, unless that is None."""
    c = tl.arange(0, BLOCK)
    if weight is not None:
        w = tl.load(weight + c, c < D, other=0.0).to(tl.float32)[None, :]
    if parts is not None:
        acc = tl.zeros((ROWS, BLOCK), tl.float32)
    for i in tl.range(tl.program_id(0), tl.cdiv(rows, ROWS), tl.num_programs(0), num_stages=STAGES):
        row = i * ROWS + tl.arange(0, ROWS)
        here = (row < rows)[:, None] & (c < D)[None, :]
        at = row.to(tl.int64)[:, None] * D + c[None, :]
        inverse = tl.load(inverses + row, row < rows, other=0.0)[:, None]
        normed = tl.load(x + at, here, other=0.0).to(tl.float32) * inverse
        g = tl.load(grad + at, here, other=0.0).to(tl.float32)
        if parts is not None:
            acc += g * normed
        if weight is not None:
            g = g * w
        inner = tl.sum(g * normed, 1) / D
        tl.store(dx + at, ((g - normed * inner[:, None]) * inverse).to(dx.dtype.element_ty), here)
    if parts is not None:
        tl.store(parts + tl.program_id(0).to(tl.int64) * D + c, tl.sum(acc, 0), c < D)


@triton.jit(do_not_specialize=["count"])
def sum_parts(parts, out, count, D: tl.constexpr, BR: tl.constexpr, BC: tl.constexpr):
    """BC columns of `out [D]`: lines of `parts [count, D]` added, BR apart first, in their order."""
    c = tl.program_id(0) * BC + tl.arange(0, BC)
    r = tl.arange(0, BR)
    acc = tl.zeros((BR, BC), tl.float32)
    for i in tl.range(0, count, BR, num_stages=2):
        here = (i + r < count)[:, None] & (c < D)[None, :]
        acc += tl.load(parts + (i + r).to(tl.int64)[:, None] * D + c[None, :], here, other=0.0)
    tl.store(out + c, tl.sum(acc, 0).to(out.dtype.element_ty), c < D)


def refusal(x: Tensor, weight: Tensor | None) -> str | None:
    """Why the kernels do not serve such a call of `rms_norm`, or None if they do."""
    for name, given in (("rows", x), ("weights", weight)):
        if given is not None and given.dtype not in (torch.bfloat16, torch.float32):
            return f"the kernels take {name} in bfloat16 or float32, not {str(given.dtype).removeprefix('torch.')}"
    if not 1 <= x.shape[-1] <= LONGEST:
        return f"the kernels take rows of 1 to {LONGEST:,} numbers, not {x.shape[-1]:,}"
    return None


class _RMSNorm(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x: Tensor, weight: Tensor | None, eps: float) -> Tensor:
        x, weight = aligned(x), None if weight is None else aligned(weight)
        width = x.shape[-1]
        rows = x.numel() // width
        out = torch.empty(x.shape, dtype=x.dtype, device=x.device)
        inverses = torch.empty((rows,), dtype=torch.float32, device=x.device)
        if rows:
            found = tile(x.device, "norm", rows, width)
            norm_rows[(found.programs,)](x, weight, out, inverses, rows, eps, **found.sizes)
        ctx.save_for_backward(x, weight, inverses)
        return out

    @staticmethod
    @once_differentiable
    def backward(ctx, grad: Tensor):  # type: ignore[override]
        x, weight, inverses = ctx.saved_tensors
        return *rms_norm_backward(x, weight, inverses, grad, ctx.needs_input_grad[1]), None


def rms_norm_backward(
    x: Tensor, weight: Tensor | None, inverses: Tensor, grad: Tensor, learns: bool
) -> tuple[Tensor, Tensor | None]:
    """Gradients of `x [..., D]` and, if the weight `learns`, of `weight [D]`. `inverses`: 1 / RMS of each row."""
    width, rows = x.shape[-1], len(inverses)
    dx = torch.empty(x.shape, dtype=x.dtype, device=x.device)
    dw = parts = None
    found = tile(x.device, "norm gradients", rows, width)
    if learns and weight is not None:
        dw = torch.empty((width,), dtype=weight.dtype, device=x.device)
        parts = torch.empty((found.programs, width), dtype=torch.float32, device=x.device)
    if rows:
        norm_rows_backward[(found.programs,)](x, weight, inverses, aligned(grad), dx, parts, rows, **found.sizes)
    if dw is not None:
        sum_parts[(triton.cdiv(width, _COLUMNS),)](parts, dw, found.programs, D=width, BR=64, BC=_COLUMNS)
    return dx, dw


def rms_norm(x: Tensor, weight: Tensor | None, eps: float) -> Tensor:
    """RMSNorm over the last dimension of `x [..., D]`; `weight [D]`, or None for the weight-less form. Type of `x`.

    Saves `x` and a float32 number a row. A row's result and its gradient have the same bits whatever shares the call;
    so has the weight's gradient whenever the same call is made.
    """
    return _RMSNorm.apply(x, weight, eps)
