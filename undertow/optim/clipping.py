"""The global norm of the gradient: bounded, and the first place where a run that went wrong shows."""

from __future__ import annotations

from collections.abc import Iterable

import torch
from torch import Tensor, nn

from undertow.optim.kernels import scale


def clip_gradients(parameters: Iterable[nn.Parameter], largest: float) -> Tensor:
    """Scale all gradients so that their global norm is at most `largest`; return the norm before, a float32 scalar.

    Nothing waits for a GPU: the norm stays there. Without any gradient it is 0. Gradients are left alone where it is
    not finite, so that `first_not_finite` can still name the culprit.
    """
    gradients = [p.grad for p in parameters if p.grad is not None]
    if not gradients:
        return torch.zeros(())
    norms = torch._foreach_norm(gradients, 2, torch.float32)  # type: ignore[reportPrivateImportUsage]
    norm = torch.linalg.vector_norm(torch.stack(norms))
    # Of a norm of 0 the quotient is infinite.
    factor = torch.where(norm.isfinite(), (largest / norm).clamp_max(1.0), 1.0)
    scale(gradients, factor)
    return norm


def all_finite(tensor: Tensor) -> bool:
    """Whether a tensor holds no NaN and no infinity; whole numbers never do."""
    if not tensor.is_floating_point() or not tensor.numel():
        return True
    ends = torch.stack(tensor.detach().aminmax())  # one pass and no copy; a NaN anywhere is both ends
    return bool(ends.isfinite().all())


def first_not_finite(model: nn.Module) -> str | None:
    """The first parameter, in the model's order, with a value that is not finite; where all are, with a gradient."""
    for name, parameter in model.named_parameters():
        if not all_finite(parameter):
            return f"{name} (its value)"
    for name, parameter in model.named_parameters():
        if parameter.grad is not None and not all_finite(parameter.grad):
            return f"{name} (its gradient)"
    return None
