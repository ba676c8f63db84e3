"""What a run starts with: its device, and the trainer at the beginning or where a checkpoint left it."""

from __future__ import annotations

from pathlib import Path
from typing import TypeVar

import torch

from undertow.checkpoint.directory import load_model
from undertow.checkpoint.reading import existing_directory, read_shares
from undertow.checkpoint.shares import weight_shares
from undertow.checkpoint.training import load_checkpoint
from undertow.config.errors import InputError
from undertow.config.model import ModelConfig
from undertow.config.model_json import read_config
from undertow.config.schema import RunConfig
from undertow.config.section import Section
from undertow.config.training import IndexerConfig, TrainConfig
from undertow.config.world import World
from undertow.data.packing import Cursor, Packer
from undertow.model.build import build_model, fresh_values
from undertow.model.modules import again_of
from undertow.model.transformer import Transformer
from undertow.ops import Ops
from undertow.ops.registry import recipe_key
from undertow.optim.build import build_optimizer
from undertow.parallel.mesh import Mesh
from undertow.parallel.pipeline.run import Pipeline
from undertow.parallel.pipeline.stage import Stage as PipelineStage
from undertow.parallel.shard import share_out
from undertow.train.balance import routers
from undertow.train.loop import Trainer
from undertow.train.text import Text

_S = TypeVar("_S", bound=Section)

MEASURED = 3
"""The step of a run over a pipeline whose operations are measured, counted from where it begins or goes on."""

# Fields of a model that its weights do not depend on: a context may be extended from a model of a shorter one.
_FREE = {"initializer_range", "max_position_embeddings", "rope_scaling", "rope_theta", "compress_rope_theta"}


def trainer_of(
    config: RunConfig, text: Text, device: torch.device, checkpoint: Path | None, mesh: Mesh | None = None
) -> Trainer:
    """The trainer of a run at its beginning, or where `checkpoint` left it; of this rank's part, over `mesh`.

    Raises `InputError` for a checkpoint that this run cannot go on from.
    """
    settings, indexer = _settings(config)
    pipeline = None
    if mesh is None:
        model = _model(config, device, checkpoint is not None)
    else:
        model, stages = _part(config, device, checkpoint is not None, mesh)
        pipeline = Pipeline(model, mesh, stages, MEASURED) if stages else None
    for router in routers(model):
        router.uniform = settings.uniform_routing
    optimizer = build_optimizer(model, settings, mesh)
    progress = load_checkpoint(checkpoint, model, optimizer, mesh) if checkpoint else None
    optimizer.check_state()
    if progress and progress.step > settings.steps:
        raise InputError(
            f"train.steps {settings.steps}: the run is at step {progress.step} already; give more steps, or another "
            "directory with out=DIR"
        )
    cursor = Cursor.from_dict(progress.cursor) if progress else None
    packer = Packer(text.training_ids, settings.batch_size, settings.sequence_length, config.seed, cursor)
    recompute = again_of(config.recompute, config.model.num_hidden_layers)
    return Trainer(model, optimizer, packer, settings, indexer, progress, recompute, mesh, pipeline)


def _model(config: RunConfig, device: torch.device, resumed: bool) -> Transformer:
    """A fresh model, that of `init_from`, or an empty one where a checkpoint will fill it."""
    ops = Ops(choices_of(config), batch_invariant=config.numerics.batch_invariant, device=device)
    dtype = getattr(torch, config.numerics.dtype)
    source = config.init_from
    if resumed:
        return Transformer(config.model, ops, device, dtype)
    if source is None:
        return build_model(config.model, config.seed, dtype, device, ops)
    model = Transformer(config.model, ops, device, dtype)
    _refuse_other(config, read_config(existing_directory(Path(source))))
    model.load_state_dict(load_model(source, dtype, device, ops).state_dict())
    return model


def _refuse_other(config: RunConfig, theirs: ModelConfig) -> None:
    """Raises `InputError` where the model in `init_from` has another shape than this run's."""
    there, ours = theirs.model_dump(exclude=_FREE), config.model.model_dump(exclude=_FREE)
    for key in (key for key in ours if there[key] != ours[key]):
        raise InputError(
            f"init_from {config.init_from}: its {key} is {there[key]}, this recipe's model has {ours[key]}; "
            f"set model.{key} as there"
        )


@torch.no_grad()
def _part(
    config: RunConfig, device: torch.device, resumed: bool, mesh: Mesh
) -> tuple[Transformer, list[PipelineStage]]:
    """This rank's part of the model that `_model` would give, and its stages of a pipeline; nowhere is it whole."""
    ops = Ops(choices_of(config), batch_invariant=config.numerics.batch_invariant, device=device)
    dtype = getattr(torch, config.numerics.dtype)
    model = Transformer(config.model, ops, "meta", dtype, mesh.part)
    stages = share_out(model, mesh)
    model.to_empty(device=device)
    source = config.init_from
    if resumed:
        return model, stages
    shares = weight_shares(model, mesh)
    if source is not None:
        directory = existing_directory(Path(source))
        _refuse_other(config, read_config(directory))
        for name, rows in read_shares(directory, config.model, shares).items():
            shares[name].tensor.copy_(rows)
        return model, stages
    for name, whole in fresh_values(Transformer(config.model, ops, "meta", dtype), config.seed):
        if share := shares.get(name):
            share.tensor.copy_(whole[share.rows] if share.whole else whole)
        del whole  # before the next one is made
    return model, stages


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


def device_of(name: str, world: World | None = None) -> torch.device:
    """The device that `auto`, `cpu` or `cuda` means here; of several processes each has a GPU of its own.

    Raises `InputError` for `cuda` without a GPU, and for more processes on a machine than it has.
    """
    found = torch.cuda.is_available()
    if name == "cuda" and not found:
        raise InputError("device 'cuda': torch sees no GPU here; use device=cpu or device=auto")
    if name == "cpu" or not found:
        return torch.device("cpu")
    if world is None:
        return torch.device("cuda")
    if world.local_ranks > torch.cuda.device_count():
        raise InputError(
            f"{world.local_ranks} processes on this machine: it has {torch.cuda.device_count()} GPUs; start one for "
            "each, or use device=cpu"
        )
    return torch.device("cuda", world.local_rank)
