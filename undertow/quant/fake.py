"""Quantisation in training: numbers rounded as if stored in a scheme, with gradients as if they were not."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from undertow.quant.quantise import quantise
from undertow.quant.scheme import Scheme


def fake_quantise(
    values: Tensor, scheme: Scheme, floor: float = 0.0, generator: torch.Generator | None = None
) -> Tensor:
    """`values` `[..., R, C]` quantised and read again, in their own dtype; see `quantise`.

    The gradient passes unchanged (straight through): a scale covers its block, so no value is cut off. A block with a
    NaN or an infinity becomes NaN.
    """
    return _StraightThrough.apply(values, scheme, floor, generator)


class _StraightThrough(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, values: Tensor, scheme: Scheme, floor: float, generator: torch.Generator | None) -> Tensor:
        return quantise(values, scheme, floor, generator).dequantise(values.dtype)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, None, None, None]:
        return gradients[0], None, None, None
