"""Compressor pooling in Triton; the definition is `undertow.ops.reference.compress`."""

# pyright: basic, reportArgumentType=false
# Sizes that a kernel is compiled for are of a type of their own.
from __future__ import annotations

import torch
import triton
from torch import Tensor
from torch.autograd.function import once_differentiable

from undertow.ops.reference.compress import Running
from undertow.ops.triton.compress.tiles import tiles
from undertow.ops.triton.compress.windows import pool_other_rows, pool_slopes, pool_windows, sum_parts

SLOTS = 256
"""Most slots of a window: a program holds them all."""

_SCANNED = 1024
"""Slots looked at together for a row that is in several windows."""


def refusal(
    u: Tensor, v: Tensor, ape: Tensor, slots: Tensor, state: Running | None = None, *, invariant: bool = False
) -> str | None:
    """Why the kernels cannot serve a call with these operands, or None if they can."""
    if invariant:
        return "the kernels sum slots in another order than one by one, and batch_invariant is on"
    if state is not None:
        return "windows continue those of an earlier call"
    for name, x in (("values", u), ("gates", v), ("positions", ape)):
        if x.dtype != torch.float32:
            return f"{name} are {str(x.dtype).removeprefix('torch.')}, not float32"
    if slots.dtype != torch.int64:
        return f"slots are {str(slots.dtype).removeprefix('torch.')}, not int64"
    if not 1 <= slots.shape[1] <= SLOTS:
        return f"windows of {slots.shape[1]} slots, not 1 to {SLOTS}"
    return "there are no channels" if u.shape[1] == 0 else None


def _sides(slots: int, channels: int, elements: int) -> dict[str, int]:
    """Slots and channels that a program holds, powers of two."""
    held = triton.next_power_of_2(slots)
    return {"BJ": held, "BC": min(triton.next_power_of_2(channels), max(elements // held, 16))}


class _Pool(torch.autograd.Function):
    @staticmethod
    def forward(ctx, u: Tensor, v: Tensor, ape: Tensor, slots: Tensor, learns: bool):
        (windows, wide), channels = slots.shape, u.shape[1]
        entry, top, weight, value = (torch.empty((windows, channels), dtype=u.dtype, device=u.device) for _ in range(4))
        lse = torch.empty_like(entry) if learns else None
        counts = torch.zeros(len(u) if learns else 0, dtype=torch.int32, device=u.device)
        tile = tiles(u.device, "forward")
        sides = _sides(wide, channels, tile.pop("ELEMENTS"))
        if windows:
            pool_windows[windows, triton.cdiv(channels, sides["BC"])](
                u, v, ape, slots, entry, lse, top, weight, value, counts, channels, wide, LEARNS=learns, **sides, **tile
            )
        ctx.save_for_backward(u, v, ape, slots, lse, entry, counts)
        ctx.mark_non_differentiable(top, weight, value)
        return entry, top, weight, value

    @staticmethod
    @once_differentiable
    def backward(ctx, grad: Tensor, *_: Tensor):  # type: ignore[override]
        u, v, ape, slots, lse, entry, counts = ctx.saved_tensors
        grad_u, grad_v, grad_ape = _gradients(u, v, ape, slots, lse, entry, counts, grad.contiguous())
        return grad_u, grad_v, grad_ape, None, None


def _gradients(
    u: Tensor, v: Tensor, ape: Tensor, slots: Tensor, lse: Tensor, entry: Tensor, counts: Tensor, grad: Tensor
) -> tuple[Tensor, Tensor, Tensor]:
    (windows, wide), (rows, channels) = slots.shape, u.shape

    def empty(*shape: int) -> Tensor:
        return torch.empty(shape, dtype=torch.float32, device=u.device)

    grad_u, grad_v, grad_ape = empty(rows, channels), empty(rows, channels), empty(wide, channels)
    known = u, v, ape, slots, lse, entry, grad, counts, grad_u, grad_v
    tile = tiles(u.device, "backward")
    sides = _sides(wide, channels, tile.pop("ELEMENTS"))
    across = triton.cdiv(channels, sides["BC"])
    each = max(triton.cdiv(windows, tile.pop("PROGRAMS")), 1)
    parts = empty(triton.cdiv(windows, each), wide, channels)
    if windows:
        pool_slopes[len(parts), across](*known, parts, windows, channels, wide, each, **sides, **tile)
    tile = tiles(u.device, "rows")
    if rows:
        pool_other_rows[triton.cdiv(rows, tile["BR"]), triton.cdiv(channels, tile["BC"])](
            *known, rows, slots.numel(), channels, wide, BS=_SCANNED, **tile
        )
    tile = tiles(u.device, "sum")
    sum_parts[(triton.cdiv(ape.numel(), tile["BLOCK"]),)](parts, grad_ape, len(parts), ape.numel(), **tile)
    return grad_u, grad_v, grad_ape


def compress_pool(
    u: Tensor, v: Tensor, ape: Tensor, slots: Tensor, state: Running | None = None, *, invariant: bool = False
) -> tuple[Tensor, Running]:
    """Entries `[G, c]` of windows, and their running softmax: as `undertow.ops.reference.compress.compress_pool`.

    `u`, `v [R, c]`, `ape [J, c]` float32, `slots [G, J]` int64, -1 for an absent slot; `state` and `invariant` must be
    absent, see `refusal`. A window without slots has an entry of NaN and no gradient.
    """
    learns = torch.is_grad_enabled() and any(x.requires_grad for x in (u, v, ape))
    entry, *run = _Pool.apply(u.contiguous(), v.contiguous(), ape.contiguous(), slots.contiguous(), learns)
    return entry, Running(*run)
