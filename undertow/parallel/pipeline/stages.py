"""The stages of a pipeline, read off its layout: which modules of the model each has, which rank runs it, and what its
schedule asks for.

Nothing here imports torch.
"""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass

from undertow.config.errors import ConfigError
from undertow.config.layout import Layout, check_layout, parse_layout, place, placement_of, spread_evenly
from undertow.config.model import ModelConfig
from undertow.config.parallel import ParallelConfig, Schedule
from undertow.model.part import Part

CHUNKS: dict[Schedule, int | None] = {"1f1b": 1, "zb-h1": 1, "interleaved": None, "zbv": 2}
"""Stages on each rank, where a schedule takes one number alone."""


@dataclass(frozen=True)
class Stages:
    """`layout` over `ranks` pipeline ranks under a `schedule`. Made by `build_stages`."""

    layout: Layout
    ranks: int
    schedule: Schedule

    @property
    def count(self) -> int:
        """Stages of all ranks."""
        return len(self.layout.stages)

    def rank_of(self, number: int) -> int:
        """The pipeline rank that runs a stage."""
        return place(number, self.ranks, placement_of(self.schedule))[0]

    def stage(self, number: int) -> Part:
        """The modules that a stage runs. They may be fewer than those its rank holds."""
        letters = self.layout.stages[number]
        return Part(tuple(self.layout.layers(number)), "E" in letters, "L" in letters, "m" in letters)

    def of_rank(self, rank: int) -> list[int]:
        """The stages that a rank runs, chunk by chunk."""
        return [number for number in range(self.count) if self.rank_of(number) == rank]

    def part(self, rank: int) -> Part:
        """All modules that a rank holds."""
        own = [self.stage(number) for number in self.of_rank(rank)]
        layers = sorted(layer for stage in own for layer in stage.layers)
        return Part(tuple(layers), *(any(getattr(stage, end) for stage in own) for end in ("embedding", "head", "mtp")))

    def rank_with(self, letter: str) -> int | None:
        """The pipeline rank whose stage has the embedding `E`, the loss `L` or the MTP blocks `m`, if one has."""
        found = (number for number, letters in enumerate(self.layout.stages) if letter in letters)
        number = next(found, None)
        return None if number is None else self.rank_of(number)


def build_stages(parallel: ParallelConfig, config: ModelConfig) -> Stages:
    """The stages that a recipe asks for; without a layout, layers are spread evenly.

    Raises `ConfigError` for a layout that suits neither model, ranks nor schedule.
    """
    ranks, schedule = parallel.pipeline, parallel.schedule
    wanted = CHUNKS[schedule]
    if parallel.layout is None:
        layout = spread_evenly(config, ranks, wanted or 2)
    else:
        layout = parse_layout(parallel.layout)
    chunks = check_layout(layout, config, ranks, placement_of(schedule))
    if chunks != (wanted or max(chunks, 2)):
        raise ConfigError(
            f"parallel.schedule {schedule} takes {wanted or '2 or more'} stages on each rank; layout '{layout}' has "
            f"{chunks} on each of {ranks} pipeline ranks; change the layout, or parallel.schedule"
        )
    return Stages(layout, ranks, schedule)


def splits_backward(schedule: Schedule) -> bool:
    """Whether a schedule makes gradients of inputs first, and those of weights later."""
    return schedule in ("zb-h1", "zbv")


def check_torch(schedule: Schedule, version: str) -> None:
    """Raises `ConfigError` for a `version` of torch whose splitting of the backward pass makes wrong gradients: before
    2.13 it takes those of an operator's several results for one."""
    if splits_backward(schedule) and tuple(map(int, version.split(".")[:2])) < (2, 13):
        raise ConfigError(
            f"parallel.schedule {schedule}: it splits the backward pass, which torch {version} does wrongly for "
            "operators of several results; use 1f1b or interleaved, or torch 2.13"
        )


def check_schedule(schedule: Schedule, ranks: int, microbatches: int, recompute: Collection[object] = ()) -> None:
    """Raises `ConfigError` where a schedule does not run so many microbatches of a step, or recomputes nothing."""
    told = f"parallel.schedule {schedule}: {microbatches} micro-batches of a step on each data-parallel rank"
    mend = "change train.batch_size or train.micro_batch_size"
    if schedule == "1f1b" and microbatches < ranks:
        raise ConfigError(f"{told} are fewer than the {ranks} pipeline ranks; allowed: at least {ranks}; {mend}")
    if schedule == "interleaved" and microbatches % ranks:
        raise ConfigError(f"{told}; allowed: a multiple of the {ranks} pipeline ranks; {mend}")
    if schedule == "zb-h1" and microbatches % max(1, microbatches // ranks):
        raise ConfigError(f"{told}; allowed: at most, or a multiple of, the {ranks} pipeline ranks; {mend}")
    if splits_backward(schedule) and recompute:
        raise ConfigError(
            f"parallel.schedule {schedule} splits the backward pass, so nothing can be recomputed; recompute none, or "
            "use 1f1b or interleaved"
        )
