"""Which parts of a step Triton kernels take; all others go through plain torch, with the same numbers to rounding."""

from __future__ import annotations

from collections.abc import Sequence
from functools import lru_cache
from importlib.util import find_spec

import torch
from torch import Tensor


@lru_cache(maxsize=64)
def available(device: torch.device) -> bool:
    """Whether kernels run on `device`: a GPU with bfloat16, beside an installed Triton."""
    if device.type != "cuda" or find_spec("triton") is None:
        return False
    return bool(torch.version.hip) or torch.cuda.get_device_capability(device) >= (8, 0)


def scale(tensors: Sequence[Tensor], factor: Tensor) -> None:
    """Multiply tensors in place by `factor`, a float32 scalar on their device, which nothing waits for."""
    if available(factor.device):
        from undertow.ops.triton.optimizer import scaling

        if scaling.refusal(tensors) is None:
            scaling.scale(tensors, factor)
            return
    torch._foreach_mul_(tensors, factor)  # type: ignore[reportPrivateImportUsage]


def gram(x: Tensor) -> Tensor:
    """`X X^T` of each matrix of `x [N, a, b]`."""
    if available(x.device):
        from undertow.ops.triton.optimizer import symmetric

        if symmetric.refusal(x) is None:
            return symmetric.symmetric_product(x)
    return torch.bmm(x, x.mT)


def square(gram: Tensor, alpha: float, beta: float) -> Tensor:
    """`alpha G^2 + beta G` of each symmetric matrix of `gram [N, a, a]`."""
    if available(gram.device):
        from undertow.ops.triton.optimizer import symmetric

        if symmetric.refusal(gram) is None:
            return symmetric.symmetric_product(gram, gram, alpha, beta)
    return torch.baddbmm(gram, gram, gram, beta=beta, alpha=alpha)
