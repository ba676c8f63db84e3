"""Weights shared out over ranks: matrices and whole experts by FSDP2, experts by their axis too, what stays float32
repeated.

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
from undertow.model.moe import Experts
from undertow.model.transformer import Transformer
from undertow.parallel.experts import expert_parameters, share_experts
from undertow.parallel.mesh import Mesh
from undertow.parallel.pipeline.copies import sum_copies
from undertow.parallel.pipeline.stage import Stage, own_stages

BUCKET = 64 * 2**20
"""Numbers that are summed over ranks in one exchange at most, unless one parameter alone has more."""


def share_out(model: Transformer, mesh: Mesh) -> list[Stage]:
    """Leave each rank its part of `model`; every rank must hold the same weights when it calls this.

    Routed experts are dealt out over `expert`, and what a rank has of them over `expert_data`, both in whole experts; a
    rank may be left without any. Dense matrices lie in parts over `shard`. Both are gathered layer by layer, in the
    type they have; embedding, head and MTP block stay gathered from the trunk's start to the end of the backward pass.
    Parameters that are float32 whatever the model is, and with `shard` 1 all of them, stay plain tensors, whose
    gradients `sum_gradients` completes. After a pass that no backward pass follows, `reshard()` of the model parts what
    stayed gathered. In a pipeline, the stages of this rank are returned, each of which gathers its own.
    """
    share_experts(model, mesh)
    stages = own_stages(model, mesh)
    if mesh.width("shard") == 1:
        return stages
    over = mesh.dense["replicate", "shard"] if mesh.width("replicate") > 1 else mesh.dense["shard"]
    wide = torch.promote_types(model.dtype, torch.float32)
    policy = MixedPrecisionPolicy(reduce_dtype=wide, cast_forward_inputs=False)
    # Stages keep their layers gathered: FSDP2 gathers at the wrong time in schedules with several passes under way.
    again = mesh.width("pipeline") == 1
    if mesh.width("expert_data") > 1:
        for module in model.modules():
            if isinstance(module, Experts):
                fully_shard(module, mesh=mesh.experts["expert_data"], mp_policy=policy, reshard_after_forward=again)
    apart = {*_islands(model), *_experts(model)}
    for block in model.layers:
        fully_shard(block, mesh=over, mp_policy=policy, ignored_params=apart, reshard_after_forward=again)
        _gather_experts_early(block)
    for root in stages or [model]:
        fully_shard(root, mesh=over, mp_policy=policy, ignored_params=apart, reshard_after_forward=False)
        apart.update(root.parameters())  # a later stage may share a matrix: the first to need it gathers it
    if not stages:
        register_fsdp_forward_method(model, "trunk")
    for module in (module for root in stages or [model] for module in root.modules()):
        if isinstance(module, FSDPModule):
            module.set_gradient_divide_factor(1.0)
            module.set_force_sum_reduction_for_comms(True)  # gloo knows no sum with a factor
    return stages


def _gather_experts_early(block: nn.Module) -> None:
    """While attention runs: the dispatcher waits on the host right before it calls them."""
    experts: list[FSDPModule] = []
    experts += [module for module in block.modules() if isinstance(module, Experts) and isinstance(module, FSDPModule)]
    if experts:
        cast(FSDPModule, block).set_modules_to_forward_prefetch(experts)


def widen_gradients(model: Transformer) -> None:
    """Let gradients of bfloat16 weights add up in float32 over the passes of a step; call it after `share_out`."""
    for parameter in model.parameters():
        if not isinstance(parameter, DTensor):
            parameter.grad_dtype = torch.promote_types(parameter.dtype, torch.float32)
        elif parameter.grad_dtype is not None:
            parameter.grad_dtype = None  # FSDP2 gives the sum over ranks of each pass in the weight's type
            parameter.register_post_accumulate_grad_hook(_widen)


def _widen(parameter: Tensor) -> None:
    gradient = cast(Tensor, parameter.grad)
    parameter.grad = gradient.to(torch.promote_types(gradient.dtype, torch.float32))


def _islands(model: Transformer) -> Iterator[nn.Parameter]:
    for name, parameter in model.named_parameters():
        if name.rpartition(".")[2] in FLOAT32_PARAMETERS:
            yield parameter


def _experts(model: Transformer) -> Iterator[nn.Parameter]:
    return cast(Iterator[nn.Parameter], expert_parameters(model))


def sum_gradients(model: Transformer, mesh: Mesh) -> None:
    """Sum over ranks the gradients that FSDP2 does not reduce; call it once, after the last backward pass of a step.

    Experts are summed over `expert_data`, the rest over all ranks with other sequences, and a matrix that two ranks of
    a pipeline hold over both. A parameter that has a gradient on one rank gets one on all of them.
    """
    experts = set(_experts(model))
    plain = [p for p in model.parameters() if not isinstance(p, DTensor) and p.requires_grad]
    _sum([p for p in plain if p in experts], mesh.group("expert_data"))
    _sum([p for p in plain if p not in experts], mesh.data)
    sum_copies(model, mesh)


def _sum(parameters: list[nn.Parameter], group: dist.ProcessGroup) -> None:
    if not parameters or dist.get_world_size(group) == 1:
        return
    seen = torch.tensor([p.grad is not None for p in parameters], dtype=torch.uint8, device=parameters[0].device)
    dist.all_reduce(seen, dist.ReduceOp.MAX, group=group)
    for bucket in _buckets(p for p, any_has in zip(parameters, seen.tolist(), strict=True) if any_has):
        for parameter in bucket:
            if parameter.grad is None:
                parameter.grad = torch.zeros_like(parameter, dtype=parameter.grad_dtype or parameter.dtype)
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
