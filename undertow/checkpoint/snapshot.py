"""The state of a run at one moment, held in host memory: training may go on while it is written."""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor

from undertow.checkpoint.optimizer_state import optimizer_tensors
from undertow.checkpoint.progress import PROGRESS, Held, Progress, progress_text
from undertow.checkpoint.shards import Entry, sync, write_shards, write_tensors
from undertow.config.errors import UndertowError
from undertow.config.model import ModelConfig
from undertow.config.model_json import undertow_config
from undertow.data.tokenizer import Tokenizer
from undertow.model.transformer import Transformer
from undertow.optim.clipping import all_finite

OPTIMIZER = "optimizer.safetensors"


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
    for name, tensor in (*weights.items(), *moments.items()):
        if not all_finite(tensor):
            raise UndertowError(f"{target}: {name} is not finite; no checkpoint is written, earlier ones are intact")
    return Snapshot(model.config, compute_dtype(model), _copied(weights), _copied(moments), progress)


def write_files(snapshot: Snapshot, directory: Path, tokenizer: Tokenizer | None) -> None:
    """Write the files of a checkpoint into the empty `directory`; all is on disk when this returns."""
    weights = snapshot.weights.items()
    write_shards(directory, [Entry(n, t.numel() * t.element_size(), lambda t=t: t) for n, t in weights])
    write_tensors(directory / OPTIMIZER, snapshot.optimizer)
    shape = json.dumps(undertow_config(snapshot.config), indent=2) + "\n"
    (directory / "config.json").write_text(shape, "utf-8")
    held = Held(snapshot.dtype, sorted(snapshot.optimizer))
    (directory / PROGRESS).write_text(progress_text(snapshot.progress, held), "utf-8")
    if tokenizer is not None:
        tokenizer.save(directory)
    for file in (*directory.iterdir(), directory):
        sync(file)


def compute_dtype(model: Transformer) -> str:
    """The type of a model's weights outside the float32 islands, as configurations spell it."""
    return str(model.embed.weight.dtype).removeprefix("torch.")


def _copied(tensors: dict[str, Tensor]) -> dict[str, Tensor]:
    return {name: tensor.detach().to("cpu", copy=True).contiguous() for name, tensor in tensors.items()}
