"""Clamped SwiGLU on a GPU: every number is read once and written once; nothing but the inputs is kept for backward."""

# pyright: basic, reportArgumentType=false, reportOptionalMemberAccess=false
# Sizes that a kernel is compiled for are of a type of their own.
from __future__ import annotations

import torch
import triton
from torch import Tensor
from torch.autograd.function import once_differentiable

from undertow.ops.triton.swiglu.kernels import swiglu_backward, swiglu_forward
from undertow.ops.triton.swiglu.tiles import tiles

_TYPES = (torch.bfloat16, torch.float16, torch.float32)


def refusal(gate: Tensor, up: Tensor | None, weight: Tensor | None = None) -> str | None:
    """Why the kernels do not serve a call with these operands, or None if they do."""
    given = [gate] if up is None else [gate, up]
    if any(x.dtype not in _TYPES or x.dtype != gate.dtype for x in given):
        told = ", ".join(str(x.dtype).removeprefix("torch.") for x in given)
        return f"gate and up in {told}: kernels serve bfloat16, float16 and float32, the same for both"
    if any(x.dim() != 2 or (x.stride(1) != 1 and x.shape[1] > 1) for x in given):
        return "gate and up are not rows of numbers that lie side by side"
    if up is None and gate.shape[1] % 2:
        return f"{gate.shape[1]} numbers a row are no two halves"
    if weight is not None and weight.dtype != torch.float32:
        return f"weights in {str(weight.dtype).removeprefix('torch.')}: kernels serve float32"
    return None


def _halves(gate: Tensor, up: Tensor | None) -> tuple[Tensor, Tensor]:
    if up is not None:
        return gate, up
    width = gate.shape[1] // 2
    return gate[:, :width], gate[:, width:]


class _SwiGLU(torch.autograd.Function):
    @staticmethod
    def forward(ctx, gate: Tensor, up: Tensor | None, limit: float, weight: Tensor | None) -> Tensor:
        ctx.save_for_backward(gate, up, weight)
        ctx.limit = limit
        gates, ups = _halves(gate, up)
        rows, width = gates.shape
        out = torch.empty((rows, width), dtype=gate.dtype, device=gate.device)
        if out.numel():
            tile = tiles(gate.device, "forward", width)
            swiglu_forward[(triton.cdiv(rows, tile["ROWS"]),)](
                gates, ups, None if weight is None else weight.contiguous(), out,
                rows, width, gates.stride(0), ups.stride(0), limit, WEIGHTED=weight is not None, **tile,
            )  # fmt: skip
        return out

    @staticmethod
    @once_differentiable
    def backward(ctx, grad: Tensor):  # type: ignore[override]
        gate, up, weight = ctx.saved_tensors
        if grad.stride(1) != 1:
            grad = grad.contiguous()
        gates, ups = _halves(gate, up)
        rows, width = gates.shape
        grad_gate = torch.empty(gate.shape, dtype=gate.dtype, device=gate.device)
        grad_up = None if up is None else torch.empty(up.shape, dtype=up.dtype, device=up.device)
        grad_weight = None if weight is None else torch.empty((rows,), dtype=torch.float32, device=gate.device)
        if grad.numel():
            to_gate, to_up = _halves(grad_gate, grad_up)
            tile = tiles(gate.device, "backward", width)
            swiglu_backward[(triton.cdiv(rows, tile["ROWS"]),)](
                gates, ups, None if weight is None else weight.contiguous(), grad, to_gate, to_up, grad_weight,
                rows, width, gates.stride(0), ups.stride(0), grad.stride(0), to_gate.stride(0), to_up.stride(0),
                ctx.limit, WEIGHTED=weight is not None, **tile,
            )  # fmt: skip
        elif grad_weight is not None:
            grad_weight.zero_()  # of rows without numbers
        return grad_gate, grad_up, None, grad_weight


def swiglu(gate: Tensor, up: Tensor | None, limit: float, weight: Tensor | None = None) -> Tensor:
    """As `undertow.ops.reference.experts.swiglu`: `gate`, `up [N, I]`, or `gate [N, 2 I]` alone, -> `[N, I]`. Sums are
    made in float32, in one order."""
    return _SwiGLU.apply(gate, up, limit, weight)
