"""Weights shared out over ranks: matrices by FSDP2, experts by the expert axis, what stays float32 repeated.

The losses of the ranks sum to that of the batch (each is divided by the whole batch's denominators), so every gradient
is a sum over ranks, never a mean; reductions are in float32.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import cast

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.fsdp import FSDPModule, MixedPrecisionPolicy, fully_shard, register_fsdp_forward_method
from torch.distributed.tensor import DTensor

from undertow.model.layers import FLOAT32_PARAMETERS
from undertow.model.transformer import Transformer
from undertow.parallel.experts import expert_parameters, share_experts
from undertow.parallel.mesh import Mesh

BUCKET = 64 * 2**20
"""Numbers that are summed over ranks in one exchange at most, unless one parameter alone has more."""


def share_out(model: Transformer, mesh: Mesh) -> None:
    """Leave each rank its part of `model`; every rank must hold the same weights when it calls this.

    Routed experts are dealt out over `expert`. Dense matrices lie in parts over `shard` and are gathered layer by
    layer, in the type they have; embedding, head and MTP block stay gathered from the trunk's start to the end of the
    backward pass. Parameters that are float32 whatever the model is, experts, and with `shard` 1 all of them, stay
    plain tensors, whose gradients `sum_gradients` completes. After a pass that no backward pass follows, `reshard()` of
    the model parts what stayed gathered.
    """
    share_experts(model, mesh)
    if mesh.width("shard") == 1:
        return
    over = mesh.dense["replicate", "shard"] if mesh.width("replicate") > 1 else mesh.dense["shard"]
    policy = MixedPrecisionPolicy(reduce_dtype=torch.float32, cast_forward_inputs=False)
    apart = {*_islands(model), *_experts(model)}
    # Stages keep their layers gathered: FSDP2 gathers at the wrong time in schedules with several passes under way.
    again = mesh.width("pipeline") == 1
    for block in model.layers:
        fully_shard(block, mesh=over, mp_policy=policy, ignored_params=apart, reshard_after_forward=again)
    fully_shard(model, mesh=over, mp_policy=policy, ignored_params=apart, reshard_after_forward=False)
    register_fsdp_forward_method(model, "trunk")
    for module in model.modules():
        if isinstance(module, FSDPModule):
            module.set_gradient_divide_factor(1.0)
            module.set_force_sum_reduction_for_comms(True)  # gloo knows no sum with a factor


def _islands(model: Transformer) -> Iterator[nn.Parameter]:
    for name, parameter in model.named_parameters():
        if name.rpartition(".")[2] in FLOAT32_PARAMETERS:
            yield parameter


def _experts(model: Transformer) -> Iterator[nn.Parameter]:
    return cast(Iterator[nn.Parameter], expert_parameters(model))


def sum_gradients(model: Transformer, mesh: Mesh) -> None:
    """Sum over ranks the gradients that FSDP2 does not reduce; call it once, after the last backward pass of a step.

    Experts are summed over `expert_data`, the rest over all ranks with other sequences. A parameter that has a gradient
    on one rank gets one on all of them.
    """
    experts = set(_experts(model))
    plain = [p for p in model.parameters() if not isinstance(p, DTensor) and p.requires_grad]
    _sum([p for p in plain if p in experts], mesh.group("expert_data"))
    _sum([p for p in plain if p not in experts], mesh.data)


def _sum(parameters: list[nn.Parameter], group: dist.ProcessGroup) -> None:
    if not parameters or dist.get_world_size(group) == 1:
        return
    seen = torch.tensor([p.grad is not None for p in parameters], dtype=torch.uint8, device=parameters[0].device)
    dist.all_reduce(seen, dist.ReduceOp.MAX, group=group)
    for bucket in _buckets(p for p, any_has in zip(parameters, seen.tolist(), strict=True) if any_has):
        for parameter in bucket:
            if parameter.grad is None:
                parameter.grad = torch.zeros_like(parameter)
        gradients = [cast(Tensor, parameter.grad) for parameter in bucket]
        wide = torch.float64 if gradients[0].dtype == torch.float64 else torch.float32
        flat = torch.cat([gradient.to(wide).flatten() for gradient in gradients])
        dist.all_reduce(flat, group=group)
        for gradient, part in zip(gradients, flat.split([g.numel() for g in gradients]), strict=True):
            gradient.copy_(part.view_as(gradient))


def _buckets(parameters: Iterable[nn.Parameter]) -> Iterator[list[nn.Parameter]]:
    """In their order, cut where the type changes or a bucket is full."""
    bucket: list[nn.Parameter] = []
    held = 0
    for parameter in parameters:
        if bucket and (parameter.dtype != bucket[0].dtype or held + parameter.numel() > BUCKET):
            yield bucket
            bucket, held = [], 0
        bucket.append(parameter)
        held += parameter.numel()
    if bucket:
        yield bucket
