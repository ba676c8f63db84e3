"""Weights of choices in expert order, and their gradients back in that of tokens: each number moved once."""

# pyright: basic, reportArgumentType=false, reportOperatorIssue=false, reportAssignmentType=false, reportCallIssue=false
# The language of kernels has types of its own.
from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor
from torch.autograd.function import once_differentiable

from undertow.ops.reference.experts import Dispatch
from undertow.ops.triton.permute.rows import refused_type
from undertow.ops.triton.permute.tiles import tiles


def refusal(weights: Tensor) -> str | None:
    """Why the kernels cannot serve a call with these operands, or None if they can."""
    return refused_type(weights, "weights")


@triton.jit(do_not_specialize=["choices"])
def move_weights(weights, slot, out, choices, BACK: tl.constexpr, BLOCK: tl.constexpr):
    """BLOCK choices: each one's number to its slot, or BACK from there."""
    n = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    place = tl.load(slot + n, n < choices, other=0).to(tl.int64)
    if BACK:
        tl.store(out + n, tl.load(weights + place, n < choices), n < choices)
    else:
        tl.store(out + place, tl.load(weights + n, n < choices), n < choices)


def _moved(weights: Tensor, order: Dispatch, back: bool) -> Tensor:
    choices = weights.numel()
    out = torch.empty((choices,), dtype=weights.dtype, device=weights.device)
    if choices:
        tile = tiles(weights.device, "weights")
        grid = (triton.cdiv(choices, tile["BLOCK"]),)
        move_weights[grid](weights.contiguous(), order.slot, out, choices, BACK=back, **tile)
    return out


class _PermuteWeights(torch.autograd.Function):
    @staticmethod
    def forward(ctx, weights: Tensor, order: Dispatch) -> Tensor:
        ctx.order = order
        return _moved(weights, order, back=False)

    @staticmethod
    @once_differentiable
    def backward(ctx, grad: Tensor):  # type: ignore[override]
        return _moved(grad, ctx.order, back=True).view(-1, ctx.order.k), None


def permute_weights(weights: Tensor, order: Dispatch) -> Tensor:
    """The weight of the choice in each slot: `[T, k]`, float32 or bfloat16 -> `[T k]`."""
    return _PermuteWeights.apply(weights, order)
