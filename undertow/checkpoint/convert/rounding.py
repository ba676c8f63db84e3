"""Does a conversion lose anything: told by the types beforehand, by the numbers afterwards."""

from __future__ import annotations

from torch import Tensor

from undertow.checkpoint.convert.source import Source, matrix_of
from undertow.checkpoint.convert.target import Unit
from undertow.checkpoint.names import scale_name
from undertow.quant.blocks import Block, tiles
from undertow.quant.formats import E2M1
from undertow.quant.quantised import Quantised
from undertow.quant.scales import scale_values

_SCALES = 1 << 20  # read at a time


def is_exact(source: Source, unit: Unit) -> bool:
    """Whether the target's type holds every number that the source's may."""
    if unit.copied:
        return True
    for part in unit.parts:
        low, dtype = source.low.get(part.source), source.tensors[part.source].span.dtype
        if unit.scheme is None and low is not None:
            if unit.tensor.dtype == "BF16" and not _fits_bfloat(source, part.source):
                return False
        elif unit.scheme is None:
            widens = unit.tensor.dtype == dtype
            if not widens and (dtype, unit.tensor.dtype) not in (("BF16", "F32"), ("F16", "F32")):
                return False
        elif low is None or (unit.scheme.format is E2M1 and low.scheme.format is not E2M1):
            return False
    return True


def is_rounded(before: Tensor | Quantised, after: Tensor | Quantised) -> bool:
    """Whether a number of `before` is another one in `after`, seen in the type of `before`.

    Seen so, BF16 that came from FP8 is equal to it also where BF16 had rounded its scale's product.
    """
    one = before if isinstance(before, Tensor) else before.dequantise()
    other = (after if isinstance(after, Tensor) else after.dequantise()).to(one.dtype)
    same = one == other
    return not bool(same.all()) and not bool((same | (one.isnan() & other.isnan())).all())


def _fits_bfloat(source: Source, name: str) -> bool:
    """Whether BF16 holds the numbers of a quantised tensor: its scales are powers of two, and none too small."""
    scheme = source.low[name].scheme
    if scheme.format is E2M1:
        return True
    place = source.tensors[scale_name(name)]
    least = 2.0**-124 if scheme.dialect == "ocp" else 2.0**-123  # times the smallest code: the smallest BF16, 2^-133
    for tile in tiles(matrix_of(place.span.shape), Block(1, 1), _SCALES):
        values = scale_values(source.region(place, *tile.part))
        if not bool(((values.frexp().mantissa == 0.5) & (values >= least)).all()):
            return False
    return True
