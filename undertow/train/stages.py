"""What a step of a run is: how many tokens, which rates and weights, and what of the indexer takes part."""

from __future__ import annotations

from dataclasses import dataclass

from undertow.config.training import IndexerConfig, TrainConfig
from undertow.model.context import Indexing
from undertow.optim.schedule import decay_start, learning_rate


@dataclass(frozen=True)
class Stage:
    """One step's settings. `indexer_alone`: all other parameters rest (the dense warm-up, model card 4.2)."""

    batch_size: int
    sequence_length: int
    learning_rate: float
    mtp_weight: float
    indexing: Indexing
    indexer_alone: bool


def stage_of(step: int, settings: TrainConfig, indexer: IndexerConfig) -> Stage:
    """The `step`-th step, counted from 1, of a run.

    The learning rate and the MTP weight follow the steps that train the whole model: the indexer's warm-up, with a
    constant rate of its own, stops their clock.
    """
    dense_until = indexer.dense_steps + indexer.warmup_steps
    alone = indexer.dense_steps < step <= dense_until
    clock = min(step, max(indexer.dense_steps, step - indexer.warmup_steps))
    whole = settings.steps - min(indexer.warmup_steps, max(0, settings.steps - indexer.dense_steps))
    decaying = clock > decay_start(whole, settings)
    dense = step <= dense_until
    distil = not indexer.frozen and (step > indexer.dense_steps or indexer.learns_while_dense)
    return Stage(
        batch_size=_at(step, settings.batch_size, settings.batch_size_schedule),
        sequence_length=_at(step, settings.sequence_length, settings.sequence_length_schedule),
        learning_rate=indexer.warmup_learning_rate if alone else learning_rate(clock, whole, settings),
        mtp_weight=settings.mtp_weight_in_decay if decaying else settings.mtp_weight,
        indexing=Indexing(dense=dense, distil=distil),
        indexer_alone=alone,
    )


def _at(step: int, first: int, schedule: list[list[int]]) -> int:
    """The value in force at `step`: `first` until a pair of the schedule says otherwise."""
    return next((value for start, value in reversed(schedule) if step >= start), first)
