"""Whether a run fits its machine, from closed forms, before anything is built."""

from __future__ import annotations

import os

import torch

from undertow.config.errors import DoesNotFit
from undertow.config.schema import RunConfig
from undertow.config.world import World
from undertow.model.activations import Objective, even_documents
from undertow.model.kernels import in_kernels
from undertow.model.modules import again_of
from undertow.model.parameters import buffer_bytes, sum_weights
from undertow.model.peak import Peak, State, peak_bytes
from undertow.model.weights import all_weights
from undertow.ops.registry import machine, refusal
from undertow.parallel.mesh import build_axes

_GIB = 2**30
_LASTING = ("weights", "buffers", "optimizer state")


def check_fit(config: RunConfig, device: torch.device, world: World | None = None) -> str | None:
    """A warning where a step's estimated peak exceeds the memory of the device, None if all is well.

    Raises `DoesNotFit` where weights and optimizer state alone do. Each row counts as one document; memory that
    others hold does not count. Of several ranks each holds its part, and its step is not estimated here: `undertow
    plan` does. Those of a machine share the memory of its processor.
    """
    limit = memory_of(device)
    if world is not None:
        if device.type != "cuda":
            limit //= world.local_ranks
        _refuse_beyond(lasting_bytes(config, world.ranks, device.type == "cuda"), limit, f"a rank, {device}, has")
        return None
    peak = step_peak(config, device)
    lasting = sum(part.bytes for part in peak.parts if part.name in _LASTING)
    _refuse_beyond(lasting, limit, f"{device} has")
    if peak.total > limit:
        return (
            f"warning: a step is estimated to hold {peak.total / _GIB:,.1f} GiB ({peak.moment}), {device} has "
            f"{limit / _GIB:,.1f} GiB; lower train.micro_batch_size or train.sequence_length, or set "
            "optimizations.recompute=on"
        )
    return None


def _refuse_beyond(lasting: int, limit: int, has: str) -> None:
    if lasting > limit:
        raise DoesNotFit(
            f"weights and optimizer state take {lasting / _GIB:,.1f} GiB, {has} {limit / _GIB:,.1f} GiB: take a "
            "smaller model, numerics.dtype=bfloat16 with train.state_profile=bf16, or a machine with more memory"
        )


def lasting_bytes(config: RunConfig, ranks: int, gpu: bool) -> int:
    """Bytes of weights, buffers and optimizer state that one of several ranks holds; that of a pipeline on average. The
    memory of a `gpu` is free of optimizer state that lies on the host."""
    geometry, train = build_axes(config.parallel, ranks).geometry, config.train
    state = State(config.numerics.dtype, train.optimizer, train.state_profile)
    bytes_of_stages = buffer_bytes(config.model)
    for experts in (False, True):
        p = sum_weights(weight for weight in all_weights(config.model) if (weight.split == "experts") is experts)
        low = p._replace(high=0, high_matrices=0)
        parts = geometry.expert * geometry.expert_parts if experts else geometry.dense_parts
        kept, shared = (
            state.weights(each) + (0 if gpu and train.offload_optimizer else state.optimizer_state(each))
            for each in (p, low)
        )
        bytes_of_stages += kept - shared + -(-shared // parts)  # what stays float32 is repeated
    return bytes_of_stages // geometry.pipeline


def step_peak(config: RunConfig, device: torch.device) -> Peak:
    """The peak of the largest step of a run."""
    train = config.train
    batch = max(train.batch_size, *(rows for _, rows in train.batch_size_schedule), 0)
    length = max(train.sequence_length, *(tokens for _, tokens in train.sequence_length_schedule), 0)
    rows = min(train.micro_batch_size or batch, batch)
    wanted = Objective(
        mtp=max(train.mtp_weight, train.mtp_weight_in_decay) > 0 and config.model.num_nextn_predict_layers > 0,
        distil=not config.indexer.frozen,
        balance_rows=rows if train.balance_weight else 0,
        recompute=again_of(config.recompute, config.model.num_hidden_layers),
    )
    state = State(
        config.numerics.dtype, train.optimizer, train.state_profile, rows < batch, train.offload_optimizer
    )  # fmt: skip
    documents = even_documents(rows * length, length)
    kernels = refusal("linear_cross_entropy_mean", "triton", machine(device)) is None and in_kernels(config)
    return peak_bytes(config.model, documents, state, wanted, gpu=device.type == "cuda", kernels=kernels)


def memory_of(device: torch.device) -> int:
    """Bytes of memory that a device has in all."""
    if device.type == "cuda":
        return torch.cuda.get_device_properties(device).total_memory
    return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
