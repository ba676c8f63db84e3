"""Launch configurations of the grouped products, as data: keyed as those of attention are.

`BM` and `BN` are rows and columns of a program's tile, `BK` what it takes of the sum at a time. `GROUP` tiles below
each other are taken before the next column. `PARTS` a tile is written in. `PROGRAMS` on a multiprocessor go through
all tiles, 0 for a program per tile; `FLATTEN` makes one loop of tiles and steps, so that the loads of the next tile
begin before the last one is written. `outer, few rows` is for sums so short that a tile is mostly written, which
another program's product then hides. A chip that is not listed takes `DEFAULT`, which fits 64 KiB of shared memory.

`product` and `turned` have one tile for any number of rows: a row's bits must not follow from it.
"""

from __future__ import annotations

from collections.abc import Mapping
from functools import cache

import torch

from undertow.ops.triton.attention.tiles import architecture

Tiles = Mapping[str, int]
"""What a kernel's launch takes by name, and `PROGRAMS`, which makes its grid."""

_SMALL: Tiles = {
    "BM": 128, "BN": 128, "BK": 32, "GROUP": 8, "PARTS": 2, "PROGRAMS": 0, "FLATTEN": 0, "num_stages": 2,
    "num_warps": 8,
}  # fmt: skip

DEFAULT: Mapping[str, Tiles] = {
    "product": _SMALL,
    "turned": _SMALL,
    "outer": _SMALL,
    "outer, few rows": _SMALL,
    "outer added": {**_SMALL, "BM": 64, "BN": 64},
}

_WHOLE: Tiles = {**_SMALL, "PARTS": 1}

_AMD: Mapping[str, Tiles] = {
    "product": _WHOLE,
    "turned": _WHOLE,
    "outer": _WHOLE,
    "outer, few rows": _WHOLE,
    "outer added": _SMALL,
}

_LARGE: Tiles = {
    "BM": 128, "BN": 256, "BK": 64, "GROUP": 8, "PARTS": 2, "PROGRAMS": 1, "FLATTEN": 1, "num_stages": 4,
    "num_warps": 8,
}  # fmt: skip

TILES: Mapping[str, Mapping[str, Tiles]] = {
    "gfx942": _AMD,
    "gfx950": _AMD,
    "sm_90": {
        "product": {**_LARGE, "num_stages": 3},
        "turned": {**_LARGE, "num_stages": 3},
        "outer": {**_LARGE, "GROUP": 4},
        "outer, few rows": {**_LARGE, "BN": 128, "BK": 32, "GROUP": 2, "PROGRAMS": 2, "num_warps": 4},
        "outer added": {**_LARGE, "PARTS": 4, "num_stages": 3},
    },
}

FEW = 256
"""Rows an expert, on average, up to which they are few."""


def tiles(device: torch.device, kernel: str) -> Tiles:
    """The configuration of `kernel` on the chip of `device`."""
    return TILES.get(architecture(device), {}).get(kernel, DEFAULT[kernel])


@cache
def multiprocessors(device: torch.device) -> int:
    """Of the GPU; off a GPU any number does."""
    return torch.cuda.get_device_properties(device).multi_processor_count if device.type == "cuda" else 4


def programs(device: torch.device, tile: Tiles, most: int) -> int:
    """How many programs share `most` tiles."""
    shared = tile["PROGRAMS"] * multiprocessors(device)
    return min(shared, most) if shared else most
