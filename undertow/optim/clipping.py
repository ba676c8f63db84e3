"""The global norm of the gradient: bounded, and the first place where a run that went wrong shows."""

from __future__ import annotations

import re
import sys
from collections.abc import Iterable
from typing import NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor, nn

from undertow.optim.kernels import scale
from undertow.parallel.held import held
from undertow.parallel.mesh import Mesh

_LONGEST_NAME = 256  # bytes of a parameter's name that ranks tell each other


def clip_gradients(parameters: Iterable[nn.Parameter], largest: float, norm: Tensor | None = None) -> Tensor:
    """Scale all gradients so that their global norm is at most `largest`; return the norm before, a float32 scalar.

    `norm` is that of gradients that lie on several ranks, from `gradient_norm`. Nothing waits for a GPU: the norm stays
    there. Without any gradient it is 0. Gradients are left alone where it is not finite, so that `first_not_finite` can
    still name the culprit.
    """
    gradients = [held(p.grad) for p in parameters if p.grad is not None]
    if not gradients:
        return torch.zeros(()) if norm is None else norm
    norm = _norm(gradients) if norm is None else norm
    # Of a norm of 0 the quotient is infinite.
    factor = torch.where(norm.isfinite(), (largest / norm).clamp_max(1.0), 1.0)
    if some := [gradient for gradient in gradients if gradient.numel()]:
        scale(some, factor)
    return norm


def _norm(gradients: list[Tensor]) -> Tensor:
    norms = torch._foreach_norm(gradients, 2, torch.float32)  # type: ignore[reportPrivateImportUsage]
    return torch.linalg.vector_norm(torch.stack(norms))


def all_finite(tensor: Tensor) -> bool:
    """Whether a tensor holds no NaN and no infinity; whole numbers never do."""
    if not tensor.is_floating_point() or not tensor.numel():
        return True
    ends = torch.stack(tensor.detach().aminmax())  # one pass and no copy; a NaN anywhere is both ends
    return bool(ends.isfinite().all())


class _Culprit(NamedTuple):
    """Whether it is a gradient, where in the model the parameter stands, layer before place, and its name."""

    gradient: int
    layer: int
    place: int
    name: str

    @staticmethod
    def of(model: nn.Module) -> _Culprit | None:
        """The first one that this rank holds."""
        for gradient in (0, 1):
            for place, (name, parameter) in enumerate(model.named_parameters()):
                tensor = parameter.grad if gradient else parameter
                if tensor is not None and not all_finite(held(tensor)):
                    return _Culprit(gradient, _layer(name), place, name)
        return None


def _layer(name: str) -> int:
    """Order of the parts of a model over pipeline stages: embedding, layers, what follows them."""
    layer = re.match(r"layers\.(\d+)\.", name)
    return 1 + int(layer[1]) if layer else 0 if name.startswith("embed.") else sys.maxsize


def first_not_finite(model: nn.Module, mesh: Mesh | None = None) -> str | None:
    """The first parameter, in the model's order, with a value that is not finite; where all are, with a gradient.

    Over `mesh` every rank must call it, and all get the same answer, whichever rank holds it.
    """
    found = _Culprit.of(model)
    if mesh is not None:
        device = next(model.parameters()).device
        for group in (mesh.data, mesh.group("pipeline")):
            found = _first(found, group, device)
    return None if found is None else f"{found.name} (its {'gradient' if found.gradient else 'value'})"


def _first(found: _Culprit | None, group: dist.ProcessGroup, device: torch.device) -> _Culprit | None:
    """The first of what the ranks of a group found, told to all of them as numbers."""
    told = torch.zeros(_LONGEST_NAME + 4, dtype=torch.int64)
    if found is None:
        told[0] = 1  # after any other
    else:
        name = found.name.encode()[:_LONGEST_NAME]
        told[1 : 4 + len(name)] = torch.tensor([*found[:3], *name])
    rows = told.to(device).repeat(dist.get_world_size(group), 1)
    dist.all_gather(list(rows.unbind()), told.to(device), group=group)
    none, gradient, layer, place, *letters = min(rows.tolist())
    return None if none else _Culprit(gradient, layer, place, bytes(filter(None, letters)).decode())
