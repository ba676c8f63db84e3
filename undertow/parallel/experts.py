"""A model whose MoE layers hold a slice of the experts each and reach the others over the ranks."""

from __future__ import annotations

from collections.abc import Iterator

from torch import Tensor, nn

from undertow.config.errors import ConfigError
from undertow.model.moe import Experts, MoE
from undertow.model.transformer import Transformer
from undertow.parallel.dispatch import AllToAll
from undertow.parallel.mesh import Mesh


def expert_slice(mesh: Mesh, experts: int) -> slice:
    """Which of so many experts this rank holds: whole ones, in their order along the axis.

    Raises `ConfigError` for a number that the axis does not divide.
    """
    width = mesh.width("expert")
    if experts % width:
        raise ConfigError(
            f"expert {width} does not divide n_routed_experts {experts}: every rank must hold as many experts as the "
            "next"
        )
    first = mesh.place("expert") * (experts // width)
    return slice(first, first + experts // width)


def share_experts(model: Transformer, mesh: Mesh) -> None:
    """Leave each MoE layer of `model` its slice of the experts, `[E / expert, ...]`, and let it dispatch over the axis.

    Names of parameters stay. A model on the meta device may be shared out before it has storage. Raises `ConfigError`
    for a number of experts that the axis does not divide.
    """
    held = expert_slice(mesh, model.config.n_routed_experts)
    if mesh.width("expert") == 1:
        return
    dispatch = AllToAll(mesh.group("expert"))
    for module in model.modules():
        if isinstance(module, MoE):
            _hold(module.experts, held)
            module.dispatch = dispatch


def _hold(experts: Experts, held: slice) -> None:
    for name, whole in list(experts.named_parameters()):
        part = nn.Parameter(whole.detach()[held].clone(), requires_grad=whole.requires_grad)
        setattr(experts, name, part)


def expert_parameters(model: Transformer) -> Iterator[Tensor]:
    """Parameters of routed experts: those whose gradients are complete over the `expert` axis already."""
    for module in model.modules():
        if isinstance(module, Experts):
            yield from module.parameters()
