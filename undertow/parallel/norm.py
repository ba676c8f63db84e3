"""The global norm of a gradient whose parts lie on many ranks: each number counts once, wherever it is repeated."""

from __future__ import annotations

from collections.abc import Iterable

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from undertow.model.transformer import Transformer
from undertow.parallel.experts import expert_parameters
from undertow.parallel.mesh import Mesh


def gradient_norm(model: Transformer, mesh: Mesh, members: Iterable[nn.Parameter] | None = None) -> Tensor:
    """Euclidean norm of the gradients of `members` (default: all parameters) of all ranks, a float32 scalar, the same
    on each; call it after `sum_gradients`.

    Every rank must call it with its own parts of the same parameters. Without any gradient it is 0.
    """
    experts = set(expert_parameters(model))
    parts, routed, repeated = [], [], []
    for parameter in model.parameters() if members is None else members:
        gradient = parameter.grad
        if isinstance(gradient, DTensor):
            parts.append(gradient.to_local())
        elif gradient is not None:
            (routed if parameter in experts else repeated).append(gradient)
    device = next(model.parameters()).device
    squares = torch.stack([_square(gradients, device) for gradients in (parts, routed, repeated)])
    dist.all_reduce(squares[0], group=mesh.group("shard"))
    dist.all_reduce(squares[1], group=mesh.group("expert"))
    total = squares.sum()
    dist.all_reduce(total, group=mesh.group("pipeline"))
    return total.sqrt()


def _square(gradients: list[Tensor], device: torch.device) -> Tensor:
    if not gradients:
        return torch.zeros((), device=device)
    norms = torch._foreach_norm(gradients, 2, torch.float32)  # type: ignore[reportPrivateImportUsage]
    return torch.stack(norms).square().sum()
