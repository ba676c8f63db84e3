"""A sub-layer's output written back to the streams, and its gradients: a pass over the streams each.

The definition is `undertow.ops.reference.hyper.hyper_expand`.
"""

# pyright: basic, reportArgumentType=false, reportOperatorIssue=false, reportAssignmentType=false, reportCallIssue=false
# pyright: reportGeneralTypeIssues=false, reportIndexIssue=false, reportAttributeAccessIssue=false
# The language of kernels has types of its own.
from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor
from torch.autograd.function import once_differentiable

from undertow.ops.triton.hyper.rows import by_eights, nothing, streams_at, widened
from undertow.ops.triton.hyper.tiles import STREAMS, by_tokens, tiles


@triton.jit
def hyper_expand_forward(
    y, post, mix, x, out, stride, stride_stream, D: tl.constexpr, N: tl.constexpr, BD: tl.constexpr
):
    """One token, BD columns of all streams."""
    blocks: tl.constexpr = (D + BD - 1) // BD
    t = (tl.program_id(0) // blocks).to(tl.int64)
    c = tl.program_id(0) % blocks * BD + tl.arange(0, BD)
    here = c < D
    xs = streams_at(x + t * stride, stride_stream, c, here, N)
    new = tl.load(y + t * D + c, here, other=0.0).to(tl.float32)
    xs = widened(xs, N)
    for k in tl.static_range(N):
        total = tl.load(post + t * N + k) * new
        for j in tl.static_range(N):
            total += tl.load(mix + t * (N * N) + j * N + k) * xs[j]
        tl.store(out + t * (N * D) + k * D + c, total.to(out.dtype.element_ty), here)


@triton.jit
def hyper_expand_backward(
    grad, y, post, mix, x, grad_y, grad_post, grad_mix, grad_x, stride, stride_stream,
    D: tl.constexpr, N: tl.constexpr, BD: tl.constexpr,
):  # fmt: skip
    """One token: gradients of y and of the streams, and the sums over its row that those of post and mix are."""
    t = tl.program_id(0).to(tl.int64)
    along_y = nothing(N, BD // 8)
    along_x = nothing(N * N, BD // 8)
    for first in tl.range(0, D, BD, num_stages=1):
        c = first + tl.arange(0, BD)
        here = c < D
        gs = streams_at(grad + t * (N * D), D, c, here, N)
        xs = streams_at(x + t * stride, stride_stream, c, here, N)
        new = tl.load(y + t * D + c, here, other=0.0).to(tl.float32)
        gs = widened(gs, N)
        xs = widened(xs, N)
        by_y = tl.zeros((BD,), tl.float32)
        sums = ()
        for k in tl.static_range(N):
            by_y += tl.load(post + t * N + k) * gs[k]
            sums += (along_y[k] + by_eights(gs[k] * new, BD),)
        along_y = sums
        tl.store(grad_y + t * D + c, by_y.to(grad_y.dtype.element_ty), here)
        sums = ()
        for j in tl.static_range(N):
            by_x = tl.zeros((BD,), tl.float32)
            for k in tl.static_range(N):
                by_x += tl.load(mix + t * (N * N) + j * N + k) * gs[k]
                sums += (along_x[j * N + k] + by_eights(gs[k] * xs[j], BD),)
            tl.store(grad_x + t * (N * D) + j * D + c, by_x.to(grad_x.dtype.element_ty), here)
        along_x = sums
    for k in tl.static_range(N):
        tl.store(grad_post + t * N + k, tl.sum(along_y[k], 0))
    for i in tl.static_range(N * N):
        tl.store(grad_mix + t * (N * N) + i, tl.sum(along_x[i], 0))


def refusal(y: Tensor, post: Tensor, mix: Tensor, streams: Tensor) -> str | None:
    """Why the kernels do not serve such a call of `hyper_expand`, or None if they do."""
    if streams.dtype not in (torch.bfloat16, torch.float32) or y.dtype != streams.dtype:
        told = " and ".join(str(x.dtype).removeprefix("torch.") for x in (y, streams))
        return f"the kernels take an output and streams of bfloat16 or both of float32, not {told}"
    if post.dtype != torch.float32 or mix.dtype != torch.float32:
        told = " and ".join(str(x.dtype).removeprefix("torch.") for x in (post, mix))
        return f"the kernels take coefficients of float32, not {told}"
    if streams.shape[1] not in STREAMS:
        return f"the kernels take 2 or 4 streams, not {streams.shape[1]}"
    return None


class _Expand(torch.autograd.Function):
    @staticmethod
    def forward(ctx, y: Tensor, post: Tensor, mix: Tensor, streams: Tensor) -> Tensor:
        ctx.save_for_backward(y, post, mix, streams)
        tokens, count, width = streams.shape
        out = torch.empty((tokens, count, width), dtype=streams.dtype, device=streams.device)
        if out.numel():
            tile = tiles(streams.device, "expand")
            hyper_expand_forward[tokens * triton.cdiv(width, tile["BD"]),](
                y, post, mix, streams, out, *streams.stride()[:2], D=width, N=count, **tile
            )
        return out

    @staticmethod
    @once_differentiable
    def backward(ctx, grad: Tensor):  # type: ignore[override]
        y, post, mix, streams = ctx.saved_tensors
        tokens, count, width = streams.shape
        grads = [torch.empty(x.shape, dtype=x.dtype, device=x.device) for x in (y, post, mix, streams)]
        if tokens:
            hyper_expand_backward[(tokens,)](
                grad.contiguous(), y, post, mix, streams, *grads, *streams.stride()[:2],
                D=width, N=count, **tiles(streams.device, "expand back"),
            )  # fmt: skip
        return tuple(grads)


def hyper_expand(y: Tensor, post: Tensor, mix: Tensor, streams: Tensor) -> Tensor:
    """Write a sub-layer's output back: `out[t, k] = post[t, k] y[t] + sum_j mix[t, j, k] streams[t, j]`.

    `y [T, d]` and `streams [T, n, d]` bfloat16 or float32, `post [T, n]`, `mix [T, n, n]` float32 -> `[T, n, d]`.
    """
    return _Expand.apply(y.contiguous(), post.contiguous(), mix.contiguous(), by_tokens(streams))
