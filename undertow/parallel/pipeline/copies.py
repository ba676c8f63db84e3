"""Matrices that two ranks of a pipeline hold: the MTP block reads embedding and LM head, which may be elsewhere."""

from __future__ import annotations

from typing import cast

import torch
import torch.distributed as dist
from torch import Tensor, nn

from undertow.model.transformer import Transformer
from undertow.parallel.held import held
from undertow.parallel.mesh import Mesh

CHUNK = 64 * 2**20
"""Numbers that are exchanged at once at most."""


def sum_copies(model: Transformer, mesh: Mesh) -> None:
    """Give both holders of a matrix the sum of their gradients, to the bit the same; call it once these are complete
    over data-parallel ranks. Every rank must call it."""
    stages = mesh.stages
    drafting = None if stages is None else stages.rank_with("m")
    if stages is None or drafting is None:
        return
    group, here = mesh.group("pipeline"), mesh.place("pipeline")
    for letter, name in (("E", "embed.weight"), ("L", "head.weight")):
        pair = {drafting, cast(int, stages.rank_with(letter))}
        if here in pair and len(pair) == 2:
            (peer,) = pair - {here}
            _sum(model.get_parameter(name), peer, group)


@torch.no_grad()
def _sum(parameter: nn.Parameter, peer: int, group: dist.ProcessGroup) -> None:
    if not parameter.requires_grad:
        return
    if parameter.grad is None:
        parameter.grad = torch.zeros_like(parameter, dtype=parameter.grad_dtype or parameter.dtype)
    gradient = held(parameter.grad).view(-1)
    for part in gradient.split(CHUNK):
        own = part.to(torch.promote_types(part.dtype, torch.float32))
        theirs = torch.empty_like(own)
        for work in dist.batch_isend_irecv([_one(dist.isend, own, peer, group), _one(dist.irecv, theirs, peer, group)]):
            work.wait()
        part.copy_(own + theirs)


def _one(way: object, tensor: Tensor, peer: int, group: dist.ProcessGroup) -> dist.P2POp:
    return dist.P2POp(way, tensor, group=group, group_peer=peer)  # type: ignore[arg-type]
