"""Muon around its iteration: from gradients and momenta to matrices of norm 1, and from what they became to weights.

Matrices stay where they are, in stacks that a table lists; a program takes a piece of one.
"""

# pyright: basic, reportArgumentType=false, reportOperatorIssue=false, reportAssignmentType=false, reportCallIssue=false
# pyright: reportAttributeAccessIssue=false
# The language of kernels has types of its own.
from __future__ import annotations

from collections.abc import Sequence

import torch
import triton
import triton.language as tl
from torch import Tensor

from undertow.ops.triton.optimizer.masters import TYPES, read_master, weight_address, write_master
from undertow.ops.triton.optimizer.tables import address, stacked
from undertow.ops.triton.optimizer.tiles import tiles

_FLOATS = (torch.bfloat16, torch.float32)


@triton.jit
def _moved(grad, buffer, i, inside, momentum):
    """The buffer with the gradient in it, and the direction: the gradient and the buffer once more."""
    g = tl.load(grad + i, inside, other=0.0).to(tl.float32)
    m = tl.load(buffer + i, inside, other=0.0).to(tl.float32) * momentum + g
    return m, g + momentum * m


@triton.jit
def _matrix(stack, n, size, EACH: tl.constexpr):
    """The `n`-th matrix of a contiguous stack, of which a thread is to take EACH numbers at once."""
    BYTES: tl.constexpr = stack.dtype.element_ty.primitive_bitwidth // 8 * EACH
    return tl.multiple_of(stack + n.to(tl.int64) * size, BYTES if BYTES < 16 else 16)


@triton.jit
def muon_squares(
    table, squares, momentum, size,
    GRAD: tl.constexpr, MOMENT: tl.constexpr, CHUNK: tl.constexpr,
):  # fmt: skip
    """The sum of squares of CHUNK elements of a direction, into `squares [matrices, pieces]`."""
    row = table + tl.program_id(1) * 4
    i = tl.program_id(0) * CHUNK + tl.arange(0, CHUNK)
    EACH: tl.constexpr = 128 // MOMENT.primitive_bitwidth
    grad, buffer = address(row, 0, GRAD, EACH), address(row, 1, MOMENT, EACH)
    _, direction = _moved(grad, buffer, i, i < size, momentum)
    place = tl.program_id(1).to(tl.int64) * tl.num_programs(0) + tl.program_id(0)
    tl.store(squares + place, tl.sum(direction * direction, 0))


@triton.jit
def muon_direction(
    table, norms, out, momentum, size, smallest,
    GRAD: tl.constexpr, MOMENT: tl.constexpr, CHUNK: tl.constexpr,
):  # fmt: skip
    """CHUNK elements of a momentum, updated, and of the direction over its norm, into `out [matrices, size]`."""
    n = tl.program_id(1)
    row = table + n * 4
    i = tl.program_id(0) * CHUNK + tl.arange(0, CHUNK)
    inside = i < size
    EACH: tl.constexpr = 128 // MOMENT.primitive_bitwidth
    grad, buffer = address(row, 0, GRAD, EACH), address(row, 1, MOMENT, EACH)
    m, direction = _moved(grad, buffer, i, inside, momentum)
    norm = tl.load(norms + n)
    norm = tl.where(norm < smallest, smallest, norm)
    tl.store(buffer + i, m.to(MOMENT), inside)
    tl.store(_matrix(out, n, size, EACH) + i, (direction / norm).to(out.dtype.element_ty), inside)


@triton.jit
def muon_update(table, update, decay, rate, size, BEHIND: tl.constexpr, CHUNK: tl.constexpr):
    """CHUNK elements of a matrix of weights: `w decay - rate update`, `update [matrices, size]`."""
    n = tl.program_id(1)
    row = table + n * 4
    i = tl.program_id(0) * CHUNK + tl.arange(0, CHUNK)
    inside = i < size
    EACH: tl.constexpr = 4 if BEHIND is None else 128 // BEHIND.primitive_bitwidth
    weight = weight_address(row, 2, BEHIND, EACH)
    behind = weight if BEHIND is None else address(row, 3, BEHIND, EACH)
    step = tl.load(_matrix(update, n, size, EACH) + i, inside, other=0.0).to(tl.float32)
    master = read_master(weight, behind, i, inside, BEHIND) * decay - rate * step
    write_master(master, weight, behind, i, inside, BEHIND)


class Matrices:
    """Stacks `[n, a, b]` of gradients, momenta, weights and what is behind those (float32 weights, the int16 that they
    lack to them, or None where they are float32 themselves), the same number of each, for one step of Muon."""

    def __init__(
        self, grads: Sequence[Tensor], buffers: Sequence[Tensor], weights: Sequence[Tensor],
        behind: Sequence[Tensor] | None,
    ) -> None:  # fmt: skip
        self._held = grads, buffers, weights, weights if behind is None else behind  # a table has addresses alone
        self._table = stacked(self._held)
        self._shape = torch.Size((len(self._table), *grads[0].shape[1:]))
        self._types = {"GRAD": TYPES[grads[0].dtype], "MOMENT": TYPES[buffers[0].dtype]}
        self._behind = None if behind is None else TYPES[behind[0].dtype]
        self._device = grads[0].device
        self._tile = tiles(self._device, "muon")
        self._size = self._shape[1:].numel()
        self._grid = triton.cdiv(self._size, self._tile["CHUNK"]), len(self._table)

    def directions(self, momentum: float, dtype: torch.dtype, smallest: float) -> Tensor:
        """Update the momenta; `[N, a, b]` in `dtype`, `gradient + momentum x momentum` of each matrix over its norm, or
        over `smallest` where that is less."""
        pieces, count = self._grid
        squares = torch.empty((count, pieces), dtype=torch.float32, device=self._device)
        muon_squares[self._grid](self._table, squares, momentum, self._size, **self._types, **self._tile)
        return self._over(squares.sum(1).sqrt(), momentum, dtype, smallest)

    def moved(self, momentum: float, dtype: torch.dtype) -> Tensor:
        """Update the momenta; `[N, a, b]` in `dtype`, `gradient + momentum x momentum` of each matrix as it is."""
        return self._over(torch.ones(len(self._table), device=self._device), momentum, dtype, 1.0)

    def _over(self, norms: Tensor, momentum: float, dtype: torch.dtype, smallest: float) -> Tensor:
        out = torch.empty(self._shape, dtype=dtype, device=self._device)
        muon_direction[self._grid](
            self._table, norms, out, momentum, self._size, smallest, **self._types, **self._tile
        )  # fmt: skip
        return out

    def update(self, update: Tensor, decay: float, rate: float) -> None:
        """Bring weights to `w decay - rate update`, `update [N, a, b]`."""
        muon_update[self._grid](
            self._table, update.contiguous(), decay, rate, self._size, BEHIND=self._behind, **self._tile
        )


def refusal(grad: Tensor, buffer: Tensor, weight: Tensor, behind: Tensor | None) -> str | None:
    """Why the kernels do not serve stacks like these, or None if they do."""
    types = grad.dtype, buffer.dtype, weight.dtype, None if behind is None else behind.dtype
    wanted = (torch.float32, None), (torch.bfloat16, torch.float32), (torch.bfloat16, torch.int16)
    if types[0] not in _FLOATS or types[1] not in _FLOATS or types[2:] not in wanted:
        return f"a gradient, momentum and weight in {', '.join(map(str, types))}: kernels serve bfloat16 and float32"
    return unfit([weight, grad, buffer, *([] if behind is None else [behind])])


def unfit(stacks: Sequence[Tensor]) -> str | None:
    """Why the kernels do not serve stacks `[n, a, b]` that lie like these, or None if they do."""
    first = stacks[0]
    size = first.shape[1] * first.shape[2]
    if not first.numel() or size > 1 << 30 or size % 8 or len(first) > 65535:
        return f"matrices {list(first.shape)}: kernels serve 1 to 65535 of up to 2^30 numbers, a multiple of 8"
    for stack in stacks:
        step = stack.stride(0) * stack.element_size() if len(stack) > 1 else 0
        if not stack[0].is_contiguous() or stack.data_ptr() % 16 or step % 16:
            return f"matrices {list(stack.shape[1:])} do not lie in one piece each, from multiples of 16 bytes on"
    return None
