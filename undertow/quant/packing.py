"""Two E2M1 codes in a byte: the even column in the low half, the odd one in the high half."""

from __future__ import annotations

import torch
from torch import Tensor

from undertow.config.errors import InputError


def pack(codes: Tensor) -> Tensor:
    """`[..., C]` uint8 codes below 16 to `[..., C / 2]` bytes; C must be even."""
    if codes.shape[-1] % 2:
        raise InputError(f"{codes.shape[-1]} columns of FP4: an even number is expected, since two share a byte")
    return codes[..., 0::2] | (codes[..., 1::2] << 4)


def unpack(packed: Tensor) -> Tensor:
    """`[..., C / 2]` bytes to `[..., C]` uint8 codes."""
    return torch.stack((packed & 0xF, packed >> 4), dim=-1).flatten(-2)
