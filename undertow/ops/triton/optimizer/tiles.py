"""Launch configurations of the optimizer's kernels, as data: keyed as those of attention are."""

from __future__ import annotations

from collections.abc import Mapping

import torch

from undertow.ops.triton.attention.tiles import architecture

Tiles = Mapping[str, int]
"""What a kernel's launch takes by name: CHUNK elements a program, or BM x BN of a product, BN a
multiple of BM, in steps of BK; and `num_warps`."""

DEFAULT: Mapping[str, Tiles] = {
    "adamw": {"CHUNK": 2048, "num_warps": 8},
    "muon": {"CHUNK": 2048, "num_warps": 8},
    "scale": {"CHUNK": 4096, "num_warps": 8},
    "symmetric": {"BM": 128, "BN": 128, "BK": 32, "STAGES": 1, "num_warps": 8},
}

_CDNA: Mapping[str, Tiles] = {"symmetric": {"BM": 128, "BN": 128, "BK": 32, "STAGES": 2, "num_warps": 8}}

TILES: Mapping[str, Mapping[str, Tiles]] = {
    "gfx942": _CDNA,
    "gfx950": _CDNA,
    # The best that were measured on an H200.
    "sm_90": {
        "adamw": {"CHUNK": 1024, "num_warps": 4},
        "symmetric": {"BM": 128, "BN": 128, "BK": 64, "STAGES": 4, "num_warps": 8},
    },
}


def tiles(device: torch.device, kernel: str) -> Tiles:
    """The configuration of `kernel` on the chip of `device`."""
    return TILES.get(architecture(device), {}).get(kernel, DEFAULT[kernel])
