"""Matrices as a kernel's tensor descriptors: read and written tile by tile, zero where a tile passes the edge."""

from __future__ import annotations

from torch import Tensor
from triton.tools.tensor_descriptor import TensorDescriptor


def described(matrix: Tensor, rows: int, columns: int) -> TensorDescriptor:
    """A contiguous matrix in tiles of `rows` x `columns`."""
    return TensorDescriptor(matrix, list(matrix.shape), list(matrix.stride()), [rows, columns])
