"""What a conversion writes: every tensor with its type, and the parts of the source that it is made of."""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Literal, NamedTuple, get_args

from undertow.checkpoint.convert.source import Place, Source, matrix_of
from undertow.checkpoint.header import size_of
from undertow.checkpoint.names import (
    Expected,
    Piece,
    expected_tensors,
    is_routed,
    is_scaled,
    native_tensors,
    pieces,
    scale_name,
)
from undertow.config.errors import InputError
from undertow.quant.blocks import WHOLE, grid_shape
from undertow.quant.dialect import Dialect
from undertow.quant.formats import E2M1, E4M3
from undertow.quant.scheme import MXFP4, WEIGHTS, Scheme
from undertow.quant.stored import BLOCKS

Spelling = Literal["released", "transformers", "undertow"]
Precision = Literal["fp32", "bf16", "fp8", "fp4"]

SPELLINGS: tuple[Spelling, ...] = ("released", "transformers", "undertow")
PRECISIONS: tuple[Precision, ...] = ("fp32", "bf16", "fp8", "fp4")

_PLAIN = {"fp32": "F32", "bf16": "BF16"}
_SCALE = {"ue8m0": "F8_E8M0", "float32": "F32"}


@dataclass(frozen=True)
class Wish:
    """What a conversion is asked for; None keeps what the source has, where the format can hold it.

    `precision` fp4 is the release's own: routed experts MXFP4, other matrices FP8, the rest BF16; fp8 has the experts
    in FP8 too. Raises `InputError` for a value that is none of these.
    """

    spelling: Spelling = "released"
    precision: Precision | None = None
    dialect: Dialect | None = None

    def __post_init__(self) -> None:
        given = (
            ("format", self.spelling, get_args(Spelling)),
            ("precision", self.precision, (None, *get_args(Precision))),
            ("dialect", self.dialect, (None, *get_args(Dialect))),
        )
        for what, value, allowed in given:
            if value not in allowed:
                known = ", ".join("None" if each is None else each for each in allowed)
                raise InputError(f"unknown {what} {value!r} of a conversion; give one of {known}")


class Tensor(NamedTuple):
    """A tensor to write: name, type of the header, shape in elements."""

    name: str
    dtype: str
    shape: tuple[int, ...]

    @property
    def size(self) -> int:
        """In bytes."""
        return size_of(self.dtype, self.shape)


class Part(NamedTuple):
    """Rows of a source tensor and where they go, all as matrices."""

    source: str
    start: int
    rows: int
    target: int


@dataclass(frozen=True)
class Unit:
    """A tensor to write with its parts, and with its scales if it is quantised (then `scheme` says how).

    `copied` means that the bytes are the source's; those of scales too. `shape` is that of the numbers.
    """

    tensor: Tensor
    shape: tuple[int, ...]
    parts: tuple[Part, ...]
    copied: bool
    scheme: Scheme | None = None
    scale: Tensor | None = None

    @property
    def size(self) -> int:
        """In bytes, scales included."""
        return self.tensor.size + (self.scale.size if self.scale else 0)

    @property
    def tensors(self) -> tuple[Tensor, ...]:
        """The weight, and the scales after it."""
        return (self.tensor, self.scale) if self.scale else (self.tensor,)


@dataclass(frozen=True)
class KeptScale:
    """Scales that the converted weights no longer need, kept so that the way back gives the same bytes."""

    tensor: Tensor
    place: Place
    halved: bool


def units_of(source: Source, wish: Wish) -> list[Unit]:
    """Everything to write, in the order of a forward pass; draft modules that are not known last, as they are."""
    _check(source, wish)
    _check_drafts(source, wish.spelling)
    units = []
    for native, tensor in native_tensors(source.config).items():
        columns = matrix_of(tensor.shape)[1]
        held = [(piece, _rows(piece, tensor.shape)) for piece in pieces(native, tensor.shape, source.spelling)]
        for piece in pieces(native, tensor.shape, wish.spelling):
            first, last = _rows(piece, tensor.shape)
            parts = tuple(_parts(held, first, last))
            units.append(_unit(source, wish, piece, tensor, parts, columns))
    for name in source.drafts:
        span = source.tensors[name].span
        whole = (Part(name, 0, matrix_of(span.shape)[0], 0),)
        units.append(Unit(Tensor(name, span.dtype, span.shape), span.shape, whole, copied=True))
    return units


def kept_scales(source: Source, units: list[Unit]) -> list[KeptScale]:
    """The scales that `units` leave out, in OCP's sense; those that `source` has kept already go before its own."""
    held = {part.source for unit in units if unit.scheme and _same_form(source, unit) for part in unit.parts}
    names = source.released_names()
    found = []
    for name, low in source.low.items():
        released = scale_name(names[name])
        if name in held or released in source.kept:
            continue
        place = source.tensors[scale_name(name)]
        tensor = Tensor(released, place.span.dtype, place.span.shape)
        found.append(KeptScale(tensor, place, halved=low.scheme.dialect == "fnuz"))
    written = {unit.scale.name: unit.scale.shape for unit in units if unit.scale}
    for name, place in source.kept.items():
        if written.get(name) != place.span.shape:
            found.append(KeptScale(Tensor(name, place.span.dtype, place.span.shape), place, halved=False))
    return found


def _same_form(source: Source, unit: Unit) -> bool:
    low = source.low.get(unit.parts[0].source)
    return low is not None and unit.scheme is not None and (low.scheme.format is E2M1) is (unit.scheme.format is E2M1)


def _check(source: Source, wish: Wish) -> None:
    if wish.precision in ("fp8", "fp4") and wish.spelling != "released":
        raise InputError(
            f"--dtype {wish.precision} with --to {wish.spelling}: FP8 and FP4 have released names alone; use --to "
            "released, or --dtype bf16"
        )
    quantised = wish.precision in ("fp8", "fp4") or (wish.precision is None and source.low)
    if wish.dialect and not (quantised and wish.spelling == "released"):
        raise InputError(f"--dialect {wish.dialect}: nothing would be written in FP8; give --dtype fp8 or fp4 with it")


def _check_drafts(source: Source, spelling: Spelling) -> None:
    """A draft keeps its name, which is unknown among those of the source; among those of the target it may be taken."""
    known = expected_tensors(source.config, spelling)
    taken = known.keys() | {scale_name(name) for name in known}
    clash = next((name for name in source.drafts if name in taken), None)
    if clash is not None:
        raise InputError(
            f"{source.label(clash)}: a draft module's tensor, and {spelling} names have another one of this name; "
            "rename it in the source"
        )


def _rows(piece: Piece, shape: tuple[int, ...]) -> tuple[int, int]:
    if not piece.place:
        return 0, matrix_of(shape)[0]
    expert, rows = piece.place[0], piece.place[1] if len(piece.place) > 1 else slice(0, shape[1])
    assert isinstance(expert, int) and isinstance(rows, slice)
    return expert * shape[1] + rows.start, expert * shape[1] + rows.stop


def _parts(held: list[tuple[Piece, tuple[int, int]]], first: int, last: int) -> Iterator[Part]:
    # Pieces follow each other down the rows of the native tensor, without a gap.
    at = bisect_right(held, first, key=lambda item: item[1][0]) - 1
    while at < len(held) and held[at][1][0] < last:
        piece, (begin, end) = held[at]
        low, high = max(begin, first), min(end, last)
        yield Part(piece.name, low - begin, high - low, low - first)
        at += 1


def _unit(source: Source, wish: Wish, piece: Piece, tensor: Expected, parts: tuple[Part, ...], columns: int) -> Unit:
    stored = {source.tensors[part.source].span.dtype for part in parts}
    only = next(iter(stored)) if len(stored) == 1 else None
    low = source.low.get(parts[0].source)
    if any(part.source in source.low for part in parts) and wish.spelling != "released":
        plain = _PLAIN.get(wish.precision or "bf16", "BF16")
        return Unit(Tensor(piece.name, plain, piece.shape), piece.shape, parts, copied=False)
    scheme = _scheme(source, wish, piece, low.scheme if low else None) if tensor.kind == "weight" else None
    if scheme is None:
        dtype = _plain(wish, tensor, only, low is not None)
        return Unit(Tensor(piece.name, dtype, piece.shape), piece.shape, parts, copied=dtype == only and low is None)
    packed = scheme.format is E2M1
    if packed and columns % 2:
        raise InputError(f"{piece.name}: {columns} columns cannot be packed as FP4; use --dtype fp8 or bf16")
    fp8 = "F8_E4M3FNUZ" if scheme.dialect == "fnuz" else "F8_E4M3"
    shape = (*piece.shape[:-1], piece.shape[-1] // 2) if packed else piece.shape
    scale = Tensor(scale_name(piece.name), _SCALE[scheme.scale], grid_shape(piece.shape, scheme.block))
    copied = low is not None and low.scheme == scheme
    return Unit(Tensor(piece.name, "I8" if packed else fp8, shape), piece.shape, parts, copied, scheme, scale)


def _scheme(source: Source, wish: Wish, piece: Piece, low: Scheme | None) -> Scheme | None:
    """How a weight is quantised; None for plain numbers."""
    precision, name = wish.precision, piece.name
    if precision is None:
        return low.in_dialect(wish.dialect) if low and wish.dialect else low
    if precision in _PLAIN or not is_scaled(name):
        return None
    if precision == "fp4" and is_routed(name):
        return MXFP4
    kept = low or _kept_scheme(source, piece)
    scheme = kept if kept is not None and kept.format is not E2M1 else WEIGHTS
    return scheme.in_dialect(wish.dialect or (low.dialect if low else None) or "ocp")


def _kept_scheme(source: Source, piece: Piece) -> Scheme | None:
    """The FP8 whose scales are kept beside plain numbers: the way back goes to it.

    Not to one scale for a whole tensor: whether that still does is known only once all of the tensor is read.
    """
    place = source.kept.get(scale_name(piece.name))
    if place is None or place.span.dtype not in _SCALE.values():
        return None
    block = next((b for b in BLOCKS if b != WHOLE and grid_shape(piece.shape, b) == place.span.shape), None)
    return Scheme(E4M3, block, "float32" if place.span.dtype == "F32" else "ue8m0") if block else None


def _plain(wish: Wish, tensor: Expected, only: str | None, low: bool) -> str:
    if tensor.kind == "index":
        return only or "I64"
    if tensor.kind == "float32":
        return "F32"
    if wish.precision is not None:
        return _PLAIN.get(wish.precision, "BF16")
    return "BF16" if low else only or "F32"
