"""Calls of the grouped products at the sizes of the models' experts, on tensors that are not there."""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial

import torch

from tests.ops.triton.compile_all import Case


def cases() -> Iterator[Case]:
    """Both products of routed experts, forward and backward, and main gradients in float32."""
    from undertow.ops.triton.grouped.linear import add_weight_gradient, grouped_linear

    def empty(*shape: int, dtype: torch.dtype = torch.bfloat16) -> torch.Tensor:
        return torch.empty(shape, dtype=dtype, device="meta")

    def both(experts: int, out: int, width: int) -> None:
        x, weight = empty(24576, width).requires_grad_(), empty(experts, out, width).requires_grad_()
        y = grouped_linear(x, weight, empty(experts, dtype=torch.int64))
        y.backward(torch.empty_like(y))

    def added(experts: int, out: int, width: int) -> None:
        main = empty(experts, out, width, dtype=torch.float32)
        add_weight_gradient(main, empty(24576, out), empty(24576, width), empty(experts, dtype=torch.int64))

    yield "experts, 4096 to 2 x 2048", True, partial(both, 256, 4096, 4096)
    yield "experts, 2048 to 4096", False, partial(both, 256, 4096, 2048)
    yield "experts, 7168 to 2 x 3072", False, partial(both, 384, 6144, 7168)
    yield "experts, 3072 to 7168", False, partial(both, 384, 7168, 3072)
    yield "128 experts, 4096 to 2 x 2048", False, partial(both, 128, 4096, 4096)
    yield "32 experts, 4096 to 2 x 2048", False, partial(both, 32, 4096, 4096)
    yield "main gradients of 4096 to 2 x 2048", False, partial(added, 256, 4096, 4096)
