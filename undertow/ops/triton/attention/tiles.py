"""Launch configurations of the attention kernels: tile sizes, pipeline stages and warps, as data.

Keyed by architecture, then by kernel, in some cases with the kind of call. The values of sm_90 are those measured best
on an H200; those of gfx942 and gfx950 fit their shared memory and spill nothing, and are not measured. A chip that is
not listed takes `DEFAULT`, which fits all of these.
"""

from __future__ import annotations

from collections.abc import Mapping
from functools import cache

import torch

from undertow.quant.kernels import architecture as of_gpu

Tiles = Mapping[str, int]
"""What a kernel's launch takes by name: its own sizes (see `undertow.ops.triton.attention`), and `num_warps`."""

ROWS = 128
"""Rows (token x head) of a forward program, and those that share what is written of entries: whole tokens."""

DEFAULT: Mapping[str, Tiles] = {
    "window": {"BD": 32, "BN": 64, "STAGES": 1, "STAGES2": 1, "num_warps": 8},
    "window with entries": {"BD": 32, "BN": 64, "STAGES": 1, "STAGES2": 1, "num_warps": 8},
    "window kept": {"BD": 32, "STAGES": 1, "num_warps": 8},
    "window kept, one token": {"BD": 32, "STAGES": 1, "num_warps": 8},
    "pool": {"BK": 128, "BD": 32, "STAGES": 1, "num_warps": 8},
    "pool, gather": {"BK": 64, "BD": 32, "STAGES": 1, "num_warps": 4},
    "pool, gather, 128 heads": {"BK": 64, "BD": 32, "STAGES": 1, "num_warps": 8},
    "settle": {"num_warps": 4},
    "mix": {"BK": 32, "BN": 128, "STAGES": 1, "num_warps": 8},
    "mix, gather": {"BK": 32, "BN": 128, "STAGES": 1, "num_warps": 4},
    "mix, gather, 128 heads": {"BK": 32, "BN": 128, "STAGES": 1, "num_warps": 8},
    "window scores": {"M": 64, "BD": 32, "BN": 64, "STAGES": 1, "STAGES2": 2, "num_warps": 8},
    "window scores with entries": {"M": 32, "BD": 32, "BN": 64, "STAGES": 1, "STAGES2": 2, "num_warps": 4},
    "window scores, kept": {"M": 64, "BD": 32, "BN": 64, "STAGES": 1, "STAGES2": 2, "num_warps": 8},
    "window keys": {"BN": 128, "BH": 32, "STAGES": 1, "num_warps": 8},
    "window keys with entries": {"BN": 128, "BH": 32, "STAGES": 1, "num_warps": 8},
    "pool scores": {"M": 64, "BD": 32, "STAGES": 1, "num_warps": 8},
    "pool queries": {"BK": 32, "BN": 128, "STAGES": 1, "num_warps": 8},
    "pool keys": {"BN": 128, "BH": 32, "STAGES": 1, "num_warps": 8},
    "gather scores": {"BK": 64, "BD": 32, "BN": 64, "STAGES": 1, "STAGES2": 2, "num_warps": 4},
    "gather scores, 128 heads": {"BK": 64, "BD": 32, "BN": 64, "STAGES": 1, "STAGES2": 2, "num_warps": 8},
    "gather queries": {"BK": 32, "BN": 128, "STAGES": 1, "num_warps": 4},
    "gather queries, 128 heads": {"BK": 32, "BN": 128, "STAGES": 1, "num_warps": 8},
}

_CDNA: Mapping[str, Tiles] = {
    "window": {"BD": 32, "BN": 64, "STAGES": 2, "STAGES2": 2, "num_warps": 8},
    "window with entries": {"BD": 32, "BN": 64, "STAGES": 2, "STAGES2": 2, "num_warps": 8},
    "window kept": {"BD": 32, "STAGES": 2, "num_warps": 8},
    "window kept, one token": {"BD": 32, "STAGES": 2, "num_warps": 8},
    "pool": {"BK": 128, "BD": 32, "STAGES": 2, "num_warps": 8},
    "pool, gather": {"BK": 64, "BD": 32, "STAGES": 2, "num_warps": 4},
    "pool, gather, 128 heads": {"BK": 64, "BD": 32, "STAGES": 2, "num_warps": 8},
    "mix": {"BK": 32, "BN": 128, "STAGES": 2, "num_warps": 8},
    "mix, gather": {"BK": 32, "BN": 128, "STAGES": 2, "num_warps": 4},
    "mix, gather, 128 heads": {"BK": 32, "BN": 128, "STAGES": 2, "num_warps": 8},
    "window scores": {"M": 64, "BD": 32, "BN": 64, "STAGES": 2, "STAGES2": 2, "num_warps": 8},
    "window scores with entries": {"M": 32, "BD": 32, "BN": 64, "STAGES": 2, "STAGES2": 2, "num_warps": 4},
    "window scores, kept": {"M": 64, "BD": 32, "BN": 64, "STAGES": 2, "STAGES2": 2, "num_warps": 8},
    "window keys": {"BN": 128, "BH": 32, "STAGES": 2, "num_warps": 8},
    "window keys with entries": {"BN": 128, "BH": 32, "STAGES": 1, "num_warps": 8},
    "pool scores": {"M": 64, "BD": 32, "STAGES": 2, "num_warps": 8},
    "pool queries": {"BK": 32, "BN": 128, "STAGES": 2, "num_warps": 8},
    "pool keys": {"BN": 128, "BH": 32, "STAGES": 2, "num_warps": 8},
    "gather scores": {"BK": 64, "BD": 32, "BN": 64, "STAGES": 2, "STAGES2": 2, "num_warps": 4},
    "gather scores, 128 heads": {"BK": 64, "BD": 32, "BN": 64, "STAGES": 2, "STAGES2": 2, "num_warps": 8},
    "gather queries": {"BK": 32, "BN": 128, "STAGES": 2, "num_warps": 4},
    "gather queries, 128 heads": {"BK": 32, "BN": 128, "STAGES": 2, "num_warps": 8},
}

TILES: Mapping[str, Mapping[str, Tiles]] = {
    "gfx942": _CDNA,
    "gfx950": _CDNA,
    "sm_90": {
        # Two programs of two tokens on a multiprocessor.
        "window": {"BD": 64, "BN": 128, "STAGES": 3, "STAGES2": 2, "num_warps": 4},
        "window with entries": {"BD": 32, "BN": 64, "STAGES": 4, "STAGES2": 2, "num_warps": 4},
        "window kept": {"BD": 64, "STAGES": 3, "num_warps": 8},
        "window kept, one token": {"BD": 64, "STAGES": 2, "num_warps": 4},
        "pool": {"BK": 128, "BD": 64, "STAGES": 3, "num_warps": 8},
        "pool, gather": {"BK": 128, "BD": 64, "STAGES": 3, "num_warps": 4},
        "pool, gather, 128 heads": {"BK": 128, "BD": 64, "STAGES": 3, "num_warps": 8},
        "mix": {"BK": 32, "BN": 128, "STAGES": 4, "num_warps": 4},
        "mix, gather": {"BK": 32, "BN": 256, "STAGES": 3, "num_warps": 4},
        "mix, gather, 128 heads": {"BK": 32, "BN": 128, "STAGES": 4, "num_warps": 4},
        # Two programs on a multiprocessor here too.
        "window scores": {"M": 64, "BD": 32, "BN": 128, "STAGES": 5, "STAGES2": 2, "num_warps": 4},
        "window scores with entries": {"M": 64, "BD": 32, "BN": 128, "STAGES": 4, "STAGES2": 2, "num_warps": 4},
        "window scores, kept": {"M": 64, "BD": 32, "BN": 128, "STAGES": 5, "STAGES2": 2, "num_warps": 4},
        "window keys": {"BN": 128, "BH": 32, "STAGES": 3, "num_warps": 4},
        "window keys with entries": {"BN": 256, "BH": 32, "STAGES": 3, "num_warps": 8},
        "pool scores": {"M": 64, "BD": 64, "STAGES": 2, "num_warps": 4},
        "pool queries": {"BK": 32, "BN": 128, "STAGES": 4, "num_warps": 4},
        "pool keys": {"BN": 128, "BH": 32, "STAGES": 3, "num_warps": 4},
        "gather scores": {"BK": 128, "BD": 64, "BN": 64, "STAGES": 3, "STAGES2": 2, "num_warps": 8},
        "gather scores, 128 heads": {"BK": 64, "BD": 32, "BN": 64, "STAGES": 3, "STAGES2": 2, "num_warps": 8},
        "gather queries": {"BK": 32, "BN": 256, "STAGES": 3, "num_warps": 4},
        "gather queries, 128 heads": {"BK": 32, "BN": 128, "STAGES": 4, "num_warps": 4},
    },
}


@cache
def architecture(device: torch.device) -> str:
    """`sm_90`, `gfx942`, ... for a GPU, "" for another device."""
    return of_gpu(device) if device.type == "cuda" else ""


def tiles(device: torch.device, kernel: str) -> Tiles:
    """The configuration of `kernel` on the chip of `device`."""
    return configuration(architecture(device), kernel)


def configuration(name: str, kernel: str) -> Tiles:
    """The configuration of `kernel` on a chip of this name."""
    return TILES.get(name, {}).get(kernel, DEFAULT[kernel])


def dividing(size: int, width: int) -> int:
    """The largest power of two up to `size` that divides `width`: columns of a head that a tile takes at a time."""
    return min(size, width & -width)
