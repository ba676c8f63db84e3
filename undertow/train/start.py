"""What a run starts with: its device, and the trainer at the beginning or where a checkpoint left it."""

from __future__ import annotations

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
from undertow.model.modules import again_of
from undertow.model.transformer import Transformer
from undertow.ops import Ops
from undertow.ops.registry import recipe_key
from undertow.optim.build import build_optimizer
from undertow.train.loop import Trainer
from undertow.train.text import Text

_S = TypeVar("_S", bound=Section)

# Fields of a model that its weights do not depend on: a context may be extended from a model of a shorter one.
_FREE = {"initializer_range", "max_position_embeddings", "rope_scaling", "rope_theta", "compress_rope_theta"}


def trainer_of(config: RunConfig, text: Text, device: torch.device, checkpoint: Path | None) -> Trainer:
    """The trainer of a run at its beginning, or where `checkpoint` left it.

    Raises `InputError` for a checkpoint that this run cannot go on from.
    """
    settings, indexer = _settings(config)
    model = _model(config, device, checkpoint is not None)
    optimizer = build_optimizer(model, settings)
    progress = load_checkpoint(checkpoint, model, optimizer) if checkpoint else None
    optimizer.check_state()
    if progress and progress.step > settings.steps:
        raise InputError(
            f"train.steps {settings.steps}: the run is at step {progress.step} already; give more steps, or another "
            "directory with out=DIR"
        )
    cursor = Cursor.from_dict(progress.cursor) if progress else None
    packer = Packer(text.training_ids, settings.batch_size, settings.sequence_length, config.seed, cursor)
    recompute = again_of(config.recompute, config.model.num_hidden_layers)
    return Trainer(model, optimizer, packer, settings, indexer, progress, recompute)


def _model(config: RunConfig, device: torch.device, resumed: bool) -> Transformer:
    """A fresh model, that of `init_from`, or an empty one where a checkpoint will fill it."""
    ops = Ops(choices_of(config), batch_invariant=config.numerics.batch_invariant, device=device)
    dtype = getattr(torch, config.numerics.dtype)
    source = config.init_from
    if resumed:
        return Transformer(config.model, ops, device, dtype)
    if source is None:
        return build_model(config.model, config.seed, dtype, device, ops)
    loaded = load_model(source, dtype, device, ops)
    theirs, ours = loaded.config.model_dump(exclude=_FREE), config.model.model_dump(exclude=_FREE)
    for key in (key for key in ours if theirs[key] != ours[key]):
        raise InputError(
            f"init_from {source}: its {key} is {theirs[key]}, this recipe's model has {ours[key]}; "
            f"set model.{key} as there"
        )
    model = Transformer(config.model, ops, device, dtype)
    model.load_state_dict(loaded.state_dict())
    return model


def _settings(config: RunConfig) -> tuple[TrainConfig, IndexerConfig]:
    """The sections of the loop. Keys that have no effect beside the others stay unread, and so are refused if set."""
    idle = set() if config.train.optimizer == "muon" else {"momentum", "muon_split_heads", "muon_dtype"}
    settings = _section(TrainConfig, config.train, idle)
    if config.indexer.frozen:
        return settings, _section(
            IndexerConfig, config.indexer, {"weight", "warmup_learning_rate", "learns_while_dense"}
        )
    idle = set() if config.indexer.dense_steps else {"learns_while_dense"}
    idle |= set() if config.indexer.warmup_steps else {"warmup_learning_rate"}
    return settings, _section(IndexerConfig, config.indexer, idle)


def _section(kind: type[_S], section: _S, unread: set[str]) -> _S:
    return kind(**{name: getattr(section, name) for name in kind.model_fields if name not in unread})


def choices_of(config: RunConfig) -> dict[str, str]:
    """Backends by operator; those of attention have keys of their own. Raises `InputError` for both at once."""
    choices: dict[str, str] = dict(config.ops)
    attention = {"sparse_attention": config.attention.backend, "csa_attention": config.attention.csa_backend}
    for op in (op for op in attention if op in choices):
        raise InputError(f"ops.{op} {choices[op]}: {recipe_key(op)} chooses that backend; set it there")
    return choices | attention


def device_of(name: str) -> torch.device:
    """The device that `auto`, `cpu` or `cuda` means here. Raises `InputError` for `cuda` without a GPU."""
    found = torch.cuda.is_available()
    if name == "cuda" and not found:
        raise InputError("device 'cuda': torch sees no GPU here; use device=cpu or device=auto")
    return torch.device("cuda" if name != "cpu" and found else "cpu")
