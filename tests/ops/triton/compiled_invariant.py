"""Calls of the batch-invariant products on tensors that are not there. No size is compiled for: tiles and types are."""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial
from unittest import mock

import torch

from tests.ops.triton.compile_all import Case


def cases() -> Iterator[Case]:
    """A row by itself, then every tile of a chip: of linear layers, and of those to float32."""
    from undertow.ops.triton.invariant import product as launching
    from undertow.ops.triton.invariant.linear import linear
    from undertow.ops.triton.invariant.tiles import forms

    def empty(*shape: int, dtype: torch.dtype = torch.bfloat16) -> torch.Tensor:
        return torch.empty(shape, dtype=dtype, device="meta")

    def every(result: torch.dtype) -> None:
        operands = empty(1, 4096, 4096), empty(1, 1024, 4096)
        for form in forms(operands[0].device):
            with mock.patch.object(launching, "tiles", lambda *_, form=form: form):
                launching.product(*operands, empty(1, 4096, 1024, dtype=result))

    yield "linear, one row", True, lambda: linear(empty(1, 4096), empty(1024, 4096))
    yield "linear", False, partial(every, torch.bfloat16)
    yield "linear, to float32", False, partial(every, torch.float32)
