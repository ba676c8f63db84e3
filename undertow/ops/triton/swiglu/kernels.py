"""The two passes of clamped SwiGLU; a program has whole rows, so that a weight's gradient is summed in one order."""

# pyright: basic, reportArgumentType=false, reportOperatorIssue=false, reportAssignmentType=false, reportCallIssue=false
# pyright: reportGeneralTypeIssues=false
# The language of kernels has types of its own.
from __future__ import annotations

import triton
import triton.language as tl

from undertow.ops.triton.attention.rounding import by_eights


@triton.jit(do_not_specialize=["rows"])
def swiglu_forward(
    gate, up, weight, out, rows, width, gate_stride, up_stride, limit,
    WEIGHTED: tl.constexpr, ROWS: tl.constexpr, COLUMNS: tl.constexpr, STAGES: tl.constexpr,
):  # fmt: skip
    """ROWS rows of `out [rows, width]`; a row of gate or up begins `*_stride` numbers after the one before."""
    row = tl.program_id(0).to(tl.int64) * ROWS + tl.arange(0, ROWS)
    here = row < rows
    if WEIGHTED:
        factor = tl.load(weight + row, here, other=0.0)[:, None]
    for c in tl.range(0, width, COLUMNS, num_stages=STAGES):
        column = (c + tl.arange(0, COLUMNS))[None, :]
        inside = here[:, None] & (column < width)
        g = tl.load(gate + row[:, None] * gate_stride + column, inside, other=0.0).to(tl.float32)
        u = tl.load(up + row[:, None] * up_stride + column, inside, other=0.0).to(tl.float32)
        # Not minimum and maximum: they would hide a NaN.
        g = tl.where(g > limit, limit, g)
        u = tl.where(u > limit, limit, tl.where(u < -limit, -limit, u))
        h = g / (1.0 + tl.exp(-g)) * u
        if WEIGHTED:
            h *= factor
        tl.store(out + row[:, None] * width + column, h.to(out.dtype.element_ty), inside)


@triton.jit(do_not_specialize=["rows"])
def swiglu_backward(
    gate, up, weight, grad, grad_gate, grad_up, grad_weight,
    rows, width, gate_stride, up_stride, grad_stride, gate_out, up_out, limit,
    WEIGHTED: tl.constexpr, ROWS: tl.constexpr, COLUMNS: tl.constexpr, STAGES: tl.constexpr,
):  # fmt: skip
    """Gradients of ROWS rows, the forward computed again; `gate_out` and `up_out` are the strides of theirs."""
    row = tl.program_id(0).to(tl.int64) * ROWS + tl.arange(0, ROWS)
    here = row < rows
    if WEIGHTED:
        factor = tl.load(weight + row, here, other=0.0)[:, None]
        total = tl.zeros((ROWS, COLUMNS // 8), tl.float32)
    for c in tl.range(0, width, COLUMNS, num_stages=STAGES):
        column = (c + tl.arange(0, COLUMNS))[None, :]
        inside = here[:, None] & (column < width)
        g = tl.load(gate + row[:, None] * gate_stride + column, inside, other=0.0).to(tl.float32)
        u = tl.load(up + row[:, None] * up_stride + column, inside, other=0.0).to(tl.float32)
        d = tl.load(grad + row[:, None] * grad_stride + column, inside, other=0.0).to(tl.float32)
        # Factors, not conditions: they would hide a NaN of the other half.
        free_g = (g <= limit).to(tl.float32)
        free_u = (tl.abs(u) <= limit).to(tl.float32)
        g = tl.where(g > limit, limit, g)
        u = tl.where(u > limit, limit, tl.where(u < -limit, -limit, u))
        s = 1.0 / (1.0 + tl.exp(-g))
        silu = g * s
        if WEIGHTED:
            total += by_eights(d * silu * u, ROWS, COLUMNS)
            d *= factor
        dg = d * u * (s + silu * (1.0 - s)) * free_g
        du = d * silu * free_u
        tl.store(grad_gate + row[:, None] * gate_out + column, dg.to(grad_gate.dtype.element_ty), inside)
        tl.store(grad_up + row[:, None] * up_out + column, du.to(grad_up.dtype.element_ty), inside)
    if WEIGHTED:
        tl.store(grad_weight + row, tl.sum(total, 1), here)
