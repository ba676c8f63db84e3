"""What a rank holds of the tensors of a run: rows of each, along its first axis, that lie on this rank."""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor

from undertow.checkpoint.names import EXPERTS, native_tensors
from undertow.config.errors import UndertowError
from undertow.model.transformer import Transformer
from undertow.parallel.experts import expert_slice
from undertow.parallel.held import held, rows_of
from undertow.parallel.mesh import Mesh


class Share(NamedTuple):
    """Rows of a tensor from `first` on, as many as the plain `tensor` has, of one that is `whole` in all.

    A scalar is whole on each of its ranks. A tensor without rows has none of them here.
    """

    tensor: Tensor
    first: int
    whole: tuple[int, ...]

    @property
    def rows(self) -> slice:
        """Which rows these are; of a scalar, one."""
        return slice(self.first, self.first + (len(self.tensor) if self.whole else 1))


def weight_shares(model: Transformer, mesh: Mesh | None) -> dict[str, Share]:
    """Every weight and buffer that this rank holds a part of, by native name."""
    native = native_tensors(model.config)
    return {name: _share(name, tensor, native[name].shape, mesh) for name, tensor in model.state_dict().items()}


def optimizer_shares(
    model: Transformer, optimizer: torch.optim.Optimizer, weights: dict[str, Share]
) -> dict[str, Share]:
    """The optimizer's state of every parameter here, as `parameter/part`: rows as its parameter's, or a scalar."""
    found = {}
    for name, parameter in model.named_parameters():
        for part, value in optimizer.state.get(parameter, {}).items():
            local, weight = held(value), weights[name]
            if value.dim() == 0:
                found[f"{name}/{part}"] = Share(local, 0, ())
            elif local.shape == weight.tensor.shape:
                found[f"{name}/{part}"] = Share(local, weight.first, weight.whole)
            else:
                raise UndertowError(
                    f"optimizer state {name}/{part} is {list(local.shape)} where this rank holds "
                    f"{list(weight.tensor.shape)} of the parameter"
                )
    return found


def _share(name: str, tensor: Tensor, whole: tuple[int, ...], mesh: Mesh | None) -> Share:
    first = 0
    if mesh is not None and name.split(".", 2)[-1] in EXPERTS:
        first = expert_slice(mesh, whole[0]).start
    if isinstance(tensor, DTensor):
        first += _first_row(name, tensor)
    local = held(tensor)
    if whole and (local.shape[1:] != whole[1:] or first + len(local) > whole[0]):
        raise UndertowError(f"{name}: this rank holds {list(local.shape)} from row {first} on of {list(whole)}")
    return Share(local.detach(), first, whole)


def _first_row(name: str, tensor: DTensor) -> int:
    """Where the rows of this rank begin in `tensor`."""
    first, rows = 0, tensor.shape[0]
    for axis, placement in enumerate(tensor.placements):
        if placement.is_replicate():
            continue
        if not placement.is_shard(0):
            raise UndertowError(f"{name}: lies over ranks as {placement}; checkpoints hold tensors in parts of rows")
        mine = rows_of(rows, tensor.device_mesh.size(axis))[tensor.device_mesh.get_local_rank(axis)]
        first, rows = first + mine.start, len(mine)
    return first
