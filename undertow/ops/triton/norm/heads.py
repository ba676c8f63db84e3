"""RMSNorm of query heads and the rotary embedding in one kernel each way: `head_norm_rotary` of
`undertow.ops.reference.rotary`.

Backward reads the result y, which attention keeps anyway, and not q. A rotation keeps inner products: with the upstream
gradient g, the gradient of q is `inverse (g - y mean(g y))`, rotated back.
"""

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
from undertow.ops.triton.norm import rotary
from undertow.ops.triton.norm.rotary import turned
from undertow.ops.triton.norm.tiles import tile


@triton.jit(do_not_specialize=["rows"])
def norm_heads(
    q, cos, sin, out, inverses, rows, eps,
    HEADS: tl.constexpr, R: tl.constexpr,
    D: tl.constexpr, BLOCK: tl.constexpr, ROWS: tl.constexpr, STAGES: tl.constexpr,
):  # fmt: skip
    """Tiles of ROWS rows, HEADS of them a token. `inverses [rows]` float32."""
    c = tl.arange(0, BLOCK)
    for i in tl.range(tl.program_id(0), tl.cdiv(rows, ROWS), tl.num_programs(0), num_stages=STAGES):
        row = i * ROWS + tl.arange(0, ROWS)
        here = (row < rows)[:, None] & (c < D)[None, :]
        at = row.to(tl.int64)[:, None] * D + c[None, :]
        a = tl.load(q + at, here, other=0.0).to(tl.float32)
        inverse = tl.rsqrt(tl.sum(a * a, 1) / D + eps)
        a = turned(a * inverse[:, None], cos, sin, row // HEADS, row < rows, D, BLOCK, ROWS, R, False)
        tl.store(out + at, a.to(out.dtype.element_ty), here)
        tl.store(inverses + row, inverse, row < rows)


@triton.jit(do_not_specialize=["rows"])
def norm_heads_backward(
    y, cos, sin, inverses, grad, dq, rows,
    HEADS: tl.constexpr, R: tl.constexpr,
    D: tl.constexpr, BLOCK: tl.constexpr, ROWS: tl.constexpr, STAGES: tl.constexpr,
):  # fmt: skip
    """Tiles of ROWS rows of `dq`, from the result `y`."""
    c = tl.arange(0, BLOCK)
    for i in tl.range(tl.program_id(0), tl.cdiv(rows, ROWS), tl.num_programs(0), num_stages=STAGES):
        row = i * ROWS + tl.arange(0, ROWS)
        here = (row < rows)[:, None] & (c < D)[None, :]
        at = row.to(tl.int64)[:, None] * D + c[None, :]
        a = tl.load(y + at, here, other=0.0).to(tl.float32)
        g = tl.load(grad + at, here, other=0.0).to(tl.float32)
        inverse = tl.load(inverses + row, row < rows, other=0.0)
        inner = tl.sum(g * a, 1) / D
        g = (g - a * inner[:, None]) * inverse[:, None]
        g = turned(g, cos, sin, row // HEADS, row < rows, D, BLOCK, ROWS, R, True)
        tl.store(dq + at, g.to(dq.dtype.element_ty), here)


def refusal(q: Tensor, cos: Tensor, sin: Tensor) -> str | None:
    """Why the kernels do not serve such a call of `head_norm_rotary`, or None if they do."""
    return rotary.refusal(q, cos, sin)


class _HeadNormRotary(torch.autograd.Function):
    @staticmethod
    def forward(ctx, q: Tensor, cos: Tensor, sin: Tensor, eps: float) -> Tensor:
        q, cos, sin, width = aligned(q), aligned(cos), aligned(sin), q.shape[-1]
        out = torch.empty(q.shape, dtype=q.dtype, device=q.device)
        inverses = torch.empty(q.shape[:-1], dtype=torch.float32, device=q.device)
        rows = inverses.numel()
        if rows:
            found = tile(q.device, "norm of heads", rows, width)
            norm_heads[(found.programs,)](
                q, cos, sin, out, inverses, rows, eps, HEADS=math.prod(q.shape[1:-1]), R=cos.shape[1], **found.sizes
            )
        ctx.save_for_backward(out, inverses, cos, sin)
        return out

    @staticmethod
    @once_differentiable
    def backward(ctx, grad: Tensor):  # type: ignore[override]
        y, inverses, cos, sin = ctx.saved_tensors
        dq = torch.empty(y.shape, dtype=y.dtype, device=y.device)
        rows = inverses.numel()
        if rows:
            found = tile(y.device, "gradients of heads", rows, y.shape[-1])
            norm_heads_backward[(found.programs,)](
                y, cos, sin, inverses, aligned(grad), dq, rows,
                HEADS=math.prod(y.shape[1:-1]), R=cos.shape[1], **found.sizes,
            )  # fmt: skip
        return dq, None, None, None


def head_norm_rotary(q: Tensor, cos: Tensor, sin: Tensor, eps: float) -> Tensor:
    """RMSNorm without a weight over the last dimension of `q [T, h, c]`, then its last `2R` dimensions rotated by
    tables `cos`, `sin [T, R]` float32. Type of `q`.

    Saves its result, the tables, and a float32 number a head: backward takes the normalised q from the result, as
    rounded to its type. A row's result and its gradient have the same bits whatever shares the call.
    """
    return _HeadNormRotary.apply(q, cos, sin, eps)
