"""Quantising to blocks with a scale each, and back, one kernel each way: every number is read and written once.

The definition is `undertow.quant`; codes and scales are the same to the last bit.
"""

# pyright: basic, reportArgumentType=false, reportOperatorIssue=false, reportAssignmentType=false, reportCallIssue=false
# The language of kernels has types of its own.
from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from undertow.ops.triton.mxfp4 import read_mxfp4, write_mxfp4
from undertow.ops.triton.small_floats import (
    ceiling_code,
    decode_e2m1,
    decode_e4m3,
    divide,
    encode_e2m1,
    encode_e4m3,
    power_of_two,
)


@triton.jit
def _load(x, rows, columns, row, column, ROWS: tl.constexpr, GROUPS: tl.constexpr, GROUP: tl.constexpr):
    """Numbers from `row` and `column` of a matrix at `x` on, zero outside of it."""
    down, across = tl.arange(0, ROWS), tl.arange(0, GROUPS * GROUP)
    inside = (row + down < rows)[:, None] & (column + across < columns)[None, :]
    # One wide number says where the tile begins; within it 32 bits suffice.
    first = row.to(tl.int64) * columns + column
    values = tl.load(x + first + (down[:, None] * columns + across[None, :]), inside, other=0.0).to(tl.float32)
    return tl.reshape(values, (ROWS, GROUPS, GROUP))


@triton.jit
def _store(
    codes, values, most, scale, rows, columns, row, column,
    ROWS: tl.constexpr, GROUPS: tl.constexpr, GROUP: tl.constexpr,
    UE8M0: tl.constexpr, FP4: tl.constexpr, HARDWARE: tl.constexpr,
):  # fmt: skip
    """Codes of such numbers under scales whose blocks have magnitudes of at most `most`."""
    if UE8M0:
        scaled = values * power_of_two(tl.where(scale == 255, 0, 254 - scale))[:, :, None]
    else:
        divisor = tl.where(most < 0x7F800000, scale, 1.0)
        scaled = divide(values, tl.broadcast_to(divisor, (ROWS, GROUPS)), ROWS, GROUPS, GROUP)
    # A block with a NaN or an infinity has codes of zero under a scale of NaN.
    scaled = tl.where((most < 0x7F800000)[:, :, None], scaled, 0.0)
    down = tl.arange(0, ROWS)
    first = row.to(tl.int64) * columns + column
    if FP4:
        low, high = tl.split(tl.reshape(encode_e2m1(scaled), (ROWS, GROUPS * GROUP // 2, 2)))
        half = tl.arange(0, GROUPS * GROUP // 2)
        inside = (row + down < rows)[:, None] & (column // 2 + half < columns // 2)[None, :]
        tl.store(codes + first // 2 + (down[:, None] * (columns // 2) + half[None, :]), low | (high << 4), inside)
    else:
        across = tl.arange(0, GROUPS * GROUP)
        inside = (row + down < rows)[:, None] & (column + across < columns)[None, :]
        found = tl.reshape(encode_e4m3(scaled, HARDWARE), (ROWS, GROUPS * GROUP))
        tl.store(codes + first + (down[:, None] * columns + across[None, :]), found, inside)


@triton.jit
def _quantise(
    x, codes, scales, rows, columns, grid_rows, grid_columns, floor, doubled,
    ROWS: tl.constexpr, GROUPS: tl.constexpr, GROUP: tl.constexpr, SQUARE: tl.constexpr,
    UE8M0: tl.constexpr, FP4: tl.constexpr, HARDWARE: tl.constexpr,
):  # fmt: skip
    """A tile of `ROWS` x `GROUPS` * `GROUP` numbers of matrix `program_id(2)`, with a scale for each group of a row, or
    (`SQUARE`) for each group of all rows."""
    matrix = tl.program_id(2).to(tl.int64)
    x += matrix * rows * columns
    codes += matrix * rows * (columns // 2 if FP4 else columns)
    column = tl.program_id(1) * GROUPS * GROUP
    row = tl.program_id(0) * ROWS
    values = _load(x, rows, columns, row, column, ROWS, GROUPS, GROUP)
    # Magnitudes compare as integers, and so a NaN is the largest of its block.
    most = tl.max(values.to(tl.int32, bitcast=True) & 0x7FFFFFFF, 2)
    if SQUARE:
        most = tl.max(most, 0)[None, :]
    most = tl.maximum(most, floor)
    if UE8M0:
        scale = ceiling_code(most, 0x40C00000 if FP4 else 0x43E00000)  # 6 or 448 as bits of float32
    else:
        largest = most.to(tl.float32, bitcast=True)
        scale = tl.maximum(tl.div_rn(largest, tl.full(largest.shape, 448.0, tl.float32)), 1.1754943508222875e-38)
        scale = tl.where(most == 0, 1.0, scale)
    _store(codes, values, most, scale, rows, columns, row, column, ROWS, GROUPS, GROUP, UE8M0, FP4, HARDWARE)
    if UE8M0:
        told = tl.where(scale == 255, 255, scale + doubled).to(tl.uint8)
    else:
        told = tl.where(most < 0x7F800000, scale * (1.0 + doubled), float("nan"))
    group = tl.program_id(1) * GROUPS + tl.arange(0, GROUPS)
    if SQUARE:
        above = (matrix * grid_rows + tl.program_id(0)) * grid_columns
        tl.store(scales + above + group[None, :], told, (group < grid_columns)[None, :])
    else:
        down = row + tl.arange(0, ROWS)
        above = (matrix * rows + down)[:, None] * grid_columns
        tl.store(scales + above + group[None, :], told, (down < rows)[:, None] & (group < grid_columns)[None, :])


@triton.jit
def _dequantise(
    codes, scales, out, rows, columns, grid_rows, grid_columns,
    ROWS: tl.constexpr, GROUPS: tl.constexpr, GROUP: tl.constexpr, SIDE: tl.constexpr,
    UE8M0: tl.constexpr, FP4: tl.constexpr, FNUZ: tl.constexpr, HARDWARE: tl.constexpr,
):  # fmt: skip
    """The reverse of `_quantise`; `SIDE` rows share a scale, 1 or a multiple of `ROWS`."""
    matrix = tl.program_id(2).to(tl.int64)
    row = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    column = tl.program_id(1) * GROUPS * GROUP + tl.arange(0, GROUPS * GROUP)
    inside = (row < rows)[:, None] & (column < columns)[None, :]
    first = (matrix * rows + tl.program_id(0) * ROWS) * columns + tl.program_id(1) * GROUPS * GROUP
    place = tl.arange(0, ROWS)[:, None] * columns + tl.arange(0, GROUPS * GROUP)[None, :]
    if FP4:
        half = tl.arange(0, GROUPS * GROUP // 2)
        here = (row < rows)[:, None] & (tl.program_id(1) * (GROUPS * GROUP // 2) + half < columns // 2)[None, :]
        half_place = tl.arange(0, ROWS)[:, None] * (columns // 2) + half[None, :]
        bytes = tl.load(codes + first // 2 + half_place, here, other=0)
        values = decode_e2m1(tl.join(bytes & 15, bytes >> 4))
    else:
        values = decode_e4m3(tl.load(codes + first + place, inside, other=0), FNUZ, HARDWARE)
    values = tl.reshape(values, (ROWS, GROUPS, GROUP))
    group = tl.program_id(1) * GROUPS + tl.arange(0, GROUPS)
    if SIDE == 1:
        grid_place = (matrix * rows + row)[:, None] * grid_columns + group[None, :]
        told = tl.load(scales + grid_place, (row < rows)[:, None] & (group < grid_columns)[None, :], other=0)
    else:
        grid_row = tl.program_id(0) * ROWS // SIDE
        grid_place = (matrix * grid_rows + grid_row) * grid_columns + group[None, :]
        told = tl.load(scales + grid_place, (group < grid_columns)[None, :], other=0)
    scale = power_of_two(told.to(tl.int32)) if UE8M0 else told
    values = tl.reshape(values * scale[:, :, None], (ROWS, GROUPS * GROUP))
    tl.store(out + first + place, values.to(out.dtype.element_ty), inside)


def refusal(rows: int | None, columns: int | None) -> str | None:
    """Why blocks of so many rows and columns have no kernel here; None if they have."""
    if columns in (32, 64, 128, 256) and rows in (1, columns) and (rows != 256):
        return None
    return f"blocks of {rows}x{columns}: kernels have rows of 32 to 256 numbers and squares of 32 to 128"


def quantise_blocks(
    values: Tensor, rows: int, columns: int, *, fp4: bool = False, ue8m0: bool = True, floor: float = 0.0,
    doubled: bool = False, hardware: bool = False,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    """Codes and scales of `values` `[..., R, C]` in blocks of `rows` x `columns`.

    Codes are uint8 `[..., R, C]` in OCP's E4M3, or (`fp4`) `[..., R, C/2]` with two E2M1 codes each; scales
    `[..., ⌈R/rows⌉, ⌈C/columns⌉]` are UE8M0 codes in uint8, or float32, `doubled` for a reader in FNUZ. `hardware`: the
    chip converts to OCP's E4M3 itself. What `undertow.quant` calls with arguments that it has checked.
    """
    if fp4 and values.dtype is torch.bfloat16:
        return write_mxfp4(values, floor)
    values = values.contiguous()
    *lead, high, wide = values.shape
    codes = values.new_empty((*lead, high, wide // 2 if fp4 else wide), dtype=torch.uint8)
    down, across = -(-high // rows), -(-wide // columns)
    scales = values.new_empty((*lead, down, across), dtype=torch.uint8 if ue8m0 else torch.float32)
    matrices = 1 if rows == 1 else values[..., 0, 0].numel()
    if rows == 1:
        high, down = (values.numel() // wide if wide else 0,) * 2
    if not values.numel():
        return codes, scales
    # Of the tiles that were tried these move most bytes a second on an H200.
    if rows == 1:
        groups = min(triton.next_power_of_2(across), 1024 // columns)
        tall, warps = 1024 // (groups * columns), 2
    else:
        # A tile of 128 x 128 spills a few registers on sm_90 with 4 warps, and is yet faster than with 8.
        tall, groups, warps = rows, max(1, 256 // rows) if rows < 128 else 1, 4
    least = torch.tensor(floor, dtype=torch.float32).view(torch.int32).item()
    _quantise[(-(-high // tall), -(-across // groups), matrices)](
        values, codes, scales, high, wide, down, across, least, int(doubled), ROWS=tall,
        GROUPS=groups, GROUP=columns, SQUARE=rows > 1, UE8M0=ue8m0, FP4=fp4, HARDWARE=hardware, num_warps=warps,
    )  # fmt: skip
    return codes, scales


def dequantise_blocks(
    codes: Tensor, scales: Tensor, rows: int, columns: int, dtype: torch.dtype, *, fp4: bool = False,
    fnuz: bool = False, hardware: bool = False,
) -> Tensor:  # fmt: skip
    """The numbers of codes `[..., R, C]` (or `[..., R, C/2]` of FP4) under scales, uint8 for UE8M0 or float32."""
    if fp4 and dtype is torch.bfloat16:
        return read_mxfp4(codes, scales)
    codes, scales = codes.contiguous(), scales.contiguous()
    *lead, high, wide = codes.shape
    wide *= 2 if fp4 else 1
    out = codes.new_empty((*lead, high, wide), dtype=dtype)
    if not out.numel():
        return out
    matrices, down, across = (1 if rows == 1 else out[..., 0, 0].numel()), -(-high // rows), -(-wide // columns)
    if rows == 1:
        high = down = out.numel() // wide
    width = 4096 if rows == 1 else 512
    groups = min(triton.next_power_of_2(across), width // columns)
    tall = 4096 // (groups * columns) if rows == 1 else 8
    _dequantise[(-(-high // tall), -(-across // groups), matrices)](
        codes, scales, out, high, wide, down, across, ROWS=tall, GROUPS=groups, GROUP=columns, SIDE=rows,
        UE8M0=scales.dtype is torch.uint8, FP4=fp4, FNUZ=fnuz, HARDWARE=hardware, num_warps=4,
    )  # fmt: skip
    return out
