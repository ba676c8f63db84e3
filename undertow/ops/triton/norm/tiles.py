"""Launch configurations of the kernels that norm and rotate rows, as data: keyed as those of attention are.

Those of sm_90 are the best that were measured on an H200. The values of gfx942 and gfx950 are those of `DEFAULT`, for
64 lanes a warp, and not measured.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import NamedTuple

import torch

from undertow.ops.triton.attention.tiles import architecture

LONGEST = 8192
"""Numbers of the longest row that fits a program's registers."""

_WARPS = 16
"""Most warps of a program."""

DEFAULT: Mapping[str, Mapping[str, int]] = {
    # Numbers of a program's tile, at least one row; those that a warp holds; most programs, which go from tile to tile;
    # tiles that are being loaded.
    "norm": {"NUMBERS": 4096, "WARP": 1024, "PROGRAMS": 1 << 20, "STAGES": 1},
    "norm gradients": {"NUMBERS": 4096, "WARP": 1024, "PROGRAMS": 512, "STAGES": 1},
    "norm of heads": {"NUMBERS": 2048, "WARP": 1024, "PROGRAMS": 1 << 20, "STAGES": 1},
    "gradients of heads": {"NUMBERS": 2048, "WARP": 1024, "PROGRAMS": 1 << 20, "STAGES": 1},
    "rotary": {"NUMBERS": 2048, "WARP": 1024, "PROGRAMS": 1 << 20, "STAGES": 1},
}

TILES: Mapping[str, Mapping[str, Mapping[str, int]]] = {
    "sm_90": {
        "norm": {"NUMBERS": 4096, "WARP": 1024, "PROGRAMS": 1 << 20, "STAGES": 1},
        "norm gradients": {"NUMBERS": 4096, "WARP": 256, "PROGRAMS": 264, "STAGES": 3},
        "norm of heads": {"NUMBERS": 1024, "WARP": 1024, "PROGRAMS": 1 << 20, "STAGES": 1},
        "gradients of heads": {"NUMBERS": 512, "WARP": 512, "PROGRAMS": 1 << 20, "STAGES": 1},
        "rotary": {"NUMBERS": 1024, "WARP": 1024, "PROGRAMS": 1 << 20, "STAGES": 1},
    },
}


class Tile(NamedTuple):
    """How a kernel goes through `rows` of a width: `programs`, and what its launch takes by name.

    Nothing of `sizes` depends on the number of rows.
    """

    programs: int
    sizes: dict[str, int]


def tile(device: torch.device, kernel: str, rows: int, width: int) -> Tile:
    """The tile of `kernel` on the chip of `device`."""
    return shaped(configuration(architecture(device), kernel), rows, width)


def configuration(name: str, kernel: str) -> Mapping[str, int]:
    """The configuration of `kernel` on a chip of this name."""
    return TILES.get(name, {}).get(kernel, DEFAULT[kernel])


def shaped(given: Mapping[str, int], rows: int, width: int) -> Tile:
    """A configuration for `rows` of `width` numbers, which become the next power of two."""
    block = 1 << max(width - 1, 1).bit_length()
    together = max(given["NUMBERS"] // block, 1)
    warps = min(max(together * block // given["WARP"], 1), _WARPS)
    sizes = {"D": width, "BLOCK": block, "ROWS": together, "STAGES": given["STAGES"], "num_warps": warps}
    return Tile(min(-(-rows // together), given["PROGRAMS"]), sizes)
