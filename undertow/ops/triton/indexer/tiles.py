"""Launch configurations of the indexer's kernels, as data: keyed as those of attention are.

The values of sm_90 are those measured best on an H200. A chip that is not listed takes `DEFAULT`, which fits 64 KiB of
shared memory and spills nothing.
"""

from __future__ import annotations

from collections.abc import Mapping

import torch

from undertow.ops.triton.attention.tiles import architecture

Tiles = Mapping[str, int]
"""What a kernel's launch takes by name: its own sizes, and `num_warps` (that of the choice follows from its row)."""

DEFAULT: Mapping[str, Tiles] = {
    # ENTRIES x HEADS of several tokens make a product; a program of the scores goes through BLOCK tokens.
    "scores": {"ENTRIES": 64, "HEADS": 64, "BLOCK": 16, "STAGES": 1, "num_warps": 4},
    "mass": {"ENTRIES": 64, "HEADS": 64, "CHUNK": 64, "STAGES": 1, "num_warps": 4},
    "of queries": {"ENTRIES": 64, "STAGES": 1, "num_warps": 4},
    "of keys": {"ENTRIES": 64, "STAGES": 1, "num_warps": 4},
    "measure": {"ENTRIES": 64, "CHUNK": 64, "STAGES": 1, "num_warps": 4},
    "of chosen": {"ENTRIES": 32, "STAGES": 1, "num_warps": 4},
    # Columns that a program holds in its registers, and those of a warp.
    "choose": {"HELD": 8192, "WARP": 1024},
}

_AMD: Mapping[str, Tiles] = {
    "scores": {"ENTRIES": 64, "HEADS": 64, "BLOCK": 16, "STAGES": 2, "num_warps": 4},
    "mass": {"ENTRIES": 128, "HEADS": 64, "CHUNK": 64, "STAGES": 2, "num_warps": 4},
}

TILES: Mapping[str, Mapping[str, Tiles]] = {
    "sm_90": {
        "scores": {"ENTRIES": 128, "HEADS": 128, "BLOCK": 16, "STAGES": 2, "num_warps": 4},
        "mass": {"ENTRIES": 128, "HEADS": 128, "CHUNK": 64, "STAGES": 3, "num_warps": 4},
        "of queries": {"ENTRIES": 64, "STAGES": 3, "num_warps": 4},
        "of keys": {"ENTRIES": 64, "STAGES": 3, "num_warps": 4},
        "measure": {"ENTRIES": 64, "CHUNK": 64, "STAGES": 3, "num_warps": 4},
        "of chosen": {"ENTRIES": 64, "STAGES": 1, "num_warps": 4},
        "choose": {"HELD": 16384, "WARP": 1024},
    },
    "gfx942": _AMD,
    "gfx950": _AMD,
}


def tiles(device: torch.device, kernel: str, heads: int = 64) -> dict[str, int]:
    """The configuration of `kernel` on the chip of `device` for so many heads, as the kernel takes it."""
    return configuration(architecture(device), kernel, heads)


def configuration(name: str, kernel: str, heads: int = 64) -> dict[str, int]:
    """The configuration of `kernel` on a chip of this name; HEADS of a product become whole TOKENS of `heads`."""
    tile = dict(TILES.get(name, {}).get(kernel, DEFAULT[kernel]))
    if "HEADS" in tile:
        tile["TOKENS"] = max(tile.pop("HEADS") // heads, 1)
    if "BLOCK" in tile:
        tile["BLOCK"] = max(tile["BLOCK"], tile["TOKENS"])
    return tile
