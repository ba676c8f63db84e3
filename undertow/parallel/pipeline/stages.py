"""The stages of a pipeline, read off its layout: which modules of the model each has, and which rank runs it."""

from __future__ import annotations

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
