"""Quantised tensors as they lie in a checkpoint: what they are is read off types and shapes, and checked."""

from __future__ import annotations

import torch
from torch import Tensor

from undertow.config.errors import InputError
from undertow.quant.blocks import WHOLE, Block, grid_shape
from undertow.quant.canonical import count_nan
from undertow.quant.dialect import Dialect
from undertow.quant.formats import E2M1, Format, e4m3, format_of
from undertow.quant.quantised import Quantised
from undertow.quant.scales import SCALE_DTYPES, scale_values

BLOCKS = (Block(128, 128), Block(32, 32), Block(1, 128), Block(1, 64), WHOLE)
"""Blocks that FP8 is stored in. Where two of them have the same grid for a shape, they cut it the same way."""

_BYTES = (torch.int8, torch.uint8)


def from_stored(
    name: str, weight: Tensor, scale: Tensor, shape: tuple[int, ...] | None = None, dialect: Dialect | None = None
) -> Quantised:
    """The tensor `name`, stored as `weight` and `scale`; no number is changed or copied.

    FP8 is `float8_e4m3fn` or `float8_e4m3fnuz` with a scale for each of one of `BLOCKS`. MXFP4 is int8, uint8 or
    `float4_e2m1fn_x2`, two numbers a byte, with a UE8M0 scale for 32 numbers. `shape` is what the configuration says of
    the numbers, `dialect` what is expected of FP8. Tensors on the `meta` device are judged by types and shapes alone.

    Raises `InputError` for a type without a meaning, for FP4 that is labelled FP8 or the reverse, for another dialect
    or bytes that are NaN in the labelled one, for a grid that belongs to no block, and for scales that are not
    positive and finite.
    """
    if scale.dtype not in SCALE_DTYPES:
        hint = ", viewed as it if its bytes are exponents" if scale.dtype in _BYTES else ""
        raise InputError(f"{name}: its scale is {scale.dtype}; float8_e8m0fnu{hint}, or float32 is expected")
    if weight.dim() < 2:
        raise InputError(f"{name}: shape {list(weight.shape)}; a matrix is expected for a quantised tensor")
    if weight.dtype in (*_BYTES, E2M1.dtype):
        found = _fp4(name, weight, scale, shape)
    else:
        found = _fp8(name, weight, scale, shape, dialect)
    _check_scales(name, scale)
    return found


def to_stored(tensor: Quantised) -> tuple[Tensor, Tensor]:
    """`weight` and `scale` as the release stores them: packed FP4 as int8, everything else under its own label."""
    packed = tensor.scheme.format is E2M1
    return (tensor.payload.view(torch.int8) if packed else tensor.payload), tensor.scales


def _fp4(name: str, weight: Tensor, scale: Tensor, shape: tuple[int, ...] | None) -> Quantised:
    block = Block(1, 32)
    numbers = (*weight.shape[:-1], weight.shape[-1] * 2)
    if tuple(scale.shape) != grid_shape(numbers, block):
        if any(_fits(weight, scale, each) for each in BLOCKS):
            raise InputError(
                f"{name}: {weight.dtype} bytes with scales of shape {list(scale.shape)}, one for each FP8 block; FP8 "
                "is read only as float8_e4m3fn or float8_e4m3fnuz, which says its dialect (packed FP4 would have "
                f"scales of shape {list(grid_shape(numbers, block))})"
            )
        raise InputError(
            f"{name}: scales of shape {list(scale.shape)}; packed FP4 of shape {list(weight.shape)} has "
            f"{list(grid_shape(numbers, block))}, one for 32 numbers"
        )
    if scale.dtype is torch.float32:
        raise InputError(f"{name}: packed FP4 with float32 scales; MXFP4 has float8_e8m0fnu")
    _check_shape(name, numbers, shape, "packed FP4 holds two numbers a byte")
    return Quantised(weight.view(E2M1.dtype), scale, block)


def _fp8(name: str, weight: Tensor, scale: Tensor, shape: tuple[int, ...] | None, dialect: Dialect | None) -> Quantised:
    format = format_of(weight.dtype)
    if format is None or format.dialect is None:
        raise InputError(
            f"{name}: {weight.dtype} with a scale; float8_e4m3fn, float8_e4m3fnuz, or packed FP4 as int8 is expected"
        )
    block = next((each for each in BLOCKS if _fits(weight, scale, each)), None)
    numbers = (*weight.shape[:-1], weight.shape[-1] * 2)
    if tuple(scale.shape) == grid_shape(numbers, Block(1, 32)) and (block is None or numbers == shape):
        raise InputError(
            f"{name}: labelled {weight.dtype}, but has a scale for 16 bytes of a row, as packed FP4 has; view it as "
            "int8 if it is FP4"
        )
    _check_shape(name, tuple(weight.shape), shape, "FP8 holds one number a byte")
    if block is None:
        known = ", ".join(f"{list(grid_shape(tuple(weight.shape), each))} ({each})" for each in BLOCKS)
        raise InputError(f"{name}: scales of shape {list(scale.shape)} for {list(weight.shape)}; {known} are known")
    _check_dialect(name, weight, format, dialect)
    return Quantised(weight, scale.reshape(grid_shape(tuple(weight.shape), block)), block)


def _fits(weight: Tensor, scale: Tensor, block: Block) -> bool:
    # A scale for the whole tensor is stored with any number of dimensions.
    if block == WHOLE:
        return scale.numel() == 1
    return tuple(scale.shape) == grid_shape(tuple(weight.shape), block)


def _check_shape(name: str, found: tuple[int, ...], expected: tuple[int, ...] | None, why: str) -> None:
    if expected is not None and found != tuple(expected):
        raise InputError(f"{name}: {list(found)} numbers; {list(expected)} are expected ({why})")


def _check_dialect(name: str, weight: Tensor, format: Format, expected: Dialect | None) -> None:
    if expected is not None and format is not e4m3(expected):
        raise InputError(
            f"{name}: FP8 in the dialect {format.dialect}, {expected} is expected; the same bytes would be off by a "
            "factor of two, convert them by in_dialect"
        )
    count = 0 if weight.is_meta else count_nan(weight, format)
    if count:
        other = "fnuz" if format.dialect == "ocp" else "ocp"
        raise InputError(
            f"{name}: {count} of {weight.numel()} bytes are NaN in {format.dialect}, the dialect of its label; they "
            f"are numbers in {other}, so the label is likely wrong"
        )


def _check_scales(name: str, scale: Tensor) -> None:
    for row in () if scale.is_meta else scale.reshape(-1).split(1 << 20):
        values = scale_values(row)
        bad = ~((values > 0) & values.isfinite())
        if bool(bad.any()):
            raise InputError(f"{name}: a scale is {values[bad][0].item()}; positive finite numbers are expected")
