"""From a part of the source to the bytes of a part of the target, in memory that does not grow with a tensor."""

from __future__ import annotations

from collections.abc import Iterator
from typing import NamedTuple

import torch
from torch import Tensor

from undertow.checkpoint.convert.kept import grid_part, quantise_under
from undertow.checkpoint.convert.rounding import is_exact, is_rounded
from undertow.checkpoint.convert.source import Source, matrix_of
from undertow.checkpoint.convert.target import KeptScale, Part, Unit
from undertow.checkpoint.header import DTYPES
from undertow.checkpoint.names import scale_name
from undertow.config.errors import InputError
from undertow.quant.blocks import Block, grid_shape, tiles
from undertow.quant.codec import FLOATS
from undertow.quant.formats import E2M1
from undertow.quant.packing import unpack
from undertow.quant.quantise import quantise
from undertow.quant.quantised import Quantised
from undertow.quant.scales import halved
from undertow.quant.scheme import SCALE_TYPES, Scheme
from undertow.quant.stored import to_stored
from undertow.quant.widen import fp8_from_fp4

ALIGNED = Block(128, 128)
"""Every block that FP8 or FP4 is stored in divides this one, so that a slice of these has whole blocks."""

SLICE = 1 << 21
"""Elements worked on at a time; some five times as many float32 numbers are alive at once."""

_NEGATIVE_ZERO = 0x8  # of E2M1
_NEAR_INFINITY = 2.0**127  # below it no rounding leads out of float32


class Converted(NamedTuple):
    """A slice of a weight, of its scales if it has some, and whether it is found here that a number was rounded."""

    weight: Slice
    scales: Slice | None
    rounded: bool


class Slice(NamedTuple):
    """Bytes to write: `data` at row and column of the tensor as a matrix of bytes that is `width` columns wide."""

    data: Tensor
    row: int
    column: int
    width: int


def parts_of(part: Part, columns: int) -> Iterator[tuple[slice, slice]]:
    """Rows (of the source tensor) and columns of a part, slice by slice from the top."""
    for tile in tiles((part.rows, columns), ALIGNED, SLICE):
        rows, across = tile.part
        yield slice(part.start + rows.start, part.start + rows.stop), across


def weight_and_scales(source: Source, unit: Unit) -> Iterator[Converted]:
    """The converted slices of a unit that is not copied, each with its scales where there are some."""
    columns, in_doubt = matrix_of(unit.shape)[1], not is_exact(source, unit)
    for part in unit.parts:
        for rows, across in parts_of(part, columns):
            found = source.read(part.source, rows, across)
            row = rows.start - part.start + part.target
            if unit.scheme is None:
                numbers = as_numbers(found, DTYPES[unit.tensor.dtype], source.label(part.source))
                rounded = in_doubt and is_rounded(found, numbers)
                in_doubt = in_doubt and not rounded  # the first number that is rounded says it all
                yield Converted(_slice(numbers, row, across.start, columns), None, rounded)
                continue
            here = slice(row, row + rows.stop - rows.start)
            try:
                made = _quantised(source, unit, found, here, across)
            except InputError as error:
                raise InputError(f"{source.label(part.source)}: {error}") from None
            rounded = in_doubt and is_rounded(found, made)
            in_doubt = in_doubt and not rounded
            weight, scales = to_stored(made)
            halves = 2 if unit.scheme.format is E2M1 else 1
            first, second = grid_part(here, across, unit.scheme.block)
            width = matrix_of(grid_shape(unit.shape, unit.scheme.block))[1]
            yield Converted(
                _slice(weight, row, across.start // halves, columns // halves),
                _slice(scales.reshape(matrix_of(tuple(scales.shape))), first.start, second.start, width),
                rounded,
            )


def kept_slices(source: Source, kept: KeptScale) -> Iterator[Slice]:
    """Scales that are kept, in OCP's sense."""
    rows, columns = matrix_of(kept.tensor.shape)
    for part, across in parts_of(Part("", 0, rows, 0), columns):
        scales = source.region(kept.place, part, across)
        yield _slice(halved(scales) if kept.halved else scales, part.start, across.start, columns)


def as_numbers(found: Tensor | Quantised, dtype: torch.dtype, label: str) -> Tensor:
    """The numbers of a slice in `dtype`. Raises `InputError`, naming `label`, where finite ones become infinite."""
    if isinstance(found, Tensor):
        numbers = found.to(dtype)
        if numbers.dtype.itemsize >= found.dtype.itemsize or not dtype.is_floating_point:
            return numbers
        lost = numbers.isinf() & found.isfinite()
    else:
        numbers = found.dequantise(dtype)
        lost = ~numbers.isfinite()
    if bool(lost.any()):
        raise InputError(f"{label}: {int(lost.sum())} numbers are beyond {str(dtype).removeprefix('torch.')}")
    return numbers


def _quantised(source: Source, unit: Unit, found: Tensor | Quantised, rows: slice, columns: slice) -> Quantised:
    scheme = unit.scheme
    assert scheme is not None
    if isinstance(found, Quantised):
        if scheme.format is not E2M1:
            if found.scheme.format is E2M1:
                found = _widened(found, scheme)
            return found.in_dialect(scheme.dialect or "ocp")
        if found.scheme.format is E2M1:
            return found
        found = found.dequantise()
    values = found if found.dtype in FLOATS else found.float()
    kept = _kept(source, unit, rows, columns, scheme)
    made = quantise(values, scheme) if kept is None else quantise_under(values, scheme, kept)
    if not bool(values.isfinite().all()):
        raise InputError("holds NaN or infinity, which no quantised tensor can; check the run that wrote it")
    if bool((values.abs() >= _NEAR_INFINITY).any()) and not bool(made.dequantise().isfinite().all()):
        raise InputError(f"holds numbers that {scheme.format.name} rounds to infinity; use --dtype bf16")
    return made


def _widened(found: Quantised, scheme: Scheme) -> Quantised:
    """FP4 as FP8 of OCP; negative zeros stay what they are, so that the way back gives the same bytes."""
    made = fp8_from_fp4(found, scheme.block)
    negative = unpack(found.payload.view(torch.uint8)) == _NEGATIVE_ZERO
    if scheme.dialect == "ocp" and bool(negative.any()):
        codes = made.payload.view(torch.uint8).masked_fill(negative, 0x80)
        return Quantised(codes.view(made.scheme.format.dtype), made.scales, scheme.block)
    return made


def _kept(source: Source, unit: Unit, rows: slice, columns: slice, scheme: Scheme) -> Tensor | None:
    place = source.kept.get(scale_name(unit.tensor.name))
    if place is None or place.span.shape != grid_shape(unit.shape, scheme.block):
        return None
    if DTYPES.get(place.span.dtype) is not SCALE_TYPES[scheme.scale]:
        return None
    return source.region(place, *grid_part(rows, columns, scheme.block))


def _slice(data: Tensor, row: int, column: int, columns: int) -> Slice:
    raw = data.contiguous().view(torch.uint8)
    size = raw.shape[1] // max(data.shape[1], 1)
    return Slice(raw, row, column * size, columns * size)
