"""Checkpoints of a run: everything that going on needs, complete on disk before its name appears.

A checkpoint is a model directory (`load_model` reads it) with `optimizer.safetensors` and `progress.json` beside the
weights. Nothing in it is pickled.
"""

from __future__ import annotations

import json
import os
import re
import shutil
from dataclasses import asdict, dataclass, fields
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file

from undertow.checkpoint.reading import read_tensors
from undertow.checkpoint.shards import Entry, sync, write_shards
from undertow.config.errors import InputError, UndertowError
from undertow.config.model_json import read_config, undertow_config
from undertow.data.tokenizer import Tokenizer
from undertow.model.transformer import Transformer

LATEST = "latest"
_OPTIMIZER, _PROGRESS = "optimizer.safetensors", "progress.json"
_NAME = re.compile(r"step-(\d+)")
_UNFINISHED = ".writing"


@dataclass(frozen=True)
class Progress:
    """How far a run is: optimizer steps done, tokens learned from, and where its data goes on (`Cursor.to_dict`)."""

    step: int
    tokens: int
    cursor: dict[str, Any]


def save_checkpoint(
    folder: Path,
    model: Transformer,
    optimizer: torch.optim.Optimizer,
    progress: Progress,
    tokenizer: Tokenizer | None = None,
) -> Path:
    """Write `folder/step-N` and make it the latest; return its path.

    Files are written to a temporary directory, synced and renamed, then `latest` is replaced: killed at any moment,
    `latest` names a complete checkpoint. Raises `UndertowError` if writing fails; what was there is then untouched.
    """
    target = folder / f"step-{progress.step}"
    fresh = folder / f".{target.name}{_UNFINISHED}"
    try:
        folder.mkdir(parents=True, exist_ok=True)
        for left in folder.glob(f".*{_UNFINISHED}"):  # of a process that was killed: a run has one writer
            shutil.rmtree(left) if left.is_dir() else left.unlink()
        fresh.mkdir()
        _write(fresh, model, optimizer, progress, tokenizer)
        if target.exists():  # complete, but not yet the latest when the run was killed
            shutil.rmtree(target)
        os.rename(fresh, target)
        sync(folder)
        _point_latest(folder, target.name)
    except (OSError, SafetensorError) as error:
        shutil.rmtree(fresh, ignore_errors=True)
        raise UndertowError(
            f"{target}: the checkpoint cannot be written ({error}); the one before it is intact"
        ) from error
    return target


def latest_checkpoint(folder: Path) -> Path | None:
    """The checkpoint that `latest` names, or None where none was completed. Raises `InputError` if it is not there."""
    pointer = folder / LATEST
    if not pointer.is_file():
        return None
    name = pointer.read_text("utf-8", errors="replace").strip()
    if not _NAME.fullmatch(name) or not (folder / name).is_dir():
        held = sorted((p.name for p in folder.glob("step-*")), key=lambda n: int(n.rpartition("-")[2]))
        raise InputError(
            f"{pointer}: names '{name[:40]}', which is no checkpoint here; write the name of one into it "
            f"(there are {', '.join(held) or 'none'})"
        )
    return folder / name


def load_checkpoint(path: Path, model: Transformer, optimizer: torch.optim.Optimizer) -> Progress:
    """Fill `model` and `optimizer` from a checkpoint, restore torch's random state, and return how far the run was.

    A parameter without optimizer state, because it never had a gradient, comes back without. Raises `InputError` for
    another model's checkpoint, naming the first field that differs, and for a damaged one.
    """
    _refuse_foreign(path, model)
    progress = _read_progress(path / _PROGRESS)
    current = model.state_dict()
    device = current["embed.weight"].device
    state = read_tensors(path, model.config, {name: tensor.dtype for name, tensor in current.items()}, device)
    model.load_state_dict(state, strict=True)
    _read_optimizer(path / _OPTIMIZER, model, optimizer)
    return progress


def _write(
    fresh: Path,
    model: Transformer,
    optimizer: torch.optim.Optimizer,
    progress: Progress,
    tokenizer: Tokenizer | None,
) -> None:
    state = model.state_dict()
    write_shards(fresh, [Entry(n, t.numel() * t.element_size(), lambda t=t: t) for n, t in state.items()])
    moments = {
        f"{name}/{key}": value.detach().cpu().contiguous().clone()
        for name, parameter in model.named_parameters()
        for key, value in optimizer.state.get(parameter, {}).items()
    }
    save_file({**moments, **_random_state()}, fresh / _OPTIMIZER)
    (fresh / "config.json").write_text(json.dumps(undertow_config(model.config), indent=2) + "\n", "utf-8")
    (fresh / _PROGRESS).write_text(json.dumps(asdict(progress), indent=2) + "\n", "utf-8")
    if tokenizer is not None:
        tokenizer.save(fresh)
    for file in (*fresh.iterdir(), fresh):
        sync(file)


def _point_latest(folder: Path, name: str) -> None:
    fresh = folder / f".{LATEST}{_UNFINISHED}"
    fresh.write_text(f"{name}\n", "utf-8")
    sync(fresh)
    os.replace(fresh, folder / LATEST)
    sync(folder)


def _random_state() -> dict[str, torch.Tensor]:
    states = {"random/cpu": torch.get_rng_state()}
    if torch.cuda.is_initialized():
        states |= {f"random/cuda:{i}": state for i, state in enumerate(torch.cuda.get_rng_state_all())}
    return states


def _refuse_foreign(path: Path, model: Transformer) -> None:
    theirs, ours = undertow_config(read_config(path)), undertow_config(model.config)
    for key in (key for key in ours if theirs[key] != ours[key]):
        raise InputError(
            f"{path}: a checkpoint of another model: its {key} is {theirs[key]}, this run's is {ours[key]}; "
            "resume with the recipe it was made with, or give the run another directory with out=DIR"
        )


def _read_progress(file: Path) -> Progress:
    try:
        values = json.loads(file.read_text("utf-8"))
        progress = Progress(**values)
    except (OSError, ValueError, TypeError):
        progress = None
    if progress is None or not _well_typed(progress):
        names = ", ".join(field.name for field in fields(Progress))
        raise InputError(f"{file}: damaged: a JSON object with {names} is expected; resume from an earlier checkpoint")
    return progress


def _well_typed(progress: Progress) -> bool:
    return type(progress.step) is int and type(progress.tokens) is int and isinstance(progress.cursor, dict)


def _read_optimizer(file: Path, model: Transformer, optimizer: torch.optim.Optimizer) -> None:
    parameters = dict(model.named_parameters())
    try:
        with safe_open(file, framework="pt", device="cpu") as handle:
            for key in handle.keys():  # noqa: SIM118 - the handle is no mapping
                name, _, part = key.rpartition("/")
                value = handle.get_tensor(key).clone()
                if name == "random":
                    _restore_random(part, value)
                    continue
                parameter = parameters.get(name)
                if parameter is None or (value.dim() and value.shape != parameter.shape):
                    raise InputError(f"{file}: {key} {list(value.shape)} belongs to no parameter of this model")
                # A step count stays where the optimizer keeps it; moments lie with their parameter.
                optimizer.state[parameter][part] = value.to(parameter.device) if value.dim() else value
    except (SafetensorError, OSError) as error:
        raise InputError(f"{file}: damaged ({error}); resume from an earlier checkpoint") from None


def _restore_random(device: str, state: torch.Tensor) -> None:
    if device == "cpu":
        torch.set_rng_state(state)
    elif torch.cuda.is_available() and int(device.partition(":")[2]) < torch.cuda.device_count():
        torch.cuda.set_rng_state(state, device)
