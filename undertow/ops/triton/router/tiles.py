"""Launch configurations of the router's kernels, as data: keyed as those of attention are.

A program takes ROWS tokens. A warp that has a whole token to itself finds a maximum in one instruction on NVIDIA's
chips. EARLY ones are launched before the kernel before them ends, and wait for that. The values of sm_90 are the best
that were measured on an H200.
"""

from __future__ import annotations

from collections.abc import Mapping

import torch

from undertow.ops.triton.attention.tiles import architecture

Tiles = Mapping[str, int]
"""What a kernel's launch takes by name: its own sizes, and `num_warps`."""

DEFAULT: Mapping[str, Tiles] = {
    "forward": {"ROWS": 1, "EARLY": 0, "num_warps": 1},
    "backward": {"ROWS": 4, "num_warps": 4},
}

TILES: Mapping[str, Mapping[str, Tiles]] = {
    "sm_90": {"forward": {"ROWS": 1, "EARLY": 1, "num_warps": 1}, "backward": {"ROWS": 1, "num_warps": 1}},
}


def tiles(device: torch.device, kernel: str) -> Tiles:
    """The configuration of `kernel` on the chip of `device`."""
    return TILES.get(architecture(device), {}).get(kernel, DEFAULT[kernel])
