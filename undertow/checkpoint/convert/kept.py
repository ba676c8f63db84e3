"""Quantising under scales that are known, so that numbers which came from FP8 or FP4 get their very bytes back."""

from __future__ import annotations

import torch
from torch import Tensor

from undertow.quant.blocks import Block, join, split, tiles
from undertow.quant.codec import decode, encode
from undertow.quant.formats import E2M1, E4M3
from undertow.quant.packing import pack, unpack
from undertow.quant.quantise import quantise
from undertow.quant.quantised import Quantised
from undertow.quant.scales import doubled, scale_values
from undertow.quant.scheme import Scheme


def quantise_under(values: Tensor, scheme: Scheme, kept: Tensor) -> Quantised:
    """`values` `[R, C]` in `scheme`, a block under its scale in `kept` (in OCP's sense) where that gives it back.

    It gives back what, rounded to the type of `values`, is equal: BF16 rounds the products of scales that are no powers
    of two. Other blocks get the scale that `quantise` makes. Negative zero keeps its sign where the format has one.
    `kept` has the type of the scheme's scales.
    """
    halves = 2 if scheme.format is E2M1 else 1
    codes = torch.empty((values.shape[0], values.shape[1] // halves), dtype=torch.uint8)
    scales = torch.empty_like(kept)
    for tile in tiles((values.shape[0], values.shape[1]), scheme.block):
        rows, columns = tile.part
        made = _tile(values[tile.part], scheme, kept[tile.grid])
        codes[rows, columns.start // halves : columns.stop // halves] = made[0]
        scales[tile.grid] = made[1]
    if scheme.dialect == "fnuz":
        codes, scales = codes.masked_fill(codes == 0x80, 0), doubled(scales)
    return Quantised(codes.view(scheme.format.dtype), scales, scheme.block)


def _tile(values: Tensor, scheme: Scheme, kept: Tensor) -> tuple[Tensor, Tensor]:
    """Codes, packed if FP4, and scales in OCP's sense."""
    block, format = scheme.block, E2M1 if scheme.format is E2M1 else E4M3
    shape = (values.shape[0], values.shape[1])
    found = scale_values(kept)
    usable = (found > 0) & found.isfinite()
    numbers, grid = split(values.float(), block), found.where(usable, 1)[:, None, :, None]
    codes = encode(join(numbers / grid, shape), format)
    back = (split(decode(codes, format), block) * grid).to(values.dtype).float()
    same = (back == numbers).all(3).all(1) & usable
    scales = kept
    if not bool(same.all()):
        fresh = quantise(values, scheme.in_dialect("ocp"))
        held = torch.int32 if kept.dtype is torch.float32 else torch.uint8
        scales = torch.where(same, kept.view(held), fresh.scales.view(held)).view(kept.dtype)
        codes = torch.where(join(same[:, None, :, None].expand(numbers.shape), shape), codes, _codes(fresh))
    return (pack(codes) if format is E2M1 else codes), scales


def _codes(tensor: Quantised) -> Tensor:
    payload = tensor.payload.view(torch.uint8)
    return unpack(payload) if tensor.scheme.format is E2M1 else payload


def grid_part(rows: slice, columns: slice, block: Block) -> tuple[slice, slice]:
    """The scales of whole blocks, for a part of the numbers."""
    if block.rows is None or block.columns is None:
        return slice(0, 1), slice(0, 1)
    return (
        slice(rows.start // block.rows, -(-rows.stop // block.rows)),
        slice(columns.start // block.columns, -(-columns.stop // block.columns)),
    )
