"""Launch configurations of the pooling kernels, as data: keyed as those of attention are.

A chip that is not listed takes `DEFAULT`; none of these needs more than a few KiB of shared memory.
"""

from __future__ import annotations

from collections.abc import Mapping

import torch

from undertow.ops.triton.attention.tiles import architecture

Tiles = Mapping[str, int]
"""What a kernel's launch takes by name. ELEMENTS of a window a program holds; PROGRAMS share the windows; BR rows
and BC channels, BP parts and BLOCK numbers are a tile."""

DEFAULT: Mapping[str, Tiles] = {
    "forward": {"ELEMENTS": 4096, "num_warps": 4},
    "backward": {"ELEMENTS": 4096, "PROGRAMS": 128, "num_warps": 8},
    "rows": {"BR": 16, "BC": 128, "num_warps": 4},
    "sum": {"BP": 32, "BLOCK": 64, "num_warps": 4},
}

TILES: Mapping[str, Mapping[str, Tiles]] = {
    "sm_90": {"backward": {"ELEMENTS": 4096, "PROGRAMS": 256, "num_warps": 8}},
}


def tiles(device: torch.device, kernel: str) -> dict[str, int]:
    """The configuration of `kernel` on the chip of `device`."""
    return dict(TILES.get(architecture(device), {}).get(kernel, DEFAULT[kernel]))
