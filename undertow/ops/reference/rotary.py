"""Interleaved partial rotary embedding: channel pairs `(2i, 2i+1)` of the trailing dimensions, angles in float32."""

from __future__ import annotations

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from undertow.ops.reference.norm import rms_norm
from undertow.ops.reference.precision import wide


def _rotate(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    rotated = 2 * cos.shape[-1]
    tail = wide(x[..., x.shape[-1] - rotated :])
    between = (1,) * (x.dim() - cos.dim())
    cos, sin = (table.view(*table.shape[:-1], *between, table.shape[-1]).to(tail.dtype) for table in (cos, sin))
    even, odd = tail[..., 0::2], tail[..., 1::2]
    out = x.clone()
    out[..., x.shape[-1] - rotated :] = torch.stack([even * cos - odd * sin, even * sin + odd * cos], -1).flatten(-2)
    return out


class _Rotary(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        ctx.save_for_backward(cos, sin)
        return _rotate(x, cos, sin)

    @staticmethod
    @once_differentiable
    def backward(ctx, grad: Tensor):  # type: ignore[override]
        cos, sin = ctx.saved_tensors
        return _rotate(grad, cos, -sin), None, None


def rotary(x: Tensor, cos: Tensor, sin: Tensor, *, inverse: bool = False) -> Tensor:
    """Rotate the last `2R` dimensions of `x [T, ..., D]` by tables `cos`, `sin [T, R]`; `inverse` rotates back.

    The first `D - 2R` dimensions pass unchanged. Model card 2.2 (rotation) and 2.3 (de-rotation of attention outputs).
    """
    return _Rotary.apply(x, cos, -sin if inverse else sin)


def head_norm_rotary(q: Tensor, cos: Tensor, sin: Tensor, eps: float) -> Tensor:
    """RMSNorm without a weight over the last dimension of `q [T, h, c]`, then `rotary` by tables `cos`, `sin [T, R]`:
    model card 2.2."""
    return rotary(rms_norm(q, None, eps), cos, sin)
