"""Launch configurations of the batch-invariant products, as data: keyed as those of attention are.

`ROWS` are the fewest rows that a tile is for. `BM` and `BN` are rows and columns of a program's tile, `BK` what it
takes of the sum at a time. `TURNED` multiplies the weight by the rows and not the rows by the weight, which gives few
rows the side of a matrix unit that may be short. `GROUP`, `PARTS`, `PROGRAMS` and `FLATTEN` are those of the grouped
products.

A chip has several forms only where all of them sum in the same steps, and a test there finds the same bits: on sm_90 a
step is 16 numbers of bfloat16, which the matrix instructions of a warp and of a warpgroup sum alike, whatever the tile.
Elsewhere the steps of a matrix unit follow from the tile's shape, so that there is one form for all numbers of rows.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch
import triton

from undertow.ops.triton.attention.tiles import architecture
from undertow.ops.triton.grouped.tiles import Tiles, multiprocessors

_SMALL: Tiles = {
    "ROWS": 1, "BM": 64, "BN": 64, "BK": 32, "TURNED": 0, "GROUP": 8, "PARTS": 1, "PROGRAMS": 0,
    "FLATTEN": 0, "num_stages": 2, "num_warps": 4,
}  # fmt: skip

DEFAULT: Sequence[Tiles] = (_SMALL,)

_LARGE: Tiles = {
    "ROWS": 65, "BM": 128, "BN": 256, "BK": 64, "TURNED": 0, "GROUP": 8, "PARTS": 4, "PROGRAMS": 1,
    "FLATTEN": 1, "num_stages": 3, "num_warps": 8,
}  # fmt: skip
_MEDIUM: Tiles = {**_SMALL, "ROWS": 65, "BM": 128, "BN": 128, "BK": 64, "num_stages": 4}
_FEW: Tiles = {**_SMALL, "BM": 16, "BK": 128, "TURNED": 1, "num_stages": 4}

TILES: Mapping[str, Sequence[Tiles]] = {
    "sm_90": (
        _LARGE,
        _MEDIUM,
        {**_MEDIUM, "BM": 64},
        {**_FEW, "ROWS": 33, "BM": 64, "num_stages": 3},
        {**_FEW, "ROWS": 17, "BM": 32},
        _FEW,
        {**_FEW, "BN": 32, "BK": 256, "num_warps": 2},
        {**_FEW, "BN": 16, "BK": 256, "TURNED": 0, "num_warps": 1},
    ),
}


def forms(device: torch.device) -> Sequence[Tiles]:
    """The forms of a product on the chip of `device`, the largest tile first."""
    return TILES.get(architecture(device), DEFAULT)


def tiles(device: torch.device, groups: int, rows: int, columns: int) -> Tiles:
    """The form for `groups` products of `rows` x `columns`: the first that is for so many rows and has a tile for most
    of the multiprocessors, or the last."""
    known = forms(device)
    for tile in known[:-1]:
        there = groups * triton.cdiv(rows, tile["BM"]) * triton.cdiv(columns, tile["BN"])
        if tile["ROWS"] <= rows and 8 * there >= 7 * multiprocessors(device):
            return tile
    return known[-1]
