"""Calls of the optimizer's kernels at the sizes of the models, on tensors that are not there."""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial

import torch

from tests.ops.triton.compile_all import Case


def cases() -> Iterator[Case]:
    """AdamW of the embedding and Muon of experts under each kind of state, scaling, and the products of experts."""
    from undertow.ops.triton.optimizer.adamw import Weights, adamw
    from undertow.ops.triton.optimizer.momentum import Matrices
    from undertow.ops.triton.optimizer.scaling import scale
    from undertow.ops.triton.optimizer.symmetric import symmetric_product

    def empty(*shape: int, dtype: torch.dtype = torch.bfloat16) -> torch.Tensor:
        return torch.empty(shape, dtype=dtype, device="meta")

    def update(moment: torch.dtype, behind: torch.dtype, grad: torch.dtype) -> None:
        types = (torch.bfloat16, grad, moment, moment, behind)
        part = Weights(*(empty(129280, 4096, dtype=dtype) for dtype in types))
        adamw([part], 1, lr=1e-4, betas=(0.9, 0.95), epsilon=1e-20, weight_decay=0.1)

    def muon(moment: torch.dtype, behind: torch.dtype | None, grad: torch.dtype) -> None:
        weight = torch.float32 if behind is None else torch.bfloat16
        grads, buffers, weights, rest = (
            None if dtype is None else [empty(8, 2048, 4096, dtype=dtype)] for dtype in (grad, moment, weight, behind)
        )
        matrices = Matrices(grads, buffers, weights, rest)
        matrices.update(matrices.directions(0.95, torch.bfloat16, 1e-20), 0.9, 1e-3)

    yield "AdamW, float32 state", True, partial(update, torch.float32, torch.float32, torch.float32)
    yield "AdamW, bfloat16 state", False, partial(update, torch.bfloat16, torch.int16, torch.bfloat16)
    yield "Muon, float32 state", True, partial(muon, torch.float32, torch.float32, torch.float32)
    yield "Muon, bfloat16 state", False, partial(muon, torch.bfloat16, torch.int16, torch.bfloat16)
    yield "Muon, float32 weights", False, partial(muon, torch.float32, None, torch.float32)
    for dtype in (torch.float32, torch.bfloat16):
        name = f"scaling, {str(dtype).removeprefix('torch.')}"
        yield name, False, partial(scale, [empty(129280, 4096, dtype=dtype)], empty(dtype=torch.float32))

    def products(count: int, height: int, width: int) -> None:
        gram = symmetric_product(empty(count, height, width))
        symmetric_product(gram, gram, 2.0, -1.5)

    yield "symmetric products of 2048x4096", True, partial(products, 256, 2048, 4096)
    yield "symmetric products of 3072x7168", False, partial(products, 64, 3072, 7168)
