"""Checkpoints of a run: everything that going on needs, complete on disk before its name appears.

A checkpoint is a model directory (`load_model` reads it) with `optimizer.safetensors` and `progress.json` beside the
weights. Nothing in it is pickled.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import torch

from undertow.checkpoint.agreement import Agreement
from undertow.checkpoint.folder import checkpoint_path, latest_checkpoint, publish
from undertow.checkpoint.joint import Joint
from undertow.checkpoint.optimizer_state import read_optimizer
from undertow.checkpoint.progress import PROGRESS, Progress, read_progress
from undertow.checkpoint.reading import read_shares
from undertow.checkpoint.shares import weight_shares
from undertow.checkpoint.snapshot import compute_dtype, take_snapshot
from undertow.config.errors import InputError
from undertow.config.model_json import read_config, undertow_config
from undertow.data.tokenizer import Tokenizer
from undertow.model.transformer import Transformer
from undertow.parallel.mesh import Mesh

__all__ = ["Progress", "latest_checkpoint", "load_checkpoint", "save_checkpoint"]


def save_checkpoint(
    folder: Path,
    model: Transformer,
    optimizer: torch.optim.Optimizer,
    progress: Progress,
    tokenizer: Tokenizer | None = None,
    mesh: Mesh | None = None,
) -> Path:
    """Write `folder/step-N`, make it the latest and return its path, all before this returns.

    With `mesh` every rank calls it, with its part of the model; `folder` is one that all of them see. Raises
    `UndertowError`, then on all of them, if writing fails or a number in it is not finite; what was there is then
    untouched. `undertow.checkpoint.writer` does the same beside the training.
    """
    if mesh is None:
        snapshot = take_snapshot(model, optimizer, progress, checkpoint_path(folder, progress.step))
        return publish(folder, snapshot, tokenizer)
    joint = Joint(mesh)
    try:
        return joint.publish(folder, joint.take(model, optimizer, progress, folder), tokenizer)
    finally:
        joint.close()


def load_checkpoint(
    path: Path, model: Transformer, optimizer: torch.optim.Optimizer, mesh: Mesh | None = None
) -> Progress:
    """Fill `model` and `optimizer` from a checkpoint, restore torch's random state, and return how far the run was.

    With `mesh` every rank calls it and reads what it holds; the checkpoint may be of any other layout, or of one
    process. A parameter without optimizer state, because it never had a gradient, comes back without. Raises
    `InputError`, then on all of them, for another model's checkpoint, naming the first field that differs, and for a
    damaged one.
    """
    if mesh is None:
        progress, restore = _read(path, model, optimizer, None)
        restore()
        return progress
    found: list[tuple[Progress, Callable[[], None]]] = []
    with Agreement() as agreement:
        agreement.together(lambda: found.append(_read(path, model, optimizer, mesh)))
        progress, restore = found[0]
        restore()
        return progress


def _read(
    path: Path, model: Transformer, optimizer: torch.optim.Optimizer, mesh: Mesh | None
) -> tuple[Progress, Callable[[], None]]:
    """How far the run was, and what fills model, optimizer and random state; nothing is changed before."""
    _refuse_foreign(path, model)
    progress, held = read_progress(path / PROGRESS)
    dtype = compute_dtype(model)
    if held.dtype != dtype:
        raise InputError(
            f"{path}: a checkpoint of a run in {held.dtype}, this run is in {dtype}; resume with "
            f"numerics.dtype={held.dtype}, or give the run another directory with out=DIR"
        )
    shares = weight_shares(model, mesh)
    state = read_shares(path, model.config, shares)
    restore_optimizer = read_optimizer(path, model, optimizer, held.optimizer, shares, mesh)

    def restore() -> None:
        with torch.no_grad():
            for name, share in shares.items():
                share.tensor.copy_(state[name])
        restore_optimizer()

    return progress, restore


def _refuse_foreign(path: Path, model: Transformer) -> None:
    theirs, ours = undertow_config(read_config(path)), undertow_config(model.config)
    for key in (key for key in ours if theirs[key] != ours[key]):
        raise InputError(
            f"{path}: a checkpoint of another model: its {key} is {theirs[key]}, this run's is {ours[key]}; "
            "resume with the recipe it was made with, or give the run another directory with out=DIR"
        )
