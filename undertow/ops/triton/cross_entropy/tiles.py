"""Launch configurations of linear cross-entropy, as data: keyed as those of attention are.

"rows" is that of the kernel between the products. "chunk" are the rows of which logits exist at once, in float32, and
those of which the gradients of logits do, in bfloat16. A chip that is not listed takes `DEFAULT`.
"""

from __future__ import annotations

from collections.abc import Mapping

import torch

from undertow.ops.triton.attention.tiles import architecture

Tiles = Mapping[str, int]
"""Numbers by name: what a kernel's launch takes, or rows."""

DEFAULT: Mapping[str, Tiles] = {
    # DEEP rows of LANES columns are a tile: what a lane holds of it is summed without an exchange between threads.
    "rows": {"DEEP": 8, "LANES": 1024, "STAGES": 2, "num_warps": 8},
    "scale": {"PROGRAMS": 1024, "BLOCK": 8192, "num_warps": 8},
    "chunk": {"LOGITS": 512, "GRADIENTS": 2048},
}

TILES: Mapping[str, Mapping[str, Tiles]] = {
    "sm_90": {"rows": {"DEEP": 8, "LANES": 1024, "STAGES": 1, "num_warps": 8}},
}


def tiles(device: torch.device, kernel: str) -> dict[str, int]:
    """The configuration of `kernel` on the chip of `device`."""
    return dict(TILES.get(architecture(device), {}).get(kernel, DEFAULT[kernel]))
