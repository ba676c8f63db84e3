"""The global norm of a gradient whose parts lie on many ranks: each number counts once, wherever it is repeated."""

from __future__ import annotations

from collections.abc import Iterable

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from undertow.model.transformer import Transformer
from undertow.parallel.experts import expert_parameters
from undertow.parallel.held import held
from undertow.parallel.mesh import Mesh


def gradient_norm(model: Transformer, mesh: Mesh, members: Iterable[nn.Parameter] | None = None) -> Tensor:
    """Euclidean norm of the gradients of `members` (default: all parameters) of all ranks, a float32 scalar, the same
    on each; call it after `sum_gradients`.

    Every rank must call it with its own parts of the same parameters. Without any gradient it is 0.
    """
    device = next(model.parameters()).device
    experts, counted = set(expert_parameters(model)), []
    copies = {model.get_parameter(name) for name in model.part.copies}
    for parameter in model.parameters() if members is None else members:
        gradient = parameter.grad
        if gradient is None or parameter in copies:
            continue
        # Of the ranks that have the same numbers, the first alone counts them.
        if parameter not in experts:
            first = mesh.place("replicate") == 0 and (isinstance(gradient, DTensor) or mesh.place("shard") == 0)
        else:
            first = isinstance(gradient, DTensor) or mesh.place("expert_data") == 0
        if first and held(gradient).numel():
            counted.append(held(gradient))
    square = _square(counted, device)
    dist.all_reduce(square, group=mesh.data)
    dist.all_reduce(square, group=mesh.group("pipeline"))
    return square.sqrt()


def _square(gradients: list[Tensor], device: torch.device) -> Tensor:
    if not gradients:
        return torch.zeros((), device=device)
    norms = torch._foreach_norm(gradients, 2, torch.float32)  # type: ignore[reportPrivateImportUsage]
    return torch.stack(norms).square().sum()
