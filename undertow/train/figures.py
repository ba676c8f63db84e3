"""The figures of a step: losses, rates in both FLOP conventions, memory, and the load of experts."""

from __future__ import annotations

import math
import resource
import sys
import time
from typing import Any

import torch
from torch import Tensor

from undertow.checkpoint.training import Progress
from undertow.config.gpus import find_gpu
from undertow.model.flops import flops_per_token
from undertow.model.transformer import Transformer
from undertow.train.stages import Stage


def step_figures(
    model: Transformer, progress: Progress, stage: Stage, *, loss: float, parts: dict[str, float], norm: float,
    indexer_norm: float, counts: Tensor, seconds: float, ranks: int = 1,
) -> dict[str, Any]:  # fmt: skip
    """A step's line of `metrics.jsonl`: `loss` and its `parts`, the gradient's `norm` before clipping, the indexer's
    apart, and `counts [layers, E]` of experts' tokens. Tokens are those of all `ranks`, TFLOP/s those of one, and
    memory is this one's.

    A number that is not finite becomes None, as JSON has no other name for it.
    """
    tokens = stage.batch_size * stage.sequence_length
    hashed = [model.config.is_hash(layer) for layer in range(len(counts))]
    entry = {
        "step": progress.step,
        "tokens": progress.tokens,
        "time": round(time.time(), 3),
        "train/loss": loss,
        **{f"train/{name}_loss": part for name, part in parts.items()},
        "train/grad_norm": norm,
        **({"train/indexer_grad_norm": indexer_norm} if "indexer" in parts else {}),
        "train/lr": stage.learning_rate,
        "train/batch_size": stage.batch_size,
        "train/sequence_length": stage.sequence_length,
        "train/skipped": progress.skipped,
        **expert_load(counts, hashed, model.config.num_experts_per_tok, tokens),
        "memory/peak_bytes": peak_memory(model.device),
        "train/tokens_per_second": round(tokens / seconds, 1),
    }
    if not stage.indexer_alone:
        entry |= throughput(model, stage, tokens / seconds / ranks)
    return {name: None if isinstance(v, float) and not math.isfinite(v) else v for name, v in entry.items()}


def throughput(model: Transformer, stage: Stage, rate: float) -> dict[str, float]:
    """TFLOP/s at `rate` tokens per second, and their share of the GPU's dense bfloat16 peak where that is known.

    Both conventions of `undertow.model.flops`; what is computed again in the backward pass does not count.
    """
    mtp = stage.mtp_weight > 0
    both = flops_per_token(
        model.config,
        stage.sequence_length,
        frozen_indexer=not stage.indexing.distil,
        mtp=mtp,
        dense=stage.indexing.dense,
    )
    device = model.device
    gpu = find_gpu(torch.cuda.get_device_name(device)) if device.type == "cuda" else None
    told = {}
    for convention, work in zip(("algorithmic", "reported"), both, strict=True):
        told[f"train/tflops_{convention}"] = round(work * rate / 1e12, 6)
        if gpu is not None:
            told[f"train/mfu_{convention}"] = round(work * rate / gpu.bf16, 6)
    return told


def expert_load(counts: Tensor, hashed: list[bool], chosen: int, tokens: int) -> dict[str, float]:
    """Largest and smallest share of tokens that an expert of any layer with learned routing got, as multiples of an
    even share, and the share of the trunk's choices that no expert served.

    `hashed` marks the layers whose load the token ids alone decide; they count where there is no other.
    """
    learned = [row for row in range(len(counts)) if not hashed[row]] or list(range(len(counts)))
    load = counts[learned].double()
    load = load / load.mean(-1, keepdim=True)
    served = counts.sum(-1).max()
    return {
        "moe/load_max": float(load.max()),
        "moe/load_min": float(load.min()),
        "moe/dropped_share": 1.0 - float(served) / (tokens * chosen),
    }


def peak_memory(device: torch.device) -> int:
    """Most bytes held so far: by tensors on a GPU, by the whole process elsewhere."""
    if device.type == "cuda":
        return torch.cuda.max_memory_allocated(device)
    most = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return most if sys.platform == "darwin" else most * 1024  # Linux counts in KiB
