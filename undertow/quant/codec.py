"""Numbers to codes and back, bit by bit: the definition that every kernel's conversion is tested against.

Nothing here goes through torch's own casts. They differ between releases where a number is above the largest, and the
FNUZ one makes NaN of such a number where a clamped one is meant.
"""

from __future__ import annotations

import struct

import torch
from torch import Tensor

from undertow.config.errors import InputError
from undertow.quant.formats import Format, table

FLOATS = (torch.float32, torch.bfloat16, torch.float16)
"""Types that are encoded. Rounding float64 to float32 first could round a tie the wrong way."""

_FRACTION = 23  # fraction bits of a float32
_INFINITY = 0x7F800000


def decode(codes: Tensor, format: Format) -> Tensor:
    """The float32 values of `codes`, uint8 of any shape with one code an element. Exact.

    Codes must be below `2^format.bits`; E2M1 codes that share bytes are taken apart by `packing.unpack`.
    """
    if codes.dtype is not torch.uint8:
        raise InputError(f"codes of type {codes.dtype}: uint8 is expected, one code an element")
    values = torch.index_select(table(format, codes.device), 0, codes.reshape(-1).int())
    return values.view(codes.shape)


def encode(values: Tensor, format: Format, generator: torch.Generator | None = None) -> Tensor:
    """The codes of `values` in E4M3 or E2M1, uint8 of the same shape with one code an element.

    Without `generator` each value goes to the nearest number, a tie to the even code. With one, it goes to one of its
    two neighbours with the probability that makes the result right on average; `generator` must be on the device of
    `values`.

    Magnitudes above the largest number, infinities included, become the largest one. NaN becomes the format's NaN, with
    the sign where there are two; E2M1 has none, so NaN raises `InputError` there. Negative zero, or what rounds to it,
    keeps its sign where the format has one for it.
    """
    if values.dtype not in FLOATS:
        raise InputError(f"values of type {values.dtype}: float32, bfloat16 or float16 is expected; convert them first")
    if not format.signed:
        raise InputError(f"{format.name} holds scales; round them up by scales.ceil_scales")
    bits = values.to(torch.float32, memory_format=torch.contiguous_format).view(torch.int32)
    magnitude = bits & 0x7FFFFFFF
    nan = magnitude > _INFINITY
    clamped = magnitude.clamp(max=float_bits(format.largest))
    codes = _nearest(clamped, format) if generator is None else _stochastic(clamped, format, generator)
    sign_bit = 1 << (format.bits - 1)
    signs = (bits >> 31) & sign_bit
    if sign_bit not in format.zero_codes:
        signs.masked_fill_(codes == 0, 0)
    codes |= signs
    if bool(nan.any()):
        if not format.nan_codes:
            raise InputError(f"{int(nan.sum())} of {nan.numel()} values are NaN, which {format.name} cannot hold")
        codes = torch.where(nan, signs | format.nan_codes[0], codes)
    return codes.to(torch.uint8)


def float_bits(value: float) -> int:
    """The bits of `value` as a float32."""
    return struct.unpack("<i", struct.pack("<f", value))[0]


def _nearest(magnitude: Tensor, format: Format) -> Tensor:
    # Where the last bit of a float32 is one step, addition rounds to whole steps, ties to even.
    last = _step_bits(magnitude, format).add_(_FRACTION << _FRACTION)
    steps = (magnitude.view(torch.float32) + last.view(torch.float32)).view(torch.int32)
    steps -= last
    return steps.add_(_binades(last, format, _FRACTION))


def _stochastic(magnitude: Tensor, format: Format, generator: torch.Generator) -> Tensor:
    step = _step_bits(magnitude, format)
    steps = magnitude.view(torch.float32) / step.view(torch.float32)
    whole = steps.floor()
    draw = torch.randint(0, 1 << 31, magnitude.shape, dtype=torch.int32, device=magnitude.device, generator=generator)
    up = draw < ((steps - whole) * 2.0**31).int()
    return whole.int().add_(up).add_(_binades(step, format, 0))


def _step_bits(magnitude: Tensor, format: Format) -> Tensor:
    """Distance between neighbours in the binade of each magnitude, a power of two, as the bits of a float32."""
    binade = (magnitude & _INFINITY).clamp_(min=float_bits(format.smallest_normal))
    return binade.sub_(format.fraction_bits << _FRACTION)


def _binades(power: Tensor, format: Format, above: int) -> Tensor:
    """What a code is above the number of steps: `2^fraction_bits` for each binade above the smallest normal number's.

    `power` is the bits of 2^above steps.
    """
    shift = _FRACTION - format.fraction_bits
    return (power >> shift).sub_((float_bits(format.step) + (above << _FRACTION)) >> shift)
