"""Is a finished conversion what it should be: sums of the files, and every number against the source."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from pathlib import Path

import torch
from torch import Tensor

from undertow.checkpoint.convert.digest import file_digest
from undertow.checkpoint.convert.documents import SUMS
from undertow.checkpoint.convert.slices import parts_of
from undertow.checkpoint.convert.source import Source, bytes_before, matrix_of
from undertow.checkpoint.convert.target import Unit
from undertow.config.errors import UndertowError
from undertow.quant.blocks import split
from undertow.quant.formats import E2M1
from undertow.quant.quantised import Quantised
from undertow.quant.scales import scale_values

_CHUNK = 1 << 22
_BFLOAT = 2.0**-8, 2.0**-134
_FP8 = 2.0**-4, 2.0**-10
_FP4 = 0.2, 0.25
"""Bounds of rounding to the nearest: in units of the number, and of its scale (1 for plain numbers)."""


def check_sums(target: Path, names: Iterable[str]) -> None:
    """Compare the sum of each of the files `names` with `SHA256SUMS`. Raises `UndertowError`."""
    try:
        lines = (target / SUMS).read_text("utf-8").splitlines()
    except (OSError, UnicodeDecodeError):
        raise UndertowError(f"{target / SUMS}: cannot be read as a list of sums; convert again") from None
    sums = {name: wanted for wanted, _, name in (line.partition("  ") for line in lines)}
    for name in names:
        if name not in sums:
            raise UndertowError(f"{target / SUMS}: has no sum of {name}; convert again")
        check_sum(target / name, sums[name], SUMS)


def check_sum(file: Path, wanted: str, where: str) -> None:
    """Compare the sum of a file with `wanted`, which stands in `where`. Raises `UndertowError`."""
    try:
        found = file_digest(file)
    except OSError as error:
        raise UndertowError(f"{file}: cannot be read ({error.strerror}); convert again") from None
    if found != wanted:
        raise UndertowError(f"{file}: its SHA-256 is {found[:12]}..., {where} says {wanted[:12]}...")


def check_numbers(source: Source, target: Source, units: Sequence[Unit], progress: Callable[[int], None]) -> None:
    """Compare every number in `target` with the one in `source`: equal, or within the rounding of its format.

    Raises `UndertowError` that names the first tensor which differs.
    """
    for unit in units:
        differing = _bytes_wrong if unit.copied and unit.scheme is None else _numbers_wrong
        wrong = differing(source, target, unit)
        if wrong:
            raise UndertowError(f"{target.label(unit.tensor.name)}: {wrong} numbers differ from the source's")
        progress(unit.size)


def _numbers_wrong(source: Source, target: Source, unit: Unit) -> int:
    wrong, columns = 0, matrix_of(unit.shape)[1]
    for part in unit.parts:
        shift = part.target - part.start
        for rows, across in parts_of(part, columns):
            before = source.read(part.source, rows, across)
            after = target.read(unit.tensor.name, slice(rows.start + shift, rows.stop + shift), across)
            wrong += _wrong(before, after, unit)
    return wrong


def _bytes_wrong(source: Source, target: Source, unit: Unit) -> int:
    """Bytes that differ, of a tensor that is copied; it may be of a type that is not read otherwise."""
    wrong, copy = 0, target.tensors[unit.tensor.name]
    for part in unit.parts:
        place = source.tensors[part.source]
        first = bytes_before(place, part.start)
        begin, size = place.span.begin + first, bytes_before(place, part.start + part.rows) - first
        for at in range(0, size, _CHUNK):
            one, other = (bytearray(min(_CHUNK, size - at)) for _ in range(2))
            source.fill(source.handle(place.file), memoryview(one), begin + at, place.file)
            offset = copy.span.begin + bytes_before(place, part.target) + at
            target.fill(target.handle(copy.file), memoryview(other), offset, copy.file)
            if one != other:
                wrong += sum(x != y for x, y in zip(one, other, strict=True))
    return wrong


def _wrong(before: Tensor | Quantised, after: Tensor | Quantised, unit: Unit) -> int:
    if unit.copied:
        return sum(int((x != y).sum()) for x, y in zip(_bits(before), _bits(after), strict=True))
    one, other = _numbers(before), _numbers(after)
    if isinstance(before, Quantised) and unit.tensor.dtype == "BF16":
        one = one.bfloat16().float()  # what scales that are no powers of two, or very small ones, are rounded to
    same = (one == other) | (one.isnan() & other.isnan())
    if bool(same.all()):
        return 0
    if unit.scheme is None and unit.tensor.dtype != "BF16":
        return int((~same).sum())
    if isinstance(before, Quantised) and (unit.scheme is None or unit.scheme.format is not E2M1):
        return int((~same).sum())
    return int((~(same | _within(one, other, after))).sum())


def _within(one: Tensor, other: Tensor, after: Tensor | Quantised) -> Tensor:
    if isinstance(after, Tensor):
        return (one - other).abs() <= _BFLOAT[0] * one.abs() + _BFLOAT[1]
    relative, absolute = _FP4 if after.scheme.format is E2M1 else _FP8
    block = after.scheme.block
    bound = split(one.abs() * relative, block) + scale_values(after.scales)[:, None, :, None] * absolute
    wrong = split((one - other).abs(), block) > bound
    down, high, across, wide = wrong.shape
    return ~wrong.reshape(down * high, across * wide)[: one.shape[0], : one.shape[1]]


def _numbers(found: Tensor | Quantised) -> Tensor:
    return found.float() if isinstance(found, Tensor) else found.dequantise()


def _bits(found: Tensor | Quantised) -> list[Tensor]:
    held = (found,) if isinstance(found, Tensor) else (found.payload, found.scales)
    return [each.reshape(-1).view(torch.uint8) for each in held]
