"""Launch configurations of the SwiGLU kernels, as data: keyed as those of attention are."""

from __future__ import annotations

from collections.abc import Mapping

import torch
import triton

from undertow.ops.triton.attention.tiles import architecture

Tiles = Mapping[str, int]
"""Rows of a program, the most columns it takes at a time, stages of the loop over them, and numbers of a thread of 32
to a warp, from which `num_warps` follows."""

DEFAULT: Mapping[str, Tiles] = {
    "forward": {"ROWS": 1, "COLUMNS": 2048, "STAGES": 1, "NUMBERS": 8},
    "backward": {"ROWS": 1, "COLUMNS": 2048, "STAGES": 1, "NUMBERS": 8},
}

TILES: Mapping[str, Mapping[str, Tiles]] = {
    # The best that were measured on an H200.
    "sm_90": {
        "forward": {"ROWS": 1, "COLUMNS": 2048, "STAGES": 1, "NUMBERS": 16},
        "backward": {"ROWS": 1, "COLUMNS": 1024, "STAGES": 1, "NUMBERS": 8},
    },
}


def tiles(device: torch.device, kernel: str, width: int) -> dict[str, int]:
    """The configuration of `kernel` on the chip of `device` for rows of `width` numbers, as the kernel takes it."""
    tile = dict(TILES.get(architecture(device), {}).get(kernel, DEFAULT[kernel]))
    columns = min(tile["COLUMNS"], max(triton.next_power_of_2(width), 16))
    while columns > 512 and width % columns:  # a last piece costs as much as a full one
        columns //= 2
    warps = max(tile["ROWS"] * columns // (32 * tile.pop("NUMBERS")), 1)
    return {**tile, "COLUMNS": columns, "num_warps": warps}
