"""Checkpoints of a run: everything that going on needs, complete on disk before its name appears.

A checkpoint is a model directory (`load_model` reads it) with `optimizer.safetensors` and `progress.json` beside the
weights. Nothing in it is pickled.
"""

from __future__ import annotations

from pathlib import Path

import torch

from undertow.checkpoint.folder import checkpoint_path, latest_checkpoint, publish
from undertow.checkpoint.optimizer_state import read_optimizer
from undertow.checkpoint.progress import PROGRESS, Progress, read_progress
from undertow.checkpoint.reading import read_tensors
from undertow.checkpoint.snapshot import OPTIMIZER, compute_dtype, take_snapshot
from undertow.config.errors import InputError
from undertow.config.model_json import read_config, undertow_config
from undertow.data.tokenizer import Tokenizer
from undertow.model.transformer import Transformer

__all__ = ["Progress", "latest_checkpoint", "load_checkpoint", "save_checkpoint"]


def save_checkpoint(
    folder: Path,
    model: Transformer,
    optimizer: torch.optim.Optimizer,
    progress: Progress,
    tokenizer: Tokenizer | None = None,
) -> Path:
    """Write `folder/step-N`, make it the latest and return its path, all before this returns.

    Raises `UndertowError` if writing fails or a number in it is not finite; what was there is then untouched.
    `undertow.checkpoint.writer` does the same beside the training.
    """
    snapshot = take_snapshot(model, optimizer, progress, checkpoint_path(folder, progress.step))
    return publish(folder, snapshot, tokenizer)


def load_checkpoint(path: Path, model: Transformer, optimizer: torch.optim.Optimizer) -> Progress:
    """Fill `model` and `optimizer` from a checkpoint, restore torch's random state, and return how far the run was.

    A parameter without optimizer state, because it never had a gradient, comes back without. Raises `InputError` for
    another model's checkpoint, naming the first field that differs, and for a damaged one.
    """
    _refuse_foreign(path, model)
    progress, held = read_progress(path / PROGRESS)
    current = model.state_dict()
    device, dtype = current["embed.weight"].device, compute_dtype(model)
    if held.dtype != dtype:
        raise InputError(
            f"{path}: a checkpoint of a run in {held.dtype}, this run is in {dtype}; resume with "
            f"numerics.dtype={held.dtype}, or give the run another directory with out=DIR"
        )
    state = read_tensors(path, model.config, {name: tensor.dtype for name, tensor in current.items()}, device)
    model.load_state_dict(state, strict=True)
    read_optimizer(path / OPTIMIZER, model, optimizer, held.optimizer)
    return progress


def _refuse_foreign(path: Path, model: Transformer) -> None:
    theirs, ours = undertow_config(read_config(path)), undertow_config(model.config)
    for key in (key for key in ours if theirs[key] != ours[key]):
        raise InputError(
            f"{path}: a checkpoint of another model: its {key} is {theirs[key]}, this run's is {ours[key]}; "
            "resume with the recipe it was made with, or give the run another directory with out=DIR"
        )
