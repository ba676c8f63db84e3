"""Microbatches in flight, from the orders of schedules."""

from __future__ import annotations

import pytest

from undertow.config.model import ModelConfig
from undertow.planner.activations import Microbatch, SavedTable
from undertow.planner.geometry import Batch, build_geometry
from undertow.planner.inflight import held_by_schedule
from undertow.planner.layout import parse_layout
from undertow.planner.schedules import build_schedule

FLASH = ModelConfig.from_preset("v4-flash", indexer="own_rank")
SAVED = SavedTable(Microbatch(FLASH, build_geometry(32, pipeline=4, expert=8), Batch(256, 4096), "tight"))


@pytest.mark.parametrize(("microbatches", "counts"), [(32, [4, 3, 2, 1]), (2, [2, 2, 2, 1])])
def test_1f1b(microbatches, counts):
    layout = parse_layout("Et*10|t*12|t*12|t*9mL")
    held = held_by_schedule(build_schedule("1f1b", 4, microbatches), layout, SAVED)
    assert [[count for _, count in rank] for rank in held] == [[count] for count in counts]
    assert held[3][0].stage.layers == (*range(34, 44),) and held[0][0].stage.embedding


def test_split_backward_holds_until_the_weight_gradient():
    layout = parse_layout("Et*10|t*12|t*12|t*9mL")
    held = held_by_schedule(build_schedule("zb-h1", 4, 32), layout, SAVED)
    assert [count for ((_, count),) in held] == [4, 4, 4, 4]


def test_interleaved():
    layout = parse_layout("Et*6|t*5|t*6|t*6|t*6|t*6|t*5|t*3mL")
    held = held_by_schedule(build_schedule("interleaved", 4, 32, 2), layout, SAVED)
    # (2(p-s-1) + (v-1)p + 1) chunks of v = 2 in flight on stage s.
    assert [sum(count for _, count in rank) for rank in held] == [11, 9, 7, 5]
    assert held[0][0].stage.layers == tuple(range(6)) and held[0][1].stage.layers == tuple(range(23, 29))
    # The published projection of this layout: 266 GB of activations on the first rank.
    primus = SavedTable(Microbatch(FLASH, SAVED.m.geometry, SAVED.m.batch, "primus"))
    kept = sum(primus.stage(stage).total * count for stage, count in held[0])
    assert kept == pytest.approx(266e9, rel=3e-3)
