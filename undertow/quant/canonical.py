"""The 253 bytes that are numbers in both FP8 dialects: one set of bytes, twice as large in OCP as in FNUZ.

A cache or a weight of such bytes is valid on every chip; a reader in FNUZ doubles the scales, and no number is rounded.
"""

from __future__ import annotations

import torch
from torch import Tensor

from undertow.config.errors import InputError
from undertow.quant.formats import E4M3_FNUZ, Format, format_of

FOREIGN = (0x7F, 0x80, 0xFF)
"""OCP's NaN and FNUZ's NaN: each a number of the other dialect, if one counts -0."""

_CHUNK = 1 << 20


def canonical(payload: Tensor) -> Tensor:
    """FP8 `payload` of either dialect as uint8 without the bytes of `FOREIGN`, a copy; -0 becomes 0.

    Raises `InputError` where one of the three is NaN, or is a number above the largest of both dialects alike.
    """
    format = format_of(payload.dtype)
    if format is None or format.dialect is None:
        raise InputError(f"codes of type {payload.dtype}: float8_e4m3fn or float8_e4m3fnuz is expected")
    refused = [code for code in FOREIGN if code not in format.zero_codes]
    found = count_codes(payload, refused)
    if found:
        other = "ocp" if format is E4M3_FNUZ else "fnuz"
        raise InputError(
            f"{found} of {payload.numel()} bytes of {format.name} have no equal in {other}, NaN among them; check that "
            "the dialect is the writer's, or dequantise the tensor and quantise it again"
        )
    codes = payload.view(torch.uint8).clone(memory_format=torch.contiguous_format)
    for chunk in codes.view(-1).split(_CHUNK):
        chunk.masked_fill_(chunk == 0x80, 0)
    return codes


def count_nan(payload: Tensor, format: Format) -> int:
    """How many bytes of an FP8 or UE8M0 `payload` are NaN."""
    return count_codes(payload, format.nan_codes)


def count_codes(payload: Tensor, wanted: list[int] | tuple[int, ...]) -> int:
    """How many bytes of `payload` are among `wanted`, in bounded memory."""
    count = 0
    for chunk in payload.view(torch.uint8).flatten().split(_CHUNK):
        for code in wanted:
            equal = chunk == code
            # Whether there is any is far cheaper to ask than how many, and there is rarely any.
            count += int(equal.sum()) if bool(equal.any()) else 0
    return count
