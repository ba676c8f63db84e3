"""Launch configurations of the permutation's kernels, as data: keyed as those of attention are. Those of
sm_90 are the best that were measured on an H200, where most differ by little.

`count` and `place` take BLOCK choices at a time, `place` OTHERS of them against all, and the counts of PARTS programs,
of which there are SPANS at most, at a time; EARLY ones are launched before the kernel before them ends; the
kernels of rows take COLUMNS of a token.
"""

from __future__ import annotations

from collections.abc import Mapping

import torch

from undertow.ops.triton.attention.tiles import architecture

Tiles = Mapping[str, int]
"""What a kernel's launch takes by name: its own sizes, and `num_warps`."""

DEFAULT: Mapping[str, Tiles] = {
    "count": {"BLOCK": 256, "EARLY": 0, "num_warps": 4},
    "place": {"SPANS": 128, "BLOCK": 256, "OTHERS": 64, "PARTS": 32, "STAGES": 1, "EARLY": 0, "num_warps": 8},
    "spread": {"COLUMNS": 1024, "num_warps": 4},
    "sum": {"COLUMNS": 1024, "num_warps": 4},
    "weights": {"BLOCK": 512, "num_warps": 4},
}

TILES: Mapping[str, Mapping[str, Tiles]] = {
    "sm_90": {
        "count": {"BLOCK": 256, "EARLY": 1, "num_warps": 4},
        "place": {"SPANS": 128, "BLOCK": 128, "OTHERS": 32, "PARTS": 32, "STAGES": 2, "EARLY": 1, "num_warps": 8},
    },
}


def tiles(device: torch.device, kernel: str) -> Tiles:
    """The configuration of `kernel` on the chip of `device`."""
    return TILES.get(architecture(device), {}).get(kernel, DEFAULT[kernel])
