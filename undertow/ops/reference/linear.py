"""Matrix products with weights: `x @ w.T`, and one independent matrix per group of features."""

from __future__ import annotations

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from undertow.ops.reference.precision import wide

# A product of fixed shape gives a row the same bits in every position; one whose row count follows the batch does not.
TILE = 32


def tiled_product(x: Tensor, weight: Tensor, tile: int = TILE) -> Tensor:
    """`x [N, K] @ weight[O, K].T` in products of exactly `tile` rows, so that a row's bits never depend on its
    neighbours or on `N`."""
    rows = len(x)
    out = x.new_empty(rows, weight.shape[0])
    transposed = weight.t()
    for start in range(0, rows - tile + 1, tile):
        torch.mm(x[start : start + tile].contiguous(), transposed, out=out[start : start + tile])
    if rest := rows % tile:
        last = torch.cat([x[rows - rest :], x.new_zeros(tile - rest, x.shape[1])])
        out[rows - rest :] = torch.mm(last, transposed)[:rest]
    return out


class _TiledLinear(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x: Tensor, weight: Tensor) -> Tensor:
        ctx.save_for_backward(x, weight)
        return tiled_product(x, weight)

    @staticmethod
    @once_differentiable
    def backward(ctx, grad: Tensor):  # type: ignore[override]
        x, weight = ctx.saved_tensors
        return grad @ weight, grad.t() @ x


def linear(x: Tensor, weight: Tensor, *, invariant: bool = False) -> Tensor:
    """`x [..., K]` times `weight [O, K]` transposed, no bias -> `[..., O]` in the type of `x`."""
    if not invariant:
        return torch.nn.functional.linear(x, weight)
    flat = x.reshape(-1, x.shape[-1])
    return _TiledLinear.apply(flat, weight).view(*x.shape[:-1], weight.shape[0])


class _WideLinear(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x: Tensor, weight: Tensor, invariant: bool) -> Tensor:
        ctx.save_for_backward(x, weight)
        return linear(wide(x), wide(weight), invariant=invariant)

    @staticmethod
    @once_differentiable
    def backward(ctx, grad: Tensor):  # type: ignore[override]
        x, weight = ctx.saved_tensors
        return (grad @ wide(weight)).to(x.dtype), (grad.t() @ wide(x)).to(weight.dtype), None


def wide_linear(x: Tensor, weight: Tensor, *, invariant: bool = False) -> Tensor:
    """`linear` in float32, whatever the types of `x [..., K]` and `weight [O, K]` -> `[..., O]` float32; of float64 in
    float64. Kept for backward are the factors as they are."""
    flat = x.reshape(-1, x.shape[-1])
    return _WideLinear.apply(flat, weight, invariant).view(*x.shape[:-1], weight.shape[0])


def _bmm(a: Tensor, b: Tensor) -> Tensor:
    """`a [T, g, K] @ b [g, K, N]`, group by group, written where it belongs: `[T, g, N]`."""
    out = a.new_empty(*a.shape[:2], b.shape[2])
    torch.bmm(a.transpose(0, 1), b, out=out.transpose(0, 1))
    return out


class _BlockLinear(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x: Tensor, weight: Tensor) -> Tensor:
        ctx.save_for_backward(x, weight)
        return _bmm(x, weight.transpose(1, 2))

    @staticmethod
    @once_differentiable
    def backward(ctx, grad: Tensor):  # type: ignore[override]
        x, weight = ctx.saved_tensors
        return _bmm(grad, weight), torch.bmm(grad.permute(1, 2, 0), x.transpose(0, 1))


def block_linear(x: Tensor, weight: Tensor, *, invariant: bool = False) -> Tensor:
    """`x [T, g, K]` times `weight [g, O, K]`, group by group -> `[T, g, O]` (grouped output projection, model card
    2.4)."""
    if not invariant:
        return _BlockLinear.apply(x, weight)
    return torch.stack([linear(x[:, g], weight[g], invariant=True) for g in range(weight.shape[0])], dim=1)
