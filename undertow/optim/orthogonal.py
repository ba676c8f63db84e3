"""Orthogonalisation by the hybrid Newton-Schulz iteration (model card 8.2): every singular value is driven to one."""

from __future__ import annotations

import torch
from torch import Tensor

from undertow.optim.kernels import gram, square

# (a, b, c) of `X <- a X + b (X X^T) X + c (X X^T)^2 X`: eight steps that lift small singular values fast and leave all
# near one, then two that converge on it.
SCHEDULE: tuple[tuple[float, float, float], ...] = (*((3.4445, -4.7750, 2.0315),) * 8, *((2.0, -1.5, 0.5),) * 2)
SMALLEST_NORM = 1e-20  # a matrix below it shrinks to nothing; squares of its entries leave float32


def orthogonalise(matrices: Tensor, dtype: torch.dtype) -> Tensor:
    """`U V^T` of each matrix `U S V^T` in `[N, a, b]`, each on its own; the iteration runs in `dtype`, the result's.

    Independent of a matrix's scale. A zero matrix stays zero; singular values below about 1e-5 of the Frobenius norm
    do not reach one.
    """
    tall = matrices.shape[-2] > matrices.shape[-1]
    x = matrices.mT if tall else matrices
    norm = torch.linalg.vector_norm(x, dim=(-2, -1), keepdim=True)
    x = iterate((x / norm.clamp_min(SMALLEST_NORM)).to(dtype))
    return x.mT if tall else x


def iterate(x: Tensor) -> Tensor:
    """The iteration on matrices `[N, a, b]`, `a <= b`, whose norms are at most one, in their type."""
    for a, b, c in SCHEDULE:
        x = torch.baddbmm(x, square(gram(x), c, b), x, beta=a)
    return x
