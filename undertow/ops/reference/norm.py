"""RMSNorm with or without a weight: `x / sqrt(mean(x^2) + eps) * weight`, computed in float32."""

from __future__ import annotations

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from undertow.ops.reference.precision import twinned, wide


class _RMSNorm(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x: Tensor, weight: Tensor | None, eps: float) -> Tensor:
        xw = wide(x)
        squares = xw.square().reshape(-1, x.shape[-1])
        mean = twinned(squares).mean(-1)[: len(squares)]
        inverse = torch.rsqrt(mean + eps).view(*x.shape[:-1], 1)
        ctx.save_for_backward(x, weight, inverse)
        y = xw * inverse
        if weight is not None:
            y = y.mul_(wide(weight))
        return y.to(x.dtype)

    @staticmethod
    @once_differentiable
    def backward(ctx, grad: Tensor):  # type: ignore[override]
        x, weight, inverse = ctx.saved_tensors
        normed, g, grad_weight = wide(x) * inverse, wide(grad), None
        along = g * normed
        if weight is None:
            inner = along.mean(-1, keepdim=True)
        else:
            w = wide(weight)
            grad_weight = along.reshape(-1, x.shape[-1]).sum(0).to(weight.dtype)
            inner = torch.mv(along.reshape(-1, x.shape[-1]), w).view_as(inverse) / x.shape[-1]
            g = torch.mul(g, w, out=along)
        return normed.mul_(inner).neg_().add_(g).mul_(inverse).to(x.dtype), grad_weight, None


def rms_norm(x: Tensor, weight: Tensor | None, eps: float) -> Tensor:
    """RMSNorm over the last dimension of `x [..., D]`; `weight [D]`, or None for the weight-less form. Type of `x`."""
    return _RMSNorm.apply(x, weight, eps)
