"""Schedules of a run, step by step."""

import pytest

from undertow.config.training import IndexerConfig, TrainConfig
from undertow.train.stages import stage_of


def stages(steps: int, indexer: dict | None = None, **settings) -> list:
    base = dict(steps=steps, warmup_steps=2, learning_rate=1.0, min_learning_rate=0.1)
    chosen = TrainConfig.model_validate(base | settings)
    return [stage_of(step, chosen, IndexerConfig.model_validate(indexer or {})) for step in range(1, steps + 1)]


def test_batch_size_and_length_change_at_their_steps():
    every = stages(
        6, batch_size=2, batch_size_schedule=[[3, 4], [5, 8]], sequence_length=16, sequence_length_schedule=[[4, 32]]
    )
    assert [stage.batch_size for stage in every] == [2, 2, 4, 4, 8, 8]
    assert [stage.sequence_length for stage in every] == [16, 16, 16, 32, 32, 32]


def test_mtp_weight_falls_when_the_decay_begins():
    every = stages(10, decay_fraction=0.5)
    assert [stage.learning_rate for stage in every][:6] == [0.5, 1, 1, 1, 1, 1]
    assert every[6].learning_rate < 1 and every[-1].learning_rate == pytest.approx(0.1)
    assert [stage.mtp_weight for stage in every] == [0.3] * 6 + [0.1] * 4


def test_a_run_that_never_decays_keeps_the_weight():
    assert [stage.mtp_weight for stage in stages(4, decay_fraction=0.0)] == [0.3] * 4
    assert [stage.mtp_weight for stage in stages(2, warmup_steps=5)] == [0.3] * 2


def test_by_default_the_indexer_learns_from_its_selection_from_the_first_step():
    assert {(*stage.indexing[:2], stage.indexer_alone) for stage in stages(3)} == {(False, True, False)}


def test_dense_then_warm_up_alone_then_sparse():
    every = stages(8, dict(dense_steps=3, warmup_steps=2, warmup_learning_rate=0.7), decay_fraction=0.0)
    assert [stage.indexing.dense for stage in every] == [True] * 5 + [False] * 3
    assert [stage.indexer_alone for stage in every] == [False] * 3 + [True] * 2 + [False] * 3
    assert all(stage.indexing.distil for stage in every)
    assert [stage.learning_rate for stage in every] == [0.5, 1, 1, 0.7, 0.7, 1, 1, 1]


def test_the_warm_up_stops_the_clock_of_the_schedule():
    plain = [stage.learning_rate for stage in stages(6)]
    with_warm_up = [stage.learning_rate for stage in stages(9, dict(dense_steps=4, warmup_steps=3))]
    assert with_warm_up[:4] + with_warm_up[7:] == plain


def test_a_run_may_end_before_its_stages_do():
    plain = [stage.learning_rate for stage in stages(6)]
    assert [stage.learning_rate for stage in stages(6, dict(dense_steps=80, warmup_steps=9))] == plain
    cut = stages(6, dict(dense_steps=4, warmup_steps=9, warmup_learning_rate=0.7))
    assert [stage.learning_rate for stage in cut] == [stage.learning_rate for stage in stages(4)] + [0.7, 0.7]


def test_frozen_and_dense_stages_without_distillation():
    assert not any(stage.indexing.distil for stage in stages(3, dict(frozen=True)))
    every = stages(4, dict(dense_steps=2, learns_while_dense=False))
    assert [stage.indexing.distil for stage in every] == [False, False, True, True]
