"""What a run starts with: its device, and the trainer at the beginning or where a checkpoint left it."""

from __future__ import annotations

from collections.abc import Collection
from pathlib import Path
from typing import TypeVar

import torch

from undertow.checkpoint.directory import load_model
from undertow.checkpoint.training import load_checkpoint
from undertow.config.errors import InputError
from undertow.config.schema import RunConfig
from undertow.config.section import Section
from undertow.config.training import IndexerConfig, TrainConfig
from undertow.data.packing import Cursor, Packer
from undertow.model.build import build_model
from undertow.model.transformer import Transformer
from undertow.ops import Ops
from undertow.ops.registry import choose
from undertow.optim.build import build_optimizer
from undertow.train.loop import Trainer
from undertow.train.text import Text

_S = TypeVar("_S", bound=Section)


def trainer_of(config: RunConfig, text: Text, device: torch.device, checkpoint: Path | None) -> Trainer:
    """The trainer of a run at its beginning, or where `checkpoint` left it."""
    settings, indexer = _whole(TrainConfig, config.train), _whole(IndexerConfig, config.indexer)
    model = _model(config, device)
    optimizer = build_optimizer(model, settings)
    progress = load_checkpoint(checkpoint, model, optimizer) if checkpoint else None
    cursor = Cursor.from_dict(progress.cursor) if progress else None
    packer = Packer(text.training_ids, settings.batch_size, settings.sequence_length, config.seed, cursor)
    return Trainer(model, optimizer, packer, settings, indexer, progress, _recomputed(config))


def _model(config: RunConfig, device: torch.device) -> Transformer:
    """A fresh model, or that of `init_from`, which must be the recipe's."""
    ops = Ops(_choices(config, device), batch_invariant=config.numerics.batch_invariant, device=device)
    dtype = getattr(torch, config.numerics.dtype)
    if config.init_from is None:
        return build_model(config.model, config.seed, dtype, device, ops)
    model = load_model(config.init_from, dtype, device, ops)
    theirs, ours = model.config.model_dump(), config.model.model_dump()
    for key in (key for key in ours if theirs[key] != ours[key]):
        raise InputError(
            f"init_from {config.init_from}: its {key} is {theirs[key]}, this recipe's model has {ours[key]}; "
            f"set model.{key} as there"
        )
    return model


def _whole(kind: type[_S], section: _S) -> _S:
    """All keys of a section, each noted as read: the loop takes every one of them."""
    return kind(**{name: getattr(section, name) for name in kind.model_fields})


def _recomputed(config: RunConfig) -> Collection[int]:
    layers = config.recompute.layers
    return range(config.model.num_hidden_layers) if layers == "all" else () if layers == "none" else layers


def _choices(config: RunConfig, device: torch.device) -> dict[str, str]:
    """Backends by operator. Both attention paths are one operator here, so both keys must be able to serve."""
    choices: dict[str, str] = dict(config.ops)
    for key in ("backend", "csa_backend"):
        wanted = getattr(config.attention, key)
        if wanted != "auto":
            choices["sparse_attention"] = choose("sparse_attention", device, wanted).chosen
    return choices


def device_of(name: str) -> torch.device:
    found = torch.cuda.is_available()
    if name == "cuda" and not found:
        raise InputError("device 'cuda': torch sees no GPU here; use device=cpu or device=auto")
    return torch.device("cuda" if name != "cpu" and found else "cpu")
