"""Products of bfloat16 matrices by the matrix library, summed in float32 and rounded once to the type of the result."""

from __future__ import annotations

import torch
from torch import Tensor


def product(a: Tensor, b: Tensor, out: Tensor, *, add: bool = False, factor: float = 1.0) -> None:
    """`out [M, N]`, bfloat16 or float32, becomes `a [M, K] @ b [K, N]` times `factor`, with `add` itself plus that."""
    if a.device.type == "cpu":
        # Torch has no product of this kind here.
        exact = (a.float() @ b.float()).mul_(factor)
        out.copy_(exact.add_(out) if add else exact)
    elif out.dtype == a.dtype:
        torch.addmm(out, a, b, beta=float(add), alpha=factor, out=out)  # a beta of 0 does not read
    elif not add and factor == 1.0:
        torch.mm(a, b, out_dtype=out.dtype, out=out)
    else:
        torch.addmm(out, a, b, out_dtype=out.dtype, beta=float(add), alpha=factor, out=out)


def matrix(rows: int, columns: int, dtype: torch.dtype, device: torch.device) -> Tensor:
    """An empty matrix whose rows begin at multiples of 16 bytes, which the library asks of its fast products."""
    return torch.empty((rows, -(-columns // 8) * 8), dtype=dtype, device=device)[:, :columns]
