"""Compressor pooling (model card 3.1): a softmax per channel over the slots of a window, as a running (max, sum, sum).

A window's state is its running maximum, weight sum and weighted sum, so a long window may stay open between calls at
the cost of three rows. `invariant` adds slots one by one in order: whole, chunked and token-by-token give the same
bits.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable


class Running(NamedTuple):
    """Open softmax of each window and channel, each `[G, c]` float32: maximum, sum of weights, weighted sum of
    values."""

    top: Tensor
    weight: Tensor
    value: Tensor

    @staticmethod
    def empty(windows: int, channels: int, like: Tensor) -> Running:
        """State of windows that no slot has entered."""
        top = torch.full((windows, channels), -torch.inf, dtype=like.dtype, device=like.device)
        return Running(top, torch.zeros_like(top), torch.zeros_like(top))


def _decay(old: Tensor, new: Tensor) -> Tensor:
    return torch.exp(old - new).masked_fill_(torch.isneginf(old), 0.0)


def _in_order(u: Tensor, v: Tensor, held: Tensor, state: Running) -> Running:
    top, weight, value = state
    for j in range(u.shape[1]):
        here = held[:, j, None]
        new = torch.maximum(top, v[:, j])
        keep, add = _decay(top, new), torch.exp(v[:, j] - new)
        weight = torch.where(here, weight * keep + add, weight)
        value = torch.where(here, value * keep + add * u[:, j], value)
        top = torch.where(here, new, top)
    return Running(top, weight, value)


def _at_once(u: Tensor, v: Tensor, held: Tensor, state: Running) -> Running:
    u = u.masked_fill(~held[..., None], 0.0)
    v = v.masked_fill(~held[..., None], -torch.inf)
    top = torch.maximum(v.amax(1), state.top)
    share = _decay(v, top[:, None])
    keep = _decay(state.top, top)
    return Running(top, share.sum(1) + state.weight * keep, (share * u).sum(1) + state.value * keep)


class _Pool(torch.autograd.Function):
    @staticmethod
    def forward(ctx, u: Tensor, v: Tensor, ape: Tensor, slots: Tensor, state: Running, invariant: bool):
        held = slots >= 0
        rows = slots.clamp(min=0)
        su, sv = u[rows], v[rows] + ape
        run = (_in_order if invariant else _at_once)(su, sv, held, state)
        entry = run.value / run.weight
        ctx.save_for_backward(u, v, ape, slots, run.top + torch.log(run.weight), entry)
        ctx.mark_non_differentiable(*run)
        return entry, *run

    @staticmethod
    @once_differentiable
    def backward(ctx, grad: Tensor, *_: Tensor):  # type: ignore[override]
        u, v, ape, slots, lse, entry = ctx.saved_tensors
        held = (slots >= 0)[..., None]
        rows = slots.clamp(min=0)
        share = torch.exp(v[rows] + ape - lse[:, None]).masked_fill_(~held, 0.0)
        su = share * grad[:, None]
        sv = su * (u[rows] - entry[:, None])
        flat = rows.flatten()
        grad_u = torch.zeros_like(u).index_add_(0, flat, su.masked_fill_(~held, 0.0).flatten(0, 1))
        grad_v = torch.zeros_like(v).index_add_(0, flat, sv.masked_fill_(~held, 0.0).flatten(0, 1))
        return grad_u, grad_v, sv.sum(0), None, None, None


def compress_pool(
    u: Tensor, v: Tensor, ape: Tensor, slots: Tensor, state: Running | None = None, *, invariant: bool = False
) -> tuple[Tensor, Running]:
    """Pool windows: entry `[g] = sum_j softmax_j(v[slots[g, j]] + ape[j]) * u[slots[g, j]]`, channel by channel.

    `u`, `v [R, c]` float32 values and gates, `ape [J, c]`, `slots [G, J]` rows or -1 for an absent slot (weight exactly
    0), `state` what earlier calls put into each window. Returns the entries `[G, c]` and the state after this call;
    only entries of complete windows mean anything, and no gradient flows through the state.
    """
    if state is None:
        state = Running.empty(len(slots), u.shape[1], u)
    entry, *run = _Pool.apply(u, v, ape, slots, state, invariant)
    return entry, Running(*run)
