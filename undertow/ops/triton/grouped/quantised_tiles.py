"""Launch configurations of the products with quantised weights, as data: keyed as those of attention are.

`BM` and `BN` are rows and columns of a program's tile, `BK` what it takes of the sum at a time, loaded `STAGES` - 1
steps ahead; an FP8 step stays within a block of 128. `GROUP` tiles below each other are taken before the next column.
`TURNED` multiplies the matrix by the rows and not the rows by the matrix: what is widened is then the operand that a
matrix unit takes from registers. With `BM` 8 that is the NVIDIA unit of a warp, which needs no waiting for others.
`few`, `several`, `some` and `many` say how many rows an expert has on average, see `kind`. A chip that is not listed
takes `DEFAULT`, which fits 64 KiB of shared memory.
"""

from __future__ import annotations

from collections.abc import Mapping
from functools import cache

import torch

from undertow.ops.triton.attention.tiles import architecture

Tiles = Mapping[str, int]
"""What a kernel's launch takes by name."""

_SMALL: Tiles = {"BM": 16, "BN": 64, "BK": 128, "GROUP": 8, "TURNED": 0, "STAGES": 2, "num_warps": 4}

DEFAULT: Mapping[str, Tiles] = {
    "fp8, few": _SMALL,
    "fp8, several": {**_SMALL, "BM": 32},
    "fp8, some": {**_SMALL, "BM": 64},
    "fp8, many": {**_SMALL, "BM": 128, "BN": 128, "BK": 64, "num_warps": 8},
    "mxfp4, few": _SMALL,
    "mxfp4, several": {**_SMALL, "BM": 32},
    "mxfp4, some": {**_SMALL, "BM": 64},
    "mxfp4, many": {**_SMALL, "BM": 128, "BN": 128, "BK": 64, "num_warps": 8},
}

TILES: Mapping[str, Mapping[str, Tiles]] = {
    "sm_90": {
        "fp8, few": {**_SMALL, "STAGES": 6, "num_warps": 2},
        "fp8, several": {**_SMALL, "TURNED": 1, "STAGES": 4, "num_warps": 2},
        "fp8, some": {**_SMALL, "BM": 64, "BN": 128, "TURNED": 1, "STAGES": 3, "num_warps": 8},
        "fp8, many": {**_SMALL, "BM": 128, "BN": 128, "TURNED": 1, "STAGES": 3, "num_warps": 8},
        "mxfp4, few": {**_SMALL, "BM": 8, "BN": 128, "BK": 256, "TURNED": 1, "STAGES": 3},
        "mxfp4, several": {**_SMALL, "BK": 256, "TURNED": 1, "STAGES": 3, "num_warps": 2},
        "mxfp4, some": {**_SMALL, "BM": 64, "BN": 256, "TURNED": 1, "STAGES": 3, "num_warps": 8},
        "mxfp4, many": {**_SMALL, "BM": 128, "BN": 256, "TURNED": 1, "STAGES": 4, "num_warps": 8},
    },
}


def kind(rows: int, experts: int) -> str:
    """`few` up to 3 rows an expert on average, `several` up to 16, `some` up to 64, else `many`."""
    for name, most in (("few", 3), ("several", 16), ("some", 64)):
        if rows <= most * experts:
            return name
    return "many"


def tiles(device: torch.device, kernel: str) -> Tiles:
    """The configuration of `kernel` on the chip of `device`."""
    return TILES.get(architecture(device), {}).get(kernel, DEFAULT[kernel])


@cache
def multiprocessors(device: torch.device) -> int:
    """Of the GPU; off a GPU any number does."""
    return torch.cuda.get_device_properties(device).multi_processor_count if device.type == "cuda" else 4
