"""Microbatches in flight, from the orders of schedules."""

from __future__ import annotations

import pytest

from undertow.config.layout import parse_layout
from undertow.config.model import ModelConfig
from undertow.planner.geometry import Batch, build_geometry
from undertow.planner.memory.activations import Microbatch
from undertow.planner.memory.inflight import held_by_1f1b, held_by_schedule
from undertow.planner.memory.saved import SavedTable
from undertow.planner.pipeline.schedules import build_schedule

FLASH = ModelConfig.from_preset("v4-flash", indexer="own_rank")
SAVED = SavedTable(Microbatch(FLASH, build_geometry(32, pipeline=4, expert=8), Batch(256, 4096), "tight"))


@pytest.mark.parametrize(("microbatches", "counts"), [(32, [4, 3, 2, 1]), (2, [2, 2, 2, 1])])
def test_1f1b(microbatches, counts):
    layout = parse_layout("Et*10|t*12|t*12|t*9mL")
    held = held_by_schedule(build_schedule("1f1b", 4, microbatches), layout, SAVED)
    assert [[each.in_flight for each in rank] for rank in held] == [[count] for count in counts]
    assert held_by_1f1b(layout, microbatches) == held
    assert held[3][0].stage.layers == (*range(34, 44),) and held[0][0].stage.embedding


def test_split_backward_holds_until_the_weight_gradient():
    layout = parse_layout("Et*10|t*12|t*12|t*9mL")
    held = held_by_schedule(build_schedule("zb-h1", 4, 32), layout, SAVED)
    assert [(each.in_flight, each.due) for (each,) in held] == [(4, 0), (3, 1), (2, 2), (1, 3)]


def test_interleaved():
    layout = parse_layout("Et*6|t*5|t*6|t*6|t*6|t*6|t*5|t*3mL")
    held = held_by_schedule(build_schedule("interleaved", 4, 32, 2), layout, SAVED)
    # (2(p-s-1) + (v-1)p + 1) chunks of v = 2 in flight on stage s.
    assert [sum(each.in_flight for each in rank) for rank in held] == [11, 9, 7, 5]
    assert held[0][0].stage.layers == tuple(range(6)) and held[0][1].stage.layers == tuple(range(23, 29))
    # The published projection of this layout: 266 GB of activations on the first rank.
    primus = SavedTable(Microbatch(FLASH, SAVED.m.geometry, SAVED.m.batch, "primus"))
    kept = sum(primus.stage(each.stage).total * each.in_flight for each in held[0])
    assert kept == pytest.approx(266e9, rel=3e-3)


@pytest.mark.parametrize("ranks", [2, 4, 8])
@pytest.mark.parametrize("pace", [(1, 1, 1), (10, 12, 9)])
def test_zbv_holds_two_chunks_a_rank_and_few_that_wait_for_weights(ranks, pace):
    for microbatches in (ranks, ranks + 1, 3 * ranks, 64):
        for order in build_schedule("zbv", ranks, microbatches, 2, pace).orders:
            flying = kept = most = most_kept = 0
            for kind, _, _ in order:
                flying += (kind == "F") - (kind == "B")
                kept += (kind == "F") - (kind == "W")
                most, most_kept = max(most, flying), max(most_kept, kept)
            assert most <= 2 * ranks and most_kept <= 2 * ranks + 4
