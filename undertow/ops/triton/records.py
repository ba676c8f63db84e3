"""Cache entries to records of bytes and back, one kernel each way; the definition is `undertow.quant.records`."""

# pyright: basic, reportArgumentType=false, reportOperatorIssue=false, reportAssignmentType=false, reportCallIssue=false
# The language of kernels has types of its own.
from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from undertow.ops.triton.small_floats import ceiling_code, decode_e4m3, encode_e4m3, power_of_two

_WRITTEN, _READ = {"ROWS": 16, "num_warps": 2}, {"ROWS": 4, "num_warps": 4}


@triton.jit
def _write(
    entries, stride, records, turned, count, floor, SIZE: tl.constexpr,
    PLAIN: tl.constexpr, ROTATED: tl.constexpr, GROUPS: tl.constexpr, TURNED: tl.constexpr, ROWS: tl.constexpr,
    HARDWARE: tl.constexpr,
):  # fmt: skip
    """`turned` is `records` seen as bfloat16. `GROUPS` x 64 covers `PLAIN`, `TURNED` covers `ROTATED`."""
    row = tl.program_id(0).to(tl.int64) * ROWS + tl.arange(0, ROWS)
    column = tl.arange(0, GROUPS * 64)
    inside = (row < count)[:, None] & (column < PLAIN)[None, :]
    values = tl.load(entries + row[:, None] * stride + column[None, :], inside, other=0.0).to(tl.float32)
    values = tl.reshape(values, (ROWS, GROUPS, 64))
    most = tl.maximum(tl.max(values.to(tl.int32, bitcast=True) & 0x7FFFFFFF, 2), floor)
    told = ceiling_code(most, 0x43E00000)
    # A group with a NaN or an infinity has codes of zero under a scale of NaN.
    scaled = values * power_of_two(tl.where(told == 255, 0, 254 - told))[:, :, None]
    codes = encode_e4m3(tl.where((told < 255)[:, :, None], scaled, 0.0), HARDWARE)
    tl.store(records + row[:, None] * SIZE + column[None, :], tl.reshape(codes, (ROWS, GROUPS * 64)), inside)
    rest = tl.arange(0, TURNED)
    here = (row < count)[:, None] & (rest < ROTATED)[None, :]
    moved = tl.load(entries + row[:, None] * stride + PLAIN + rest[None, :], here)
    tl.store(turned + row[:, None] * (SIZE // 2) + PLAIN // 2 + rest[None, :], moved, here)
    # Scales and the zeros after them fill a record up.
    ENDS: tl.constexpr = PLAIN + 2 * ROTATED
    tail = tl.arange(0, GROUPS)
    last = tl.where(tail[None, :] < PLAIN // 64, told, 0).to(tl.uint8)
    here = (row < count)[:, None] & (tail < SIZE - ENDS)[None, :]
    tl.store(records + row[:, None] * SIZE + ENDS + tail[None, :], last, here)
    if SIZE - ENDS > GROUPS:
        pad = GROUPS + tl.arange(0, 8)
        here = (row < count)[:, None] & (pad < SIZE - ENDS)[None, :]
        tl.store(records + row[:, None] * SIZE + ENDS + pad[None, :], tl.zeros((ROWS, 8), tl.uint8), here)


@triton.jit
def _read(
    records, turned, entries, count, SIZE: tl.constexpr, PLAIN: tl.constexpr, ROTATED: tl.constexpr,
    GROUPS: tl.constexpr, TURNED: tl.constexpr, ROWS: tl.constexpr, HARDWARE: tl.constexpr,
):  # fmt: skip
    WIDTH: tl.constexpr = PLAIN + ROTATED
    row = tl.program_id(0).to(tl.int64) * ROWS + tl.arange(0, ROWS)
    column, group = tl.arange(0, GROUPS * 64), tl.arange(0, GROUPS)
    inside = (row < count)[:, None] & (column < PLAIN)[None, :]
    codes = tl.load(records + row[:, None] * SIZE + column[None, :], inside, other=0)
    where = records + row[:, None] * SIZE + PLAIN + 2 * ROTATED + group[None, :]
    told = tl.load(where, (row < count)[:, None] & (group < PLAIN // 64)[None, :], other=0)
    values = tl.reshape(decode_e4m3(codes, False, HARDWARE), (ROWS, GROUPS, 64))
    values = tl.reshape(values * power_of_two(told.to(tl.int32))[:, :, None], (ROWS, GROUPS * 64))
    tl.store(entries + row[:, None] * WIDTH + column[None, :], values.to(tl.bfloat16), inside)
    rest = tl.arange(0, TURNED)
    here = (row < count)[:, None] & (rest < ROTATED)[None, :]
    moved = tl.load(turned + row[:, None] * (SIZE // 2) + PLAIN // 2 + rest[None, :], here)
    tl.store(entries + row[:, None] * WIDTH + PLAIN + rest[None, :], moved, here)


def write_records(entries: Tensor, rotated: int, size: int, floor: float, *, hardware: bool = False) -> Tensor:
    """Records uint8 `[N, size]` of entries `[N, D]` in bfloat16 whose rows may lie apart; see `quant.records`."""
    count, width = entries.shape
    records = entries.new_empty((count, size), dtype=torch.uint8)
    if count:
        entries = entries if entries.stride(1) == 1 else entries.contiguous()
        least = torch.tensor(floor, dtype=torch.float32).view(torch.int32).item()
        _write[(triton.cdiv(count, _WRITTEN["ROWS"]),)](
            entries, entries.stride(0), records, records.view(torch.bfloat16), count, least,
            SIZE=size, HARDWARE=hardware, **_shape(width, rotated), **_WRITTEN,
        )  # fmt: skip
    return records


def read_records(records: Tensor, width: int, rotated: int, *, hardware: bool = False) -> Tensor:
    """Entries `[N, width]` in bfloat16 of records uint8 `[N, size]`."""
    count, size = records.shape
    records = records.contiguous()
    entries = records.new_empty((count, width), dtype=torch.bfloat16)
    if count:
        _read[(triton.cdiv(count, _READ["ROWS"]),)](
            records, records.view(torch.bfloat16), entries, count, SIZE=size, HARDWARE=hardware,
            **_shape(width, rotated), **_READ,
        )  # fmt: skip
    return entries


def _shape(width: int, rotated: int) -> dict[str, int]:
    plain = width - rotated
    return {
        "PLAIN": plain,
        "ROTATED": rotated,
        "GROUPS": triton.next_power_of_2(plain // 64),
        "TURNED": triton.next_power_of_2(max(rotated, 1)),
    }
