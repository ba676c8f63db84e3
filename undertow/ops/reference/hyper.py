"""Manifold-constrained hyper-connections (model card 5): projection, coefficients, collapse, expand and Sinkhorn-Knopp,
in float32.

The sums over the few streams are written out: torch's reductions over so short an axis depend on how many rows share
the call, elementwise additions do not.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from undertow.ops.reference.linear import linear
from undertow.ops.reference.norm import rms_norm
from undertow.ops.reference.precision import sigmoid, twinned, wide


def _axis_sum(m: Tensor, axis: int) -> Tensor:
    first, *rest = m.unbind(axis)
    if not rest:
        return first.clone().unsqueeze(axis)
    total = first + rest[0]
    for part in rest[1:]:
        total += part
    return total.unsqueeze(axis)


def _trajectory(logits: Tensor, iterations: int, eps: float, keep: bool) -> tuple[list[Tensor], list[Tensor], Tensor]:
    """Row softmax, then a column step and `iterations - 1` row and column steps, on `[n, n, T]` (rows first)."""
    top = logits.amax(1, keepdim=True)
    exp = torch.exp(logits - top)
    soft = exp / _axis_sum(exp, 1)
    m = soft + eps
    states, sums = [], []
    for step in range(2 * iterations - 1):
        total = _axis_sum(m, 1 if step % 2 else 0).add_(eps)
        m = m / total
        if keep:
            states.append(m)
            sums.append(total)
    if not keep:
        states.append(m)
    return states, sums, soft


class _Sinkhorn(torch.autograd.Function):
    @staticmethod
    def forward(ctx, logits: Tensor, iterations: int, eps: float) -> Tensor:
        ctx.save_for_backward(logits)
        ctx.iterations, ctx.eps = iterations, eps
        states, _, _ = _trajectory(wide(logits).permute(1, 2, 0).contiguous(), iterations, eps, keep=False)
        return states[-1].permute(2, 0, 1).contiguous()

    @staticmethod
    @once_differentiable
    def backward(ctx, grad: Tensor):  # type: ignore[override]
        (logits,) = ctx.saved_tensors
        states, sums, soft = _trajectory(wide(logits).permute(1, 2, 0).contiguous(), ctx.iterations, ctx.eps, keep=True)
        g = grad.permute(1, 2, 0)
        for step in reversed(range(len(states))):
            axis = 1 if step % 2 else 0
            g = (g - _axis_sum(g * states[step], axis)) / sums[step]
        g = soft * (g - _axis_sum(g * soft, 1))
        return g.permute(2, 0, 1).to(logits.dtype), None, None


def sinkhorn(logits: Tensor, iterations: int, eps: float) -> Tensor:
    """Doubly stochastic matrices from `logits [T, n, n]`: row softmax + eps, a column step, then `iterations - 1` row
    and column steps, each dividing by its sum + eps (model card 5). Backward recomputes the trajectory. -> `[T, n, n]`
    float32.
    """
    return _Sinkhorn.apply(logits, iterations, eps)


def hyper_coefficients(
    logits: Tensor, scale: Tensor, base: Tensor, iterations: int, eps: float
) -> tuple[Tensor, Tensor, Tensor]:
    """Stream weights of one sub-layer from `logits [T, (2 + n) n]` (pre | post | mix), `scale [3]`, `base [(2 + n) n]`.

    Returns pre `[T, n]` = sigmoid + eps, post `[T, n]` = 2 sigmoid, mix `[T, n, n]` = Sinkhorn, all float32.
    """
    streams = next(n for n in range(1, base.numel() + 1) if (2 + n) * n == base.numel())
    a, b, s = wide(logits), wide(base), wide(scale)
    pre = sigmoid(a[:, :streams] * s[0] + b[:streams]) + eps
    post = 2.0 * sigmoid(a[:, streams : 2 * streams] * s[1] + b[streams : 2 * streams])
    mix = (a[:, 2 * streams :] * s[2] + b[2 * streams :]).view(-1, streams, streams)
    return pre, post, sinkhorn(mix, iterations, eps)


class _Project(torch.autograd.Function):
    @staticmethod
    def forward(ctx, streams: Tensor, fn: Tensor, eps: float, linear: Callable[[Tensor, Tensor], Tensor]) -> Tensor:
        flat = wide(streams.flatten(1))
        mean = twinned(flat.square()).mean(-1, keepdim=True)[: len(flat)]
        inverse = torch.rsqrt(mean + eps)
        out = linear(flat, wide(fn)).mul_(inverse)
        ctx.save_for_backward(streams, fn, inverse, out)
        return out

    @staticmethod
    @once_differentiable
    def backward(ctx, grad: Tensor):  # type: ignore[override]
        streams, fn, inverse, out = ctx.saved_tensors
        flat, slope = wide(streams.flatten(1)), grad * inverse
        # The RMS takes out what of the gradient lies along the row.
        along = (grad * out).sum(-1, keepdim=True) * inverse.square() / flat.shape[1]
        of_flat = torch.addcmul(slope @ wide(fn), flat, along, value=-1.0)
        return of_flat.view_as(streams).to(streams.dtype), (slope.t() @ flat).to(fn.dtype), None, None


def project(streams: Tensor, fn: Tensor, eps: float, linear: Callable[[Tensor, Tensor], Tensor]) -> Tensor:
    """`rms(flatten(streams)) @ fn.T` in float32, the RMS divided out after the product. `[T, n, d] -> [T, rows of
    fn]`. Kept for backward are the streams in their own type."""
    return _Project.apply(streams, fn, eps, linear)


class _Collapse(torch.autograd.Function):
    @staticmethod
    def forward(ctx, streams: Tensor, pre: Tensor) -> Tensor:
        ctx.save_for_backward(streams, pre)
        x = wide(streams)
        y = x[:, 0] * pre[:, 0:1]
        for j in range(1, x.shape[1]):
            y.addcmul_(x[:, j], pre[:, j : j + 1])
        return y.to(streams.dtype)

    @staticmethod
    @once_differentiable
    def backward(ctx, grad: Tensor):  # type: ignore[override]
        streams, pre = ctx.saved_tensors
        g = wide(grad)
        grad_pre = torch.bmm(wide(streams), g[..., None])[..., 0]
        return (pre[..., None] * g[:, None]).to(streams.dtype), grad_pre


def hyper_collapse(streams: Tensor, pre: Tensor) -> Tensor:
    """Weighted sum of the streams: `streams [T, n, d]`, `pre [T, n]` float32 -> `[T, d]` in the type of the streams."""
    return _Collapse.apply(streams, pre)


def hyper_in(
    streams: Tensor, fn: Tensor, scale: Tensor, base: Tensor, norm_weight: Tensor, eps_norm: float, iterations: int,
    eps: float, *, invariant: bool = False,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:  # fmt: skip
    """What a sub-layer reads of `streams [T, n, d]`: their weights by `fn [(2 + n) n, n d]`, `scale` and `base` as in
    `hyper_coefficients`, the weighted sum, and its RMSNorm by `norm_weight [d]`.

    Returns x `[T, d]` in the type of the streams, post `[T, n]` and mix `[T, n, n]` float32, and the streams unchanged,
    for `hyper_expand`: the gradient that it sends to them comes through here.
    """
    logits = project(streams, fn, eps_norm, partial(linear, invariant=invariant))
    pre, post, mix = hyper_coefficients(logits, scale, base, iterations, eps)
    return rms_norm(hyper_collapse(streams, pre), norm_weight, eps_norm), post, mix, streams


def hyper_head(
    streams: Tensor, fn: Tensor, scale: Tensor, base: Tensor, norm_weight: Tensor, eps_norm: float, eps: float, *,
    invariant: bool = False,
) -> Tensor:  # fmt: skip
    """The final collapse of `streams [T, n, d]`, normalised: their sum weighted by sigmoid(scale a + base) + eps, with
    the logits a by `fn [n, n d]`, `scale [1]` and `base [n]`, and its RMSNorm by `norm_weight [d]`.

    Returns x `[T, d]` in the type of the streams.
    """
    logits = project(streams, fn, eps_norm, partial(linear, invariant=invariant))
    pre = sigmoid(logits * wide(scale) + wide(base)) + eps
    return rms_norm(hyper_collapse(streams, pre), norm_weight, eps_norm)


class _Expand(torch.autograd.Function):
    @staticmethod
    def forward(ctx, y: Tensor, post: Tensor, mix: Tensor, streams: Tensor) -> Tensor:
        ctx.save_for_backward(y, post, mix, streams)
        x, yw = wide(streams), wide(y)
        out = torch.empty_like(x)
        for k in range(x.shape[1]):
            row = torch.mul(yw, post[:, k : k + 1], out=out[:, k])
            for j in range(x.shape[1]):
                row.addcmul_(x[:, j], mix[:, j, k, None])
        return out.to(streams.dtype)

    @staticmethod
    @once_differentiable
    def backward(ctx, grad: Tensor):  # type: ignore[override]
        y, post, mix, streams = ctx.saved_tensors
        g, x, yw = wide(grad), wide(streams), wide(y)
        grad_post = torch.bmm(g, yw[..., None])[..., 0]
        grad_mix = torch.bmm(x, g.transpose(1, 2))
        grad_y = torch.bmm(post[:, None], g)[:, 0]
        return grad_y.to(y.dtype), grad_post, grad_mix, torch.bmm(mix, g).to(streams.dtype)


def hyper_expand(y: Tensor, post: Tensor, mix: Tensor, streams: Tensor) -> Tensor:
    """Write a sub-layer's output back: `out[t, k] = post[t, k] y[t] + sum_j mix[t, j, k] streams[t, j]`.

    `y [T, d]`, `post [T, n]`, `mix [T, n, n]` (summed over its first stream axis), `streams [T, n, d]` -> `[T, n, d]`.
    """
    return _Expand.apply(y, post, mix, streams)
