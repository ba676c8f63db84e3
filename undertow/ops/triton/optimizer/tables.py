"""Many tensors in few launches: a table of their addresses, and programs for pieces of each."""

# pyright: basic, reportArgumentType=false, reportOperatorIssue=false, reportAssignmentType=false, reportCallIssue=false
# pyright: reportAttributeAccessIssue=false
# The language of kernels has types of its own.
from __future__ import annotations

from collections.abc import Sequence
from itertools import groupby
from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

_BYTES = 16
"""What each address is a multiple of, so that a thread reads so many bytes at once."""


class Launch(NamedTuple):
    """Rows of a table for one launch: the number of elements, then addresses; and `grid`, pieces x tensors."""

    table: Tensor
    grid: tuple[int, int]


def refusal(tensors: Sequence[Tensor]) -> str | None:
    """Why a kernel cannot go through these tensors, or None if it can."""
    for tensor in tensors:
        if not tensor.is_contiguous():
            return f"a tensor {list(tensor.shape)} is not contiguous"
        if tensor.data_ptr() % _BYTES:
            return f"a tensor {list(tensor.shape)} is not at a multiple of {_BYTES} bytes"
    return None


def launches(items: Sequence[Sequence[Tensor]], chunk: int) -> list[Launch]:
    """Launches of programs that take `chunk` elements each, for items of tensors that have one size and device.

    Sizes of the items of one launch differ by less than a factor of two, so that no more than half of its programs have
    nothing to do. The table goes to the GPU without a wait.
    """

    def pieces(item: Sequence[Tensor]) -> int:
        return triton.next_power_of_2(triton.cdiv(item[0].numel(), chunk))

    order = sorted((item for item in items if item[0].numel()), key=pieces)
    if not order:
        return []
    rows = [[item[0].numel(), *(tensor.data_ptr() for tensor in item)] for item in order]
    device, table = order[0][0].device, torch.tensor(rows, dtype=torch.int64)
    if device.type == "cuda":
        table = table.pin_memory().to(device, non_blocking=True)
    found, first = [], 0
    for _, group in groupby(order, pieces):
        sizes = [item[0].numel() for item in group]
        found.append(Launch(table[first : first + len(sizes)], (triton.cdiv(max(sizes), chunk), len(sizes))))
        first += len(sizes)
    return found


def stacked(columns: Sequence[Sequence[Tensor]]) -> Tensor:
    """A table of the matrices in stacks `[n, a, b]`, a row for each; a column for each list of stacks, which differ in
    `n` alone, and their matrices in nothing but their place."""

    def addresses(stack: Tensor) -> list[int]:
        step = stack.stride(0) * stack.element_size()
        return [stack.data_ptr() + i * step for i in range(len(stack))]

    columns_of = [[place for stack in stacks for place in addresses(stack)] for stacks in columns]
    table = torch.tensor(list(zip(*columns_of, strict=True)), dtype=torch.int64)
    device = columns[0][0].device
    return table.pin_memory().to(device, non_blocking=True) if device.type == "cuda" else table


@triton.jit
def address(row, column, TYPE: tl.constexpr, EACH: tl.constexpr):
    """The pointer to numbers of TYPE in a column of a table's row, of which a thread is to take EACH at once."""
    BYTES: tl.constexpr = TYPE.primitive_bitwidth // 8 * EACH
    return tl.multiple_of(tl.load(row + column).to(tl.pointer_type(TYPE)), BYTES if BYTES < 16 else 16)
