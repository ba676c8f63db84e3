"""Rows to the slots of their token's choices, and the sum of a token's rows, a token at a time.

Either way a token's row is read or written once, and its choices are taken in their order.
"""

# pyright: basic, reportArgumentType=false, reportOperatorIssue=false, reportAssignmentType=false, reportCallIssue=false
# pyright: reportGeneralTypeIssues=false
# The language of kernels has types of its own.
from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from undertow.ops.reference.experts import Dispatch
from undertow.ops.triton.permute.tiles import tiles

TYPES = (torch.bfloat16, torch.float32)


def refused_type(x: Tensor, name: str = "rows") -> str | None:
    """Why a tensor of this type is not served, or None if it is."""
    if x.dtype in TYPES:
        return None
    return f"{name} are {str(x.dtype).removeprefix('torch.')}, neither bfloat16 nor float32"


@triton.jit
def spread_rows(x, slot, out, width, BLOCKS: tl.constexpr, K: tl.constexpr, COLUMNS: tl.constexpr):
    """COLUMNS of one token's row, written to the slots of its K choices."""
    token = (tl.program_id(0) // BLOCKS).to(tl.int64)
    c = tl.program_id(0) % BLOCKS * COLUMNS + tl.arange(0, COLUMNS)
    row = tl.load(x + token * width + c, c < width, other=0.0).to(out.dtype.element_ty)
    for i in tl.static_range(K):
        place = tl.load(slot + token * K + i).to(tl.int64)
        tl.store(out + place * width + c, row, c < width)


@triton.jit
def sum_rows(rows, slot, out, width, BLOCKS: tl.constexpr, K: tl.constexpr, COLUMNS: tl.constexpr):
    """COLUMNS of one token's sum over the rows in the slots of its K choices, in float32, in their order."""
    token = (tl.program_id(0) // BLOCKS).to(tl.int64)
    c = tl.program_id(0) % BLOCKS * COLUMNS + tl.arange(0, COLUMNS)
    acc = tl.zeros((COLUMNS,), tl.float32)
    for i in tl.static_range(K):
        place = tl.load(slot + token * K + i).to(tl.int64)
        acc += tl.load(rows + place * width + c, c < width, other=0.0).to(tl.float32)
    tl.store(out + token * width + c, acc.to(out.dtype.element_ty), c < width)


def spread(x: Tensor, order: Dispatch, dtype: torch.dtype) -> Tensor:
    """Rows of `x [T, d]` in expert order, each token once per choice -> `[T k, d]` of `dtype`."""
    out = torch.empty((len(x) * order.k, x.shape[1]), dtype=dtype, device=x.device)
    if out.numel():
        tile = tiles(x.device, "spread")
        blocks = triton.cdiv(x.shape[1], tile["COLUMNS"])
        spread_rows[(len(x) * blocks,)](x.contiguous(), order.slot, out, x.shape[1], BLOCKS=blocks, K=order.k, **tile)
    return out


def summed(rows: Tensor, order: Dispatch, dtype: torch.dtype) -> Tensor:
    """Sum of each token's rows in the order of its choices: `[T k, d]` -> `[T, d]` of `dtype`."""
    out = torch.empty((len(rows) // order.k, rows.shape[1]), dtype=dtype, device=rows.device)
    if out.numel():
        tile = tiles(rows.device, "sum")
        blocks = triton.cdiv(rows.shape[1], tile["COLUMNS"])
        sum_rows[(len(out) * blocks,)](
            rows.contiguous(), order.slot, out, rows.shape[1], BLOCKS=blocks, K=order.k, **tile
        )
    return out
