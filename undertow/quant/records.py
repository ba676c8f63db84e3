"""Cache entries as records of bytes: FP8 numbers, the rotated part in bfloat16, scales, one row of memory an entry.

A record of `[D]` with R rotated dimensions at its end is D - R canonical FP8 bytes, R bfloat16 numbers, one UE8M0 scale
for 64 FP8 numbers, and bytes of zero up to a multiple of 8: 584 bytes for D 512 and R 64. Scales are those of OCP; FP8
units of the other dialect read the same bytes as half as much.
"""

from __future__ import annotations

import torch
from torch import Tensor

from undertow.config.errors import InputError
from undertow.quant import kernels
from undertow.quant.formats import E4M3, UE8M0
from undertow.quant.quantise import quantise
from undertow.quant.quantised import Quantised
from undertow.quant.scheme import CACHE

FLOOR = 1e-4
"""Magnitude that every group of a record is taken to have at least."""

_GROUP, _ALIGNED = 64, 8


def record_size(width: int, rotated: int) -> int:
    """Bytes of a record. Raises `InputError` where the unrotated part is not whole groups of 64."""
    plain = width - rotated
    if plain < _GROUP or plain % _GROUP or rotated < 0:
        raise InputError(
            f"a record of {width} numbers, {rotated} of them rotated: the {plain} others must be a multiple of {_GROUP}"
        )
    return -(-(plain + 2 * rotated + plain // _GROUP) // _ALIGNED) * _ALIGNED


def write_records(entries: Tensor, rotated: int) -> Tensor:
    """Records of `entries` `[N, D]` in bfloat16, uint8 `[N, bytes]`; a group with a NaN or an infinity reads as NaN."""
    if entries.dtype is not torch.bfloat16 or entries.dim() != 2:
        raise InputError(f"entries {list(entries.shape)} of {entries.dtype}: [N, D] in bfloat16 is expected")
    width = entries.shape[1]
    size = record_size(width, rotated)
    if kernels.refusal(entries.device, CACHE.block) is None:
        from undertow.ops.triton import records as in_one

        return in_one.write_records(entries, rotated, size, FLOOR, hardware=kernels.converts(entries.device))
    records = entries.new_zeros((entries.shape[0], size), dtype=torch.uint8)
    plain = width - rotated
    numbers = quantise(entries[:, :plain], CACHE, floor=FLOOR)
    records[:, :plain] = numbers.payload.view(torch.uint8)
    ends = plain + 2 * rotated
    records[:, plain:ends] = entries[:, plain:].contiguous().view(torch.uint8)
    records[:, ends : ends + plain // _GROUP] = numbers.scales.view(torch.uint8)
    return records


def read_records(records: Tensor, width: int, rotated: int) -> Tensor:
    """The entries `[N, width]` in bfloat16 of records, uint8 `[N, bytes]`."""
    size = record_size(width, rotated)
    if records.dtype is not torch.uint8 or records.dim() != 2 or records.shape[1] != size:
        raise InputError(
            f"records {list(records.shape)} of {records.dtype}: [N, {size}] in uint8 is expected for {width} numbers, "
            f"{rotated} of them rotated"
        )
    if kernels.refusal(records.device, CACHE.block) is None:
        from undertow.ops.triton import records as in_one

        return in_one.read_records(records, width, rotated, hardware=kernels.converts(records.device))
    plain = width - rotated
    ends = plain + 2 * rotated
    codes, scales = records[:, :plain].contiguous(), records[:, ends : ends + plain // _GROUP].contiguous()
    numbers = Quantised(codes.view(E4M3.dtype), scales.view(UE8M0.dtype), CACHE.block)
    turned = records[:, plain:ends].contiguous().view(torch.bfloat16)
    return torch.cat((numbers.dequantise(torch.bfloat16), turned), dim=1)
