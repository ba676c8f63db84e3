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
    # SLAB tokens at a time are projected, M of them and BK columns by STAGES, in about PROGRAMS programs, and then
    # read, TOKENS by a program, COLUMNS of a row by a warp; AHEAD are the numbers that it may have under way.
    "read": {
        **{"SLAB": 4096, "PROGRAMS": 512, "M": 64, "BK": 64, "STAGES": 2},
        **{"TOKENS": 4, "COLUMNS": 1024, "AHEAD": 0},
    },
    # PROGRAMS share the tokens; AHEAD as above. TOGETHER streams are a program's.
    "slopes": {"COLUMNS": 512, "PROGRAMS": 264, "AHEAD": 0},
    "spread": {"PROGRAMS": 512, "TOGETHER": 1, "M": 32, "BD": 64, "STAGES": 1, "num_warps": 4},
    "finish": {"BLOCK": 1024, "COLUMNS": 32, "num_warps": 4},
}

TILES: Mapping[str, Mapping[str, Tiles]] = {
    "sm_90": {
        "read": {
            **{"SLAB": 4096, "PROGRAMS": 256, "M": 128, "BK": 64, "STAGES": 4},
            **{"TOKENS": 8, "COLUMNS": 512, "AHEAD": 32768},
        },
        # Two programs a multiprocessor.
        "slopes": {"COLUMNS": 512, "PROGRAMS": 264, "AHEAD": 40960, "maxnreg": 128},
        "spread": {"PROGRAMS": 264, "TOGETHER": 2, "M": 32, "BD": 64, "STAGES": 3, "num_warps": 4},
    },
}


def tiles(device: torch.device, kernel: str) -> dict[str, int]:
    """The configuration of `kernel` on the chip of `device`."""
    return configuration(architecture(device), kernel)


def configuration(name: str, kernel: str) -> dict[str, int]:
    """The configuration of `kernel` on a chip of this name."""
    return dict(TILES.get(name, {}).get(kernel, DEFAULT[kernel]))


def stages(ahead: int, numbers: int) -> int:
    """Stages of a loop that may have `ahead` numbers under way and loads so many at each step: 1 if it loads when it
    needs them."""
    return 1 + min(ahead // numbers, 2)


def by_tokens(streams: Tensor) -> Tensor:
    """`streams [T, n, d]` with rows that lie in one piece, copied only if they do not."""
    return streams if streams.stride(2) == 1 else streams.contiguous()
