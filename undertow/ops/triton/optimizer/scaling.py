"""Tensors times a number that lies on the GPU: nothing is read or written where it is 1."""

# pyright: basic, reportArgumentType=false, reportOperatorIssue=false, reportAssignmentType=false, reportCallIssue=false
# The language of kernels has types of its own.
from __future__ import annotations

from collections.abc import Sequence

import torch
import triton
import triton.language as tl
from torch import Tensor

from undertow.ops.triton.optimizer import tables
from undertow.ops.triton.optimizer.tables import address, launches
from undertow.ops.triton.optimizer.tiles import tiles

_TYPES = {torch.bfloat16: tl.bfloat16, torch.float32: tl.float32}


@triton.jit
def scale_tensors(table, factor, TYPE: tl.constexpr, CHUNK: tl.constexpr):
    """CHUNK elements of the tensor in one row of the table."""
    by = tl.load(factor)
    if by != 1.0:
        row = table + tl.program_id(1) * 2
        size = tl.load(row)
        x = address(row, 1, TYPE, 8)
        start = tl.program_id(0).to(tl.int64) * CHUNK
        i = start + tl.arange(0, CHUNK)
        if start + CHUNK <= size:  # apart, since without a mask a thread reads 16 bytes at once
            tl.store(x + i, (tl.load(x + i).to(tl.float32) * by).to(TYPE))
        elif start < size:
            tl.store(x + i, (tl.load(x + i, i < size, other=0.0).to(tl.float32) * by).to(TYPE), i < size)


def refusal(tensors: Sequence[Tensor]) -> str | None:
    """Why the kernel does not serve these tensors, or None if it does."""
    for tensor in tensors:
        if tensor.dtype not in _TYPES:
            return f"a tensor in {tensor.dtype}: the kernel serves bfloat16 and float32"
    return tables.refusal(tensors)


def scale(tensors: Sequence[Tensor], factor: Tensor) -> None:
    """Multiply tensors of one device in place by `factor`, a float32 scalar there, in float32."""
    for dtype, name in _TYPES.items():
        alike = [(tensor,) for tensor in tensors if tensor.dtype == dtype]
        if alike:
            tile = tiles(factor.device, "scale")
            for table, grid in launches(alike, tile["CHUNK"]):
                scale_tensors[grid](table, factor, TYPE=name, **tile)
