"""Products with quantised weights: what the numbers give that the codes are read as."""

from __future__ import annotations

from torch import Tensor

from undertow.ops.reference.experts import grouped_linear
from undertow.ops.reference.linear import linear
from undertow.quant.quantised import Quantised


def linear_quantised(x: Tensor, weight: Quantised, *, invariant: bool = False) -> Tensor:
    """`x [..., K]` times `weight [O, K]` transposed, read in the type of `x` -> `[..., O]` in that type.

    Weights have no gradient. A call makes the numbers of the whole matrix. Raises `InputError` for float64.
    """
    return linear(x, weight.dequantise(x.dtype), invariant=invariant)


def grouped_linear_quantised(x: Tensor, weight: Quantised, counts: Tensor, *, invariant: bool = False) -> Tensor:
    """Per-expert product: rows of `x [N, K]`, `counts[e]` of them for expert `e`, times `weight [E, O, K]`, read in the
    type of `x` -> `[N, O]`; see `grouped_linear`.

    Weights have no gradient. A call makes the numbers of all experts' matrices. Raises `InputError` for float64.
    """
    return grouped_linear(x, weight.dequantise(x.dtype), counts, invariant=invariant)
