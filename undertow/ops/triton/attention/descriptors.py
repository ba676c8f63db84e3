"""Matrices as a kernel's tensor descriptors: read and written tile by tile, zero where a tile passes the edge."""

from __future__ import annotations

from torch import Tensor
from triton.tools.tensor_descriptor import TensorDescriptor

_BYTES = 16
"""What the address of a described matrix is a multiple of."""


def aligned(x: Tensor) -> Tensor:
    """`x` contiguous and at an address that a descriptor can name, copied only if it is not."""
    x = x.contiguous()
    return x.clone() if x.data_ptr() % _BYTES else x


def described(matrix: Tensor, rows: int, columns: int) -> TensorDescriptor:
    """A contiguous matrix, as `aligned` has them, in tiles of `rows` x `columns`."""
    # Of a single row torch calls any stride contiguous.
    return TensorDescriptor(matrix, list(matrix.shape), [matrix.shape[1], 1], [rows, columns])
