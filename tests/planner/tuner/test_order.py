"""Schedules prepared for a search: who waits for whom, and the worst moments of each rank."""

from __future__ import annotations

from itertools import product
from random import Random

import pytest

from undertow.planner.pipeline.schedules import EQUAL
from undertow.planner.tuner.order import _highest, order_of

SCHEDULES = [("1f1b", 1), ("interleaved", 2), ("interleaved", 3), ("zb-h1", 1), ("zbv", 2)]


@pytest.mark.parametrize(("name", "chunks"), SCHEDULES)
def test_the_program_has_every_operation_after_what_it_needs(name, chunks):
    order = order_of(name, 4, 8, chunks, EQUAL)
    steps = order.program
    assert len(steps) == order.operations == 4 * chunks * 8 * (3 if order.schedule.split else 2)
    for number, step in enumerate(steps):
        assert step.source < number or step.source == order.operations
        assert step.source == order.operations or steps[step.source].rank != step.rank
    # Each duration, of a stage and a kind of operation, is there once a microbatch.
    found = [step.duration for step in steps]
    kinds = range(3) if order.schedule.split else range(2)
    assert all(found.count(3 * stage + kind) == 8 for stage, kind in product(range(4 * chunks), kinds))


def test_ranks_of_stages():
    assert order_of("1f1b", 3, 4, 1, EQUAL).rank_of == (0, 1, 2)
    assert order_of("interleaved", 2, 4, 2, EQUAL).rank_of == (0, 1, 0, 1)
    assert order_of("zbv", 2, 4, 2, EQUAL).rank_of == (0, 1, 1, 0)


def test_worst_moments():
    assert order_of("1f1b", 3, 8, 1, EQUAL).in_flight == (((3,),), ((2,),), ((1,),))
    assert order_of("zb-h1", 2, 8, 1, EQUAL).in_flight[0] == ((1, 1), (2, 0))


def test_only_counts_that_none_exceeds_are_kept():
    random = Random(0)
    for _ in range(50):
        counts = {tuple(random.randrange(4) for _ in range(3)) for _ in range(12)}
        kept = [c for c in counts if not any(d != c and all(a >= b for a, b in zip(d, c, strict=True)) for d in counts)]
        assert sorted(_highest(counts)) == sorted(kept)
