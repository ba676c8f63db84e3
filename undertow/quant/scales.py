"""Scales of blocks: powers of two (UE8M0) or float32, made from the largest magnitude of each block.

A scale of NaN marks a block that held a NaN or an infinity: all of it reads as NaN.
"""

from __future__ import annotations

import torch
from torch import Tensor

from undertow.config.errors import InputError
from undertow.quant.codec import decode, float_bits
from undertow.quant.formats import UE8M0, Format

SCALE_DTYPES = (torch.float8_e8m0fnu, torch.float32)

_INFINITY = 0x7F800000
_NAN_CODE = UE8M0.nan_codes[0]
_ONE_CODE = UE8M0.bias
_LAST_CODE = _NAN_CODE - 1
_SMALLEST = 2.0**-126


def scales_for(maxima: Tensor, format: Format, dtype: torch.dtype) -> Tensor:
    """Scales, of `dtype`, under which the magnitudes `maxima` (float32) become at most `format.largest`.

    UE8M0: the smallest power of two that suffices. float32: the quotient. Neither is below 2^-126, the smallest normal
    float32, since kernels may take what is below it for zero. Blocks of zeros get 1.
    """
    return ceil_scales(maxima, format) if dtype is torch.float8_e8m0fnu else _float_scales(maxima, format)


def ceil_scales(maxima: Tensor, format: Format) -> Tensor:
    """UE8M0 scales: for each magnitude m (float32) the smallest 2^e >= 2^-126 with m <= largest * 2^e.

    By integers alone, so that a magnitude of exactly `largest` times a power of two gets that power. Zero gets 1;
    infinity and NaN get NaN.
    """
    bits = maxima.contiguous().view(torch.int32) & 0x7FFFFFFF  # a NaN may have a sign
    limit = float_bits(format.largest)
    # A magnitude needs one power more than the difference of the exponents if its fraction is above the limit's.
    code = (bits >> 23) - (limit >> 23) + UE8M0.bias + ((bits & 0x7FFFFF) > (limit & 0x7FFFFF))
    code = code.clamp(1, _LAST_CODE)
    code = torch.where(bits == 0, _ONE_CODE, code)
    code = torch.where(bits >= _INFINITY, _NAN_CODE, code)
    return code.to(torch.uint8).view(torch.float8_e8m0fnu)


def _float_scales(maxima: Tensor, format: Format) -> Tensor:
    scales = (maxima / format.largest).clamp(min=_SMALLEST)
    scales = torch.where(maxima == 0, 1.0, scales)
    return torch.where(maxima.isfinite(), scales, float("nan"))


def scale_values(scales: Tensor) -> Tensor:
    """The float32 values of scales of either type."""
    return scales if scales.dtype is torch.float32 else decode(scales.view(torch.uint8), UE8M0)


def doubled(scales: Tensor) -> Tensor:
    """Every scale times two, exactly: codes of one dialect are read with them in the other. NaN stays NaN.

    Raises `InputError` where the double is no finite scale.
    """
    return _moved(scales, 1)


def halved(scales: Tensor) -> Tensor:
    """Every scale by two, exactly; the inverse of `doubled`. Raises `InputError` where the half is no scale."""
    return _moved(scales, -1)


def _moved(scales: Tensor, by: int) -> Tensor:
    verb = "doubled" if by > 0 else "halved"
    if scales.dtype is torch.float32:
        moved = scales * 2.0**by
        lost = (moved * 2.0**-by != scales) & ~scales.isnan()
    else:
        codes = scales.view(torch.uint8)
        lost = codes == (_LAST_CODE if by > 0 else 0)
        moved = torch.where(codes == _NAN_CODE, _NAN_CODE, codes.int() + by)
        moved = moved.clamp(0, _NAN_CODE).to(torch.uint8).view(torch.float8_e8m0fnu)
    if bool(lost.any()):
        raise InputError(
            f"{int(lost.sum())} of {lost.numel()} scales cannot be {verb} within {scales.dtype}, so the tensor cannot "
            "be told in the other FP8 dialect; dequantise it and quantise it again"
        )
    return moved
