"""The operator that reads the streams for a sub-layer, differentiable. The definition is
`undertow.ops.reference.hyper.hyper_in`."""

from __future__ import annotations

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from undertow.ops.triton.hyper.backward import backward
from undertow.ops.triton.hyper.forward import forward
from undertow.ops.triton.hyper.tiles import STREAMS, by_tokens

WIDEST = 16384
"""Numbers of a stream that a program sums."""
MOST_ITERATIONS = 32
"""Steps of Sinkhorn's iteration whose sums a program holds."""


def refusal(
    streams: Tensor, fn: Tensor, scale: Tensor, base: Tensor, iterations: int, *, invariant: bool = False
) -> str | None:
    """Why the kernels do not serve such a call of `hyper_in`, or None if they do."""
    if invariant:
        return "the kernels' results depend on the number of tokens of a call, and batch_invariant is on"
    if streams.dtype != torch.bfloat16:
        return f"the kernels take streams of bfloat16, not {_type(streams)}"
    for name, x in (("fn", fn), ("scale", scale), ("base", base)):
        if x.dtype != torch.float32:
            return f"the kernels take {name} of float32, not {_type(x)}"
    if streams.shape[1] not in STREAMS:
        return f"the kernels take 2 or 4 streams, not {streams.shape[1]}"
    if streams.shape[2] > WIDEST:
        return f"the kernels take streams of up to {WIDEST:,} numbers, not {streams.shape[2]:,}"
    if not 1 <= iterations <= MOST_ITERATIONS:
        return f"the kernels take 1 to {MOST_ITERATIONS} steps of Sinkhorn's iteration, not {iterations}"
    return None


def _type(x: Tensor) -> str:
    return str(x.dtype).removeprefix("torch.")


class _In(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx, streams: Tensor, fn: Tensor, scale: Tensor, base: Tensor, weight: Tensor, eps_norm: float,
        iterations: int, eps: float,
    ) -> tuple[Tensor, Tensor, Tensor, Tensor]:  # fmt: skip
        rows = by_tokens(streams)
        read = forward(rows, fn, scale, base, weight, eps_norm, iterations, eps)
        ctx.save_for_backward(rows, fn, scale, base, weight, read.logits, read.root, read.inverse)
        ctx.iterations, ctx.eps = iterations, eps
        ctx.set_materialize_grads(False)
        return read.out, read.post, read.mix, streams

    @staticmethod
    @once_differentiable
    def backward(ctx, grad, grad_post, grad_mix, grad_streams):  # type: ignore[override]
        streams, fn, scale, base, weight, logits, root, inverse = ctx.saved_tensors
        tokens, count, width = streams.shape
        found = backward(
            streams, fn, scale, base, weight, logits, root, inverse,
            _given(grad, (tokens, width), streams),
            _given(grad_post, (tokens, count), fn),
            _given(grad_mix, (tokens, count, count), fn),
            None if grad_streams is None else grad_streams.contiguous(),
            ctx.iterations, ctx.eps,
        )  # fmt: skip
        return *found, None, None, None


def _given(grad: Tensor | None, shape: tuple[int, ...], like: Tensor) -> Tensor:
    """A gradient, zeros for that of a result that nobody used."""
    return torch.zeros(shape, dtype=like.dtype, device=like.device) if grad is None else grad.contiguous()


def hyper_in(
    streams: Tensor, fn: Tensor, scale: Tensor, base: Tensor, norm_weight: Tensor, eps_norm: float, iterations: int,
    eps: float, *, invariant: bool = False,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:  # fmt: skip
    """What a sub-layer reads of `streams [T, n, d]` bfloat16: x `[T, d]`, post `[T, n]`, mix `[T, n, n]`, and the
    streams, whose gradient is added in the pass that makes that of their coefficients.

    `fn [(2 + n) n, n d]`, `scale [3]` and `base [(2 + n) n]` float32, `norm_weight [d]`. Sums are float32, the
    projection's too. `invariant` must be off, see `refusal`.
    """
    given = (x.contiguous() for x in (fn, scale, base, norm_weight))
    return _In.apply(streams, *given, eps_norm, iterations, eps)
