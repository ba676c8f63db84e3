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
from safetensors import SafetensorError

from undertow.checkpoint.optimizer_state import optimizer_tensors, read_optimizer
from undertow.checkpoint.reading import read_tensors
from undertow.checkpoint.shards import Entry, sync, write_shards, write_tensors
from undertow.config.errors import InputError, UndertowError
from undertow.config.model_json import read_config, undertow_config
from undertow.data.tokenizer import Tokenizer
from undertow.model.transformer import Transformer

LATEST = "latest"
_OPTIMIZER, _PROGRESS = "optimizer.safetensors", "progress.json"
_NAME = re.compile(r"step-([0-9]{1,18})")
_UNFINISHED = ".writing"


@dataclass(frozen=True)
class Progress:
    """How far a run is: optimizer steps done, tokens learned from, and where its data goes on (`Cursor.to_dict`)."""

    step: int
    tokens: int
    cursor: dict[str, Any]


@dataclass(frozen=True)
class _Held:
    """What the tensor files of a checkpoint hold: the weights' dtype, and the names in `optimizer.safetensors`."""

    dtype: str
    optimizer: list[str]


def save_checkpoint(
    folder: Path,
    model: Transformer,
    optimizer: torch.optim.Optimizer,
    progress: Progress,
    tokenizer: Tokenizer | None = None,
) -> Path:
    """Write `folder/step-N` and make it the latest; return its path.

    Files are written to a temporary directory, synced and renamed, then `latest` is replaced: killed at any moment,
    `latest` names a complete checkpoint. Raises `UndertowError` if writing fails or a number in it is not finite;
    what was there is then untouched.
    """
    target = folder / f"step-{progress.step}"
    tensors = model.state_dict(), optimizer_tensors(model, optimizer)
    for name, tensor in (item for part in tensors for item in part.items()):
        if not bool(torch.isfinite(tensor).all()):
            raise UndertowError(
                f"{target}: {name} is not finite; no checkpoint is written, the one before it is intact"
            )
    fresh = folder / f".{target.name}{_UNFINISHED}"
    try:
        folder.mkdir(parents=True, exist_ok=True)
        for left in folder.glob(f".*{_UNFINISHED}"):  # of a process that was killed: a run has one writer
            shutil.rmtree(left) if left.is_dir() else left.unlink()
        fresh.mkdir()
        _write(fresh, model, tensors, progress, tokenizer)
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
    """The checkpoint that `latest` names, or None where none was completed.

    Without `latest` it is the one of the highest step: a checkpoint bears its name only once it is complete, and a run
    killed just before its first `latest` goes on from there. Raises `InputError` for a `latest` that names none.
    """
    pointer = folder / LATEST
    steps = sorted(int(found[1]) for p in folder.glob("step-*") if (found := _NAME.fullmatch(p.name)) and p.is_dir())
    held = ", ".join(f"step-{step}" for step in steps) or "none"
    if not pointer.exists():
        return folder / f"step-{steps[-1]}" if steps else None
    try:
        name = pointer.read_text("utf-8", errors="replace").strip()
    except OSError as error:
        raise InputError(
            f"{pointer}: cannot be read ({error.strerror}); make it a file with the name of a checkpoint "
            f"(there are {held})"
        ) from None
    if not _NAME.fullmatch(name) or not (folder / name).is_dir():
        raise InputError(
            f"{pointer}: names {name[:40]!r}, which is no checkpoint here; write the name of one into it "
            f"(there are {held})"
        )
    return folder / name


def load_checkpoint(path: Path, model: Transformer, optimizer: torch.optim.Optimizer) -> Progress:
    """Fill `model` and `optimizer` from a checkpoint, restore torch's random state, and return how far the run was.

    A parameter without optimizer state, because it never had a gradient, comes back without. Raises `InputError` for
    another model's checkpoint, naming the first field that differs, and for a damaged one.
    """
    _refuse_foreign(path, model)
    progress, held = _read_progress(path / _PROGRESS)
    current = model.state_dict()
    device, dtype = current["embed.weight"].device, _dtype(model)
    if held.dtype != dtype:
        raise InputError(
            f"{path}: a checkpoint of a run in {held.dtype}, this run is in {dtype}; resume with "
            f"numerics.dtype={held.dtype}, or give the run another directory with out=DIR"
        )
    state = read_tensors(path, model.config, {name: tensor.dtype for name, tensor in current.items()}, device)
    model.load_state_dict(state, strict=True)
    read_optimizer(path / _OPTIMIZER, model, optimizer, held.optimizer)
    return progress


def _write(
    fresh: Path,
    model: Transformer,
    tensors: tuple[dict[str, torch.Tensor], dict[str, torch.Tensor]],
    progress: Progress,
    tokenizer: Tokenizer | None,
) -> None:
    state, moments = tensors
    write_shards(fresh, [Entry(n, t.numel() * t.element_size(), lambda t=t: t) for n, t in state.items()])
    kept = {name: tensor.detach().cpu().contiguous().clone() for name, tensor in moments.items()}
    write_tensors(fresh / _OPTIMIZER, kept)
    record = asdict(progress) | asdict(_Held(_dtype(model), sorted(moments)))
    (fresh / "config.json").write_text(json.dumps(undertow_config(model.config), indent=2) + "\n", "utf-8")
    (fresh / _PROGRESS).write_text(json.dumps(record, indent=2) + "\n", "utf-8")
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


def _dtype(model: Transformer) -> str:
    return str(model.embed.weight.dtype).removeprefix("torch.")


def _refuse_foreign(path: Path, model: Transformer) -> None:
    theirs, ours = undertow_config(read_config(path)), undertow_config(model.config)
    for key in (key for key in ours if theirs[key] != ours[key]):
        raise InputError(
            f"{path}: a checkpoint of another model: its {key} is {theirs[key]}, this run's is {ours[key]}; "
            "resume with the recipe it was made with, or give the run another directory with out=DIR"
        )


def _read_progress(file: Path) -> tuple[Progress, _Held]:
    names = [field.name for kind in (Progress, _Held) for field in fields(kind)]
    try:
        values = json.loads(file.read_text("utf-8"))
        if values.keys() != set(names):
            raise ValueError
    except (OSError, ValueError, AttributeError, RecursionError):
        values = {}
    held = _Held(values.get("dtype", ""), values.get("optimizer", []))
    progress = Progress(values.get("step", -1), values.get("tokens", -1), values.get("cursor", {}))
    if not (_sound(progress) and isinstance(held.dtype, str) and isinstance(held.optimizer, list)):
        raise InputError(
            f"{file}: damaged: a JSON object with {', '.join(names)} is expected; resume from an earlier checkpoint"
        )
    named = _NAME.fullmatch(file.parent.name)
    if named and int(named[1]) != progress.step:
        raise InputError(
            f"{file}: damaged: says step {progress.step} in {file.parent.name}; resume from an earlier checkpoint"
        )
    return progress, held


def _sound(progress: Progress) -> bool:
    counts = progress.step, progress.tokens
    return all(type(n) is int and 0 <= n < 2**63 for n in counts) and isinstance(progress.cursor, dict)
