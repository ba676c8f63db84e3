"""What of a run's parallelism cannot be trained: axes that are not built, and widths that the processes do not have.

Nothing here imports torch, so that a dry run refuses what the processes would.
"""

from __future__ import annotations

from collections.abc import Iterator

from undertow.config.errors import ConfigError
from undertow.config.geometry import build_geometry, check_model
from undertow.config.parallel import UNBUILT_AXES, ParallelConfig
from undertow.config.scalars import told
from undertow.config.schema import RunConfig
from undertow.config.training import TrainConfig
from undertow.model.modules import again_of
from undertow.parallel.pipeline.stages import build_stages, check_schedule

WIDTHS = ("tensor", "pipeline", "expert", "context")


def refuse_wider(config: RunConfig, ranks: int = 1) -> None:
    """Refuse keys that can be planned but not run by so many processes. Raises `ConfigError` naming the first, and its
    value."""
    parallel = config.parallel
    for name in WIDTHS:
        if (width := getattr(parallel, name)) != 1 and (name in UNBUILT_AXES or ranks == 1):
            raise _planned(f"parallel.{name} is {width}", f"{_alone(name, ranks)}; set parallel.{name}=1")
    if (gpus := parallel.gpus) and (count := int(gpus.lower().partition("x")[0])) > 1 and count != ranks:
        raise _planned(f"parallel.gpus is {gpus}", f"{_started(ranks)}; start {count}, or set parallel.gpus=null")
    if parallel.pipeline == 1:
        _refuse_stages(parallel)
    geometry = build_geometry(
        ranks, tensor=parallel.tensor, pipeline=parallel.pipeline, expert=parallel.expert, context=parallel.context,
        shard=parallel.shard,
    )  # fmt: skip
    check_model(config.model, geometry)
    _refuse_batches(config.train, geometry.data)
    if parallel.pipeline > 1:
        _refuse_pipeline(config, geometry.data)


def _refuse_stages(parallel: ParallelConfig) -> None:
    if parallel.schedule != "1f1b":
        raise _planned(f"parallel.schedule is {parallel.schedule}", "there is no pipeline; set parallel.schedule=1f1b")
    layout = parallel.layout
    if layout is not None and (len(layout) > 1 if isinstance(layout, list) else "|" in layout):
        raise _planned(f"parallel.layout is {told(layout)}", "training has one stage; set parallel.layout=null")


def _batches(train: TrainConfig) -> Iterator[tuple[str, int]]:
    """Every batch size that a run comes to, with its key."""
    yield "train.batch_size", train.batch_size
    for _, size in train.batch_size_schedule:
        yield "train.batch_size_schedule", size


def _refuse_batches(train: TrainConfig, ranks: int) -> None:
    """Every batch must be cut into as many sequences for each data-parallel rank."""
    for key, size in _batches(train):
        if size % ranks:
            raise ConfigError(
                f"{key} {size}: {ranks} data-parallel ranks take as many sequences each; give a multiple of {ranks}"
            )


def _refuse_pipeline(config: RunConfig, ranks: int) -> None:
    """Layout and schedule must suit each other and the model, and every batch the schedule."""
    stages = build_stages(config.parallel, config.model)
    again = again_of(config.recompute, config.model.num_hidden_layers)
    for key, size in _batches(config.train):
        rows = size // ranks
        each = config.train.micro_batch_size or rows
        if rows % each:
            raise ConfigError(
                f"{key} {size}: each data-parallel rank has {rows} sequences, which train.micro_batch_size {each} does "
                "not divide; a pipeline takes equal micro-batches"
            )
        check_schedule(stages.schedule, stages.ranks, rows // each, again)


def _alone(axis: str, ranks: int) -> str:
    if axis in UNBUILT_AXES:
        return "this version trains without that axis"
    return _started(ranks)


def _started(ranks: int) -> str:
    return "one process was started" if ranks == 1 else f"{ranks} processes were started"


def _planned(given: str, why: str) -> ConfigError:
    return ConfigError(f"{given}: it can be planned (undertow plan), but {why}")
