"""Whether a run fits its machine, from closed forms, before anything is built."""

from __future__ import annotations

import os

import torch

from undertow.config.errors import DoesNotFit
from undertow.config.schema import RunConfig
from undertow.model.activations import Objective, even_documents
from undertow.model.kernels import in_kernels
from undertow.model.modules import again_of
from undertow.model.peak import Peak, State, peak_bytes
from undertow.ops.registry import machine, refusal

_GIB = 2**30
_LASTING = ("weights", "buffers", "optimizer state")


def check_fit(config: RunConfig, device: torch.device) -> str | None:
    """A warning where a step's estimated peak exceeds the memory of the device, None if all is well.

    Raises `DoesNotFit` where weights and optimizer state alone do. Each row counts as one document; memory that
    others hold does not count.
    """
    limit, peak = memory_of(device), step_peak(config, device)
    lasting = sum(part.bytes for part in peak.parts if part.name in _LASTING)
    held = f"{device} has {limit / _GIB:,.1f} GiB"
    if lasting > limit:
        raise DoesNotFit(
            f"weights and optimizer state take {lasting / _GIB:,.1f} GiB, {held}: take a smaller model, "
            "numerics.dtype=bfloat16 with train.state_profile=bf16, or a machine with more memory"
        )
    if peak.total > limit:
        return (
            f"warning: a step is estimated to hold {peak.total / _GIB:,.1f} GiB ({peak.moment}), {held}; lower "
            "train.micro_batch_size or train.sequence_length, or set optimizations.recompute=on"
        )
    return None


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
    state = State(config.numerics.dtype, train.optimizer, train.state_profile, accumulates=rows < batch)
    documents = even_documents(rows * length, length)
    kernels = refusal("linear_cross_entropy_mean", "triton", machine(device)) is None and in_kernels(config)
    return peak_bytes(config.model, documents, state, wanted, gpu=device.type == "cuda", kernels=kernels)


def memory_of(device: torch.device) -> int:
    """Bytes of memory that a device has in all."""
    if device.type == "cuda":
        return torch.cuda.get_device_properties(device).total_memory
    return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
