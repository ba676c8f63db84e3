"""Launch configurations of the permutation's kernels, as data: keyed as those of attention are. Those of
sm_90 are the best that were measured on an H200, where most differ by little.

`count` and `place` take BLOCK choices at a time, `place` OTHERS of them against all, and the counts of PARTS
programs at a time; the kernels of rows take COLUMNS of a token.
"""

from __future__ import annotations

from collections.abc import Mapping

import torch

from undertow.ops.triton.attention.tiles import architecture

Tiles = Mapping[str, int]
"""What a kernel's launch takes by name: its own sizes, and `num_warps`."""

DEFAULT: Mapping[str, Tiles] = {
    "count": {"BLOCK": 256, "num_warps": 4},
    "place": {"BLOCK": 256, "OTHERS": 64, "PARTS": 32, "STAGES": 1, "num_warps": 8},
    "spread": {"COLUMNS": 1024, "num_warps": 4},
    "sum": {"COLUMNS": 1024, "num_warps": 4},
    "weights": {"BLOCK": 512, "num_warps": 4},
}

TILES: Mapping[str, Mapping[str, Tiles]] = {
    "sm_90": {"place": {"BLOCK": 128, "OTHERS": 32, "PARTS": 32, "STAGES": 2, "num_warps": 8}},
}


def tiles(device: torch.device, kernel: str) -> Tiles:
    """The configuration of `kernel` on the chip of `device`."""
    return TILES.get(architecture(device), {}).get(kernel, DEFAULT[kernel])
