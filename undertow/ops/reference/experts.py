"""Routed experts on ragged batches: permute tokens to experts, one product per expert, clamped SwiGLU, and back."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from undertow.ops.reference.linear import TILE, tiled_product
from undertow.ops.reference.precision import sigmoid, wide


@dataclass(frozen=True)
class Dispatch:
    """Order of a permuted batch of `T` tokens with `k` choices each.

    `choice [T k]` is the flat choice (token `choice // k`) in each slot, `slot [T k]` its inverse, `counts [E]` rows
    per expert: whole numbers, all on the device of the choices, so that no host waits for them.
    """

    choice: Tensor
    slot: Tensor
    counts: Tensor
    k: int


def dispatch_order(indices: Tensor, experts: int) -> Dispatch:
    """Slots sorted by expert, by token within an expert, for choices `indices [T, k]`."""
    flat = indices.flatten()
    choice = torch.argsort(flat, stable=True)
    slot = torch.empty_like(choice)
    slot[choice] = torch.arange(len(choice), device=choice.device)
    return Dispatch(choice, slot, tally(flat, experts), indices.shape[1])


def tally(numbers: Tensor, kinds: int) -> Tensor:
    """How often each of `0 .. kinds - 1` stands among `numbers [N]`: `[kinds]` int64. As `bincount`, which makes the
    host wait for a GPU."""
    ones = torch.ones_like(numbers, dtype=torch.int64)
    return torch.zeros(kinds, dtype=torch.int64, device=numbers.device).index_add(0, numbers, ones)


def _slot_sum(rows: Tensor, slot: Tensor, k: int) -> Tensor:
    picked = rows[slot].view(-1, k, rows.shape[-1])
    total = wide(picked[:, 0]).clone()
    for i in range(1, k):
        total += picked[:, i]
    return total


class _Permute(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x: Tensor, order: Dispatch) -> Tensor:
        ctx.order = order
        return x[order.choice // order.k]

    @staticmethod
    @once_differentiable
    def backward(ctx, grad: Tensor):  # type: ignore[override]
        return _slot_sum(grad, ctx.order.slot, ctx.order.k).to(grad.dtype), None


class _Unpermute(torch.autograd.Function):
    @staticmethod
    def forward(ctx, rows: Tensor, order: Dispatch) -> Tensor:
        ctx.order, ctx.dtype = order, rows.dtype
        return _slot_sum(rows, order.slot, order.k)

    @staticmethod
    @once_differentiable
    def backward(ctx, grad: Tensor):  # type: ignore[override]
        return grad.to(ctx.dtype)[ctx.order.choice // ctx.order.k], None


def permute(x: Tensor, order: Dispatch) -> Tensor:
    """Rows of `x [T, d]` in expert order, each token once per choice -> `[T k, d]`."""
    return _Permute.apply(x, order)


def unpermute(rows: Tensor, order: Dispatch) -> Tensor:
    """Sum of each token's `k` rows in the order of its choices: `[T k, d]` -> `[T, d]` float32."""
    return _Unpermute.apply(rows, order)


def permute_weights(weights: Tensor, order: Dispatch) -> Tensor:
    """The weight of the choice in each slot: `[T, k]` -> `[T k]`."""
    return weights.flatten()[order.choice]


def _tile_height(rows: int, experts: int) -> int:
    """Rows of one product outside the batch-invariant mode: a power of two near a quarter of an expert's mean share.

    It follows from the size of the call alone. Were it an expert's own count, a token's last bits would depend on what
    later tokens choose, and no logit would be strictly causal.
    """
    return min(512, max(8, 1 << (rows // (4 * experts)).bit_length() >> 1))


class _GroupedLinear(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x: Tensor, weight: Tensor, counts: Tensor, invariant: bool) -> Tensor:
        ctx.save_for_backward(x, weight)
        ctx.counts = counts.tolist()
        tile = TILE if invariant else _tile_height(len(x), len(weight))
        split = enumerate(x.split(ctx.counts))
        parts = [tiled_product(rows, weight[expert], tile) for expert, rows in split if len(rows)]
        return torch.cat(parts) if parts else x.new_empty(0, weight.shape[1])

    @staticmethod
    @once_differentiable
    def backward(ctx, grad: Tensor):  # type: ignore[override]
        x, weight = ctx.saved_tensors
        grad_x, grad_weight = torch.empty_like(x), torch.zeros_like(weight)
        parts = zip(x.split(ctx.counts), grad.split(ctx.counts), grad_x.split(ctx.counts), strict=True)
        for expert, (rows, g, result) in enumerate(parts):
            if len(rows):
                torch.mm(g, weight[expert], out=result)
                torch.mm(g.t(), rows, out=grad_weight[expert])
        return grad_x, grad_weight, None, None


def grouped_linear(x: Tensor, weight: Tensor, counts: Tensor, *, invariant: bool = False) -> Tensor:
    """Per-expert product: rows of `x [N, K]`, `counts[e]` of them for expert `e`, times `weight [E, O, K]` -> `[N,
    O]`. `counts [E]` are whole numbers on the device of `x`."""
    return _GroupedLinear.apply(x, weight, counts, invariant)


class _SwiGLU(torch.autograd.Function):
    @staticmethod
    def forward(ctx, gate: Tensor, up: Tensor | None, limit: float, weight: Tensor | None) -> Tensor:
        ctx.save_for_backward(gate, up, weight)
        ctx.limit = limit
        gates, ups = gate.chunk(2, dim=-1) if up is None else (gate, up)
        g = wide(gates).clamp(max=limit)
        h = g.mul_(sigmoid(g)).mul_(wide(ups).clamp(-limit, limit))
        return (h if weight is None else h.mul_(weight[:, None])).to(gate.dtype)

    @staticmethod
    @once_differentiable
    def backward(ctx, grad: Tensor):  # type: ignore[override]
        gate, up, weight = ctx.saved_tensors
        limit, d = ctx.limit, wide(grad)
        gates, ups = gate.chunk(2, dim=-1) if up is None else (gate, up)
        g, u = wide(gates), wide(ups)
        inside_g, inside_u = g <= limit, u.abs() <= limit
        g, u = g.clamp(max=limit), u.clamp(-limit, limit)
        s = sigmoid(g)
        silu = g * s
        grad_weight = None
        if weight is not None:
            grad_weight = (d * silu * u).sum(-1).to(weight.dtype)
            d = d * weight[:, None]
        grad_gate = (d * u * (s + silu * (1.0 - s))).mul_(inside_g).to(gate.dtype)
        grad_up = (d * silu).mul_(inside_u).to(gate.dtype if up is None else up.dtype)
        if up is None:
            return torch.cat((grad_gate, grad_up), dim=-1), None, None, grad_weight
        return grad_gate, grad_up, None, grad_weight


def swiglu(gate: Tensor, up: Tensor | None, limit: float, weight: Tensor | None = None) -> Tensor:
    """Clamped SwiGLU in float32: `silu(min(gate, limit)) * clamp(up, -limit, limit)`, times `weight [N]` per row if
    given.

    `gate`, `up [N, I]` -> `[N, I]` in their type; without `up`, `gate [N, 2 I]` holds both side by side. Gradients are
    zero outside the bounds (model card 6).
    """
    return _SwiGLU.apply(gate, up, limit, weight)
