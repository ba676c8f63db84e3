"""Calls of clamped SwiGLU at the sizes of the models, on tensors that are not there."""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial

import torch

from tests.ops.triton.compile_all import Case


def cases() -> Iterator[Case]:
    """Routed experts, whose gate and up lie side by side and whose rows have weights, and the shared one."""
    from undertow.ops.triton.swiglu.gated import swiglu

    def both(width: int, routed: bool) -> None:
        def empty(*shape: int, dtype: torch.dtype = torch.bfloat16) -> torch.Tensor:
            return torch.empty(shape, dtype=dtype, device="meta", requires_grad=True)

        if routed:
            out = swiglu(empty(24576, 2 * width), None, 10.0, empty(24576, dtype=torch.float32))
        else:
            out = swiglu(empty(4096, width), empty(4096, width), 10.0)
        out.backward(torch.empty_like(out))

    for width in (2048, 3072):
        yield f"SwiGLU of routed experts, {width} wide", width == 2048, partial(both, width, True)
        yield f"SwiGLU of the shared expert, {width} wide", False, partial(both, width, False)
