"""The operator that reads the streams last, differentiable: `undertow.ops.reference.hyper.hyper_head`."""

from __future__ import annotations

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from undertow.ops.triton.hyper import read
from undertow.ops.triton.hyper.backward import backward
from undertow.ops.triton.hyper.forward import forward
from undertow.ops.triton.hyper.tiles import by_tokens


def refusal(streams: Tensor, fn: Tensor, scale: Tensor, base: Tensor, *, invariant: bool = False) -> str | None:
    """Why the kernels do not serve such a call of `hyper_head`, or None if they do."""
    return read.refusal(streams, fn, scale, base, 1, invariant=invariant)


class _Head(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx, streams: Tensor, fn: Tensor, scale: Tensor, base: Tensor, weight: Tensor, eps_norm: float, eps: float
    ) -> Tensor:
        rows = by_tokens(streams)
        found = forward(rows, fn, scale, base, weight, eps_norm, 1, eps)
        ctx.save_for_backward(rows, fn, scale, base, weight, found.logits, found.root, found.inverse)
        ctx.eps = eps
        return found.out

    @staticmethod
    @once_differentiable
    def backward(ctx, grad):  # type: ignore[override]
        streams, fn, scale, base, weight, logits, root, inverse = ctx.saved_tensors
        found = backward(
            streams, fn, scale, base, weight, logits, root, inverse, grad.contiguous(), None, None, None, 1, ctx.eps
        )
        return *found, None, None


def hyper_head(
    streams: Tensor, fn: Tensor, scale: Tensor, base: Tensor, norm_weight: Tensor, eps_norm: float, eps: float, *,
    invariant: bool = False,
) -> Tensor:  # fmt: skip
    """The final collapse of `streams [T, n, d]` bfloat16, normalised: x `[T, d]`.

    `fn [n, n d]`, `scale [1]` and `base [n]` float32, `norm_weight [d]`. Sums are float32, the projection's too.
    `invariant` must be off, see `refusal`.
    """
    given = (x.contiguous() for x in (fn, scale, base, norm_weight))
    return _Head.apply(streams, *given, eps_norm, eps)
