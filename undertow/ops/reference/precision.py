"""The accumulation type of the reference operators, and elementary functions whose bits depend on one row alone."""

from __future__ import annotations

import torch
from torch import Tensor


def wide(x: Tensor) -> Tensor:
    """`x` in the type the references compute in: float64 stays, everything else becomes float32."""
    return x if x.dtype == torch.float64 else x.float()


def twinned(rows: Tensor) -> Tensor:
    """`rows [N, D]`, a lone one twice: torch may cut the sum of one long row among its threads, of several never."""
    return rows.expand(2, -1) if len(rows) == 1 else rows


def sigmoid(x: Tensor) -> Tensor:
    """Logistic function from `exp` alone: torch's own gives a value other last bits at a vector's tail than inside
    it."""
    return 1.0 / (1.0 + torch.exp(-x))
