"""Launch configurations of the hyper-connections' kernels, as data: keyed as those of attention are.

Those of sm_90 are chosen for an H200. A chip that is not listed takes `DEFAULT`, which fits 64 KiB of shared memory and
spills nothing.
"""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor

from undertow.ops.triton.attention.tiles import architecture

Tiles = Mapping[str, int]
"""What a kernel's launch takes by name: its own sizes, and `num_warps`."""

STREAMS = (2, 4)
"""Numbers of streams that the kernels take."""

DEFAULT: Mapping[str, Tiles] = {
    "expand": {"BD": 1024, "num_warps": 4},
    "expand back": {"BD": 1024, "num_warps": 4},
    # SLAB tokens at a time are projected and then summed, so that the second reading finds some of them in the cache.
    "project": {"SLAB": 4096, "PROGRAMS": 512, "M": 64, "BK": 64, "num_warps": 4, "num_stages": 2},
    # COLUMNS of a row are a warp's. TOKENS have their coefficients made together. PROGRAMS share the tokens.
    "collapse": {"TOKENS": 4, "COLUMNS": 1024},
    "slopes": {"COLUMNS": 512, "PROGRAMS": 264},
    "spread": {"PROGRAMS": 512, "M": 32, "BD": 64, "num_warps": 4},
    "finish": {"BLOCK": 1024, "COLUMNS": 64, "num_warps": 4},
}

TILES: Mapping[str, Mapping[str, Tiles]] = {
    "sm_90": {
        "project": {"SLAB": 4096, "PROGRAMS": 256, "M": 128, "BK": 64, "num_warps": 4, "num_stages": 4},
        # Two programs a multiprocessor.
        "slopes": {"COLUMNS": 512, "PROGRAMS": 264, "maxnreg": 128},
        "spread": {"PROGRAMS": 264, "M": 64, "BD": 64, "num_warps": 4},
    },
}


def tiles(device: torch.device, kernel: str) -> dict[str, int]:
    """The configuration of `kernel` on the chip of `device`."""
    return configuration(architecture(device), kernel)


def configuration(name: str, kernel: str) -> dict[str, int]:
    """The configuration of `kernel` on a chip of this name."""
    return dict(TILES.get(name, {}).get(kernel, DEFAULT[kernel]))


def by_tokens(streams: Tensor) -> Tensor:
    """`streams [T, n, d]` with rows that lie in one piece, copied only if they do not."""
    return streams if streams.stride(2) == 1 else streams.contiguous()
