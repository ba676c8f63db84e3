"""The state of a run at one moment, held in host memory: training may go on while it is written."""

from __future__ import annotations

import json
from collections.abc import Hashable, Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import TypeVar

import torch
from torch import Tensor

from undertow.checkpoint.optimizer_state import OPTIMIZER, optimizer_tensors
from undertow.checkpoint.progress import PROGRESS, Held, Progress, progress_text
from undertow.checkpoint.shards import Entry, sync, write_shards, write_tensors
from undertow.config.errors import UndertowError
from undertow.config.model import ModelConfig
from undertow.config.model_json import undertow_config
from undertow.data.tokenizer import Tokenizer
from undertow.model.transformer import Transformer
from undertow.optim.clipping import all_finite

_K = TypeVar("_K", bound=Hashable)


@dataclass(frozen=True)
class Snapshot:
    """All that a checkpoint holds, in host memory of its own: what happens to the model afterwards is not in it.

    `weights` are the model's tensors by native name, `dtype` is its compute type, `optimizer` has the tensors of
    `undertow.checkpoint.optimizer_state`.
    """

    config: ModelConfig
    dtype: str
    weights: dict[str, Tensor]
    optimizer: dict[str, Tensor]
    progress: Progress


def take_snapshot(model: Transformer, optimizer: torch.optim.Optimizer, progress: Progress, target: Path) -> Snapshot:
    """Copy everything to host memory. Raises `UndertowError`, naming `target`, for a number that is not finite."""
    weights, moments = model.state_dict(), optimizer_tensors(model, optimizer)
    refuse_not_finite((*weights.items(), *moments.items()), target)
    return Snapshot(model.config, compute_dtype(model), copied(weights), copied(moments), progress)


def refuse_not_finite(tensors: Iterable[tuple[str, Tensor]], target: Path) -> None:
    """Raise `UndertowError`, naming `target`, for a tensor with a number that is not finite."""
    for name, tensor in tensors:
        if not all_finite(tensor):
            raise UndertowError(f"{target}: {name} is not finite; no checkpoint is written, earlier ones are intact")


def write_files(snapshot: Snapshot, directory: Path, tokenizer: Tokenizer | None) -> None:
    """Write the files of a checkpoint into the empty `directory`; all is on disk when this returns."""
    weights = snapshot.weights.items()
    write_shards(directory, [Entry(n, t.numel() * t.element_size(), lambda t=t: t) for n, t in weights])
    write_tensors(directory / OPTIMIZER, snapshot.optimizer)
    names = sorted(snapshot.optimizer)
    write_documents(directory, snapshot.config, snapshot.dtype, names, snapshot.progress, tokenizer)


def write_documents(
    directory: Path,
    config: ModelConfig,
    dtype: str,
    optimizer: list[str],
    progress: Progress,
    tokenizer: Tokenizer | None,
) -> None:
    """Write what a checkpoint holds beside tensors; all of `directory` is on disk when this returns."""
    shape = json.dumps(undertow_config(config), indent=2) + "\n"
    (directory / "config.json").write_text(shape, "utf-8")
    (directory / PROGRESS).write_text(progress_text(progress, Held(dtype, optimizer)), "utf-8")
    if tokenizer is not None:
        tokenizer.save(directory)
    for file in (*directory.iterdir(), directory):
        sync(file)


def compute_dtype(model: Transformer) -> str:
    """The type of a model's weights outside the float32 islands, as configurations spell it."""
    return str(model.dtype).removeprefix("torch.")


def copied(tensors: dict[_K, Tensor]) -> dict[_K, Tensor]:
    """Copies in host memory."""
    return {name: tensor.detach().to("cpu", copy=True).contiguous() for name, tensor in tensors.items()}
