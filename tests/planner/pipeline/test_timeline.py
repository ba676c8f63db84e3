"""Schedules of equal stages against their closed forms, exactly; memory over time; schedules that cannot run."""

from __future__ import annotations

from collections import Counter
from dataclasses import replace
from fractions import Fraction

import pytest

from undertow.config.errors import ConfigError, UndertowError
from undertow.planner.pipeline.schedules import Operation, build_schedule
from undertow.planner.pipeline.timeline import StageBytes, StageTime, simulate

RANKS = (1, 2, 3, 4, 8)
F, B = Fraction(3, 7), Fraction(11, 13)


@pytest.mark.parametrize("p", RANKS)
@pytest.mark.parametrize("m", [1, 2, 3, 8, 17])
def test_1f1b(p, m):
    timeline = simulate(build_schedule("1f1b", p, m), [StageTime(F, B)] * p)
    assert timeline.seconds == (m + p - 1) * (F + B)
    for stage, rank in enumerate(timeline.ranks):
        assert rank.bubble / timeline.seconds == Fraction(p - 1, m + p - 1)
        assert rank.busy == m * (F + B)
        assert rank.in_flight == min(m, p - stage)


@pytest.mark.parametrize("p", RANKS)
@pytest.mark.parametrize("v", [2, 3, 4])
@pytest.mark.parametrize("packs", [1, 2, 5])
def test_interleaved(p, v, packs):
    m = p * packs
    timeline = simulate(build_schedule("interleaved", p, m, v), [StageTime(F / v, B / v)] * (p * v))
    assert timeline.seconds == m * (F + B) + (p - 1) * (F + B) / v
    for stage, rank in enumerate(timeline.ranks):
        assert rank.bubble / timeline.seconds == Fraction(p - 1, v * m + p - 1)
        assert rank.in_flight == min(m, Fraction(2 * (p - stage - 1) + (v - 1) * p + 1, v))
    if packs > 1:
        assert timeline.ranks[0].in_flight == p + Fraction(p - 1, v)


@pytest.mark.parametrize("p", RANKS)
@pytest.mark.parametrize("extra", [0, 1, 5, 24])
def test_zb_h1(p, extra):
    m, third = p + extra, Fraction(1, 3)
    timeline = simulate(build_schedule("zb-h1", p, m), [StageTime(third, 2 * third, third)] * p)
    assert timeline.seconds == m + Fraction(p - 1, 3)
    for stage, rank in enumerate(timeline.ranks):
        assert rank.bubble / timeline.seconds == Fraction(p - 1, 3 * m + p - 1)
        assert rank.in_flight == min(m, p - stage)


@pytest.mark.parametrize("p", RANKS)
@pytest.mark.parametrize("extra", [0, 1, 5, 24])
def test_zbv(p, extra):
    m, sixth = p + extra, Fraction(1, 6)
    timeline = simulate(build_schedule("zbv", p, m, 2), [StageTime(sixth, 2 * sixth, sixth)] * (2 * p))
    assert timeline.seconds == m + Fraction(p - 1, 6)
    for rank in timeline.ranks:
        assert rank.bubble / timeline.seconds == Fraction(p - 1, 6 * m + p - 1)
        assert rank.in_flight <= p


@pytest.mark.parametrize(("name", "chunks"), [("1f1b", 1), ("interleaved", 3), ("zb-h1", 1), ("zbv", 2)])
def test_each_operation_runs_once_and_never_before_what_it_needs(name, chunks):
    p, m = 4, 8
    schedule = build_schedule(name, p, m, chunks)
    timeline = simulate(schedule, [StageTime(2 + s, 3 + 2 * s, 1 + s) for s in range(p * chunks)], transfer=5)
    events = [(rank, event) for rank, line in enumerate(timeline.ranks) for event in line.events]
    kinds = 3 if schedule.split else 2
    assert (
        Counter((e.stage, e.operation.kind, e.operation.microbatch) for _, e in events).total()
        == kinds * p * chunks * m
    )
    ends = {(e.operation.kind, e.stage, e.operation.microbatch): (rank, e.end) for rank, e in events}
    assert len(ends) == len(events)
    for rank, event in events:
        kind, n, _ = event.operation
        sources = {"F": ("F", event.stage - 1, n), "B": ("B", event.stage + 1, n), "W": ("B", event.stage, n)}
        if (found := ends.get(sources[kind])) is not None:
            assert event.start >= found[1] + (0 if found[0] == rank else 5)
        if kind == "B":
            assert event.start >= ends["F", event.stage, n][1]
    for line in timeline.ranks:
        assert all(a.end <= b.start for a, b in zip(line.events, line.events[1:], strict=False))
        assert line.busy + line.bubble == timeline.seconds


def test_transfer_delays_each_step_of_the_ramp():
    p, m = 4, 1
    timeline = simulate(build_schedule("1f1b", p, m), [StageTime(1, 2)] * p, transfer=10)
    assert timeline.seconds == 3 * p + 2 * (p - 1) * 10
    # The two middle stages of a folded schedule are on one rank: nothing is sent between them.
    folded = simulate(build_schedule("zbv", 2, 1, 2), [StageTime(1, 2, 1)] * 4, transfer=10)
    assert folded.seconds == 4 + 4 + 4 * 10 + 1


def test_bytes_of_1f1b():
    held = [StageBytes(saved=100, for_weight=10, transient=7), StageBytes(saved=1000)]
    first, last = simulate(build_schedule("1f1b", 2, 3), [StageTime(1, 2)] * 2, held).ranks
    # Rank 0 has two in flight, and the first backward, from second 4 on, adds what it alone needs.
    assert [(e.operation.kind, e.start) for e in first.events] == [
        ("F", 0), ("F", 1), ("B", 4), ("F", 6), ("B", 7), ("B", 10)
    ]  # fmt: skip
    assert (first.peak_bytes, first.peak_at) == (227, 4)
    assert (last.peak_bytes, last.peak_at) == (1000, 1)


def test_a_split_backward_frees_the_inputs_of_weight_gradients_late():
    held = [StageBytes(saved=100, for_weight=10)] * 2
    schedule = build_schedule("zb-h1", 2, 3)
    assert "".join(o.kind + str(o.microbatch) for o in schedule.orders[1]) == "F0B0F1B1W0F2B2W1W2"
    first, last = simulate(schedule, [StageTime(1, 2, 1)] * 2, held).ranks
    # Rank 0 writes each gradient at once; rank 1 still holds microbatch 0 when microbatch 1 comes.
    assert (first.peak_bytes, last.peak_bytes, last.peak_at) == (220, 120, 3)


def test_a_schedule_that_stops_names_the_operation():
    schedule = build_schedule("1f1b", 2, 2)
    turned = replace(schedule, orders=(schedule.orders[0], tuple(reversed(schedule.orders[1]))))
    with pytest.raises(UndertowError) as stop:
        simulate(turned, [StageTime(1, 2)] * 2)
    assert str(stop.value) == (
        "schedule 1f1b stops: on rank 0, B of microbatch 0 on stage 0 waits for B on stage 1, which has not run; "
        "every operation comes after what it needs"
    )
    early = replace(schedule, orders=((Operation("B", 0), *schedule.orders[0][:1]), schedule.orders[1]))
    with pytest.raises(UndertowError, match="on rank 0, B of microbatch 0 on stage 0 waits for F on stage 0"):
        simulate(early, [StageTime(1, 2)] * 2)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("1f1b", 4, 8, 2), "schedule 1f1b: 2 stages on each rank; it takes 1"),
        (("zbv", 4, 8, 1), "schedule zbv: 1 stages on each rank; it takes 2"),
        (("interleaved", 4, 8, 1), "schedule interleaved: 1 stages on each rank; it takes 2 or more"),
        (("interleaved", 4, 9, 2),
         "schedule interleaved: 9 microbatches; their number is a multiple of the 4 ranks"),
        (("1f1b", 0, 8, 1), "schedule 1f1b: 0 ranks and 8 microbatches; each is at least 1"),
        (("gpipe", 4, 8, 1), "schedule 'gpipe' is unknown; there are 1f1b, zb-h1, zbv, interleaved"),
    ],
)  # fmt: skip
def test_schedules_that_cannot_be(arguments, message):
    with pytest.raises(ConfigError) as refusal:
        build_schedule(*arguments)
    assert str(refusal.value) == message


def test_times_and_bytes_are_by_stage():
    with pytest.raises(ConfigError, match="has 4 stages; times of 4 and bytes of 3 were given"):
        simulate(build_schedule("1f1b", 4, 4), [StageTime(1, 2)] * 4, [StageBytes(1)] * 3)


def test_a_rank_ends_with_its_step():
    """Once an iteration, after the last operation; all chunks of a rank together."""
    third = Fraction(1, 3)
    plain = [StageTime(Fraction(1), Fraction(2), Fraction(1))] * 4
    for name, chunks in (("1f1b", 1), ("zb-h1", 1), ("interleaved", 2)):
        order = build_schedule(name, 4 // chunks, 8, chunks)
        without = simulate(order, plain)
        assert all(rank.step == 0 for rank in without.ranks)
        same = simulate(order, [time._replace(step=third) for time in plain])
        assert same.seconds == without.seconds + third * chunks  # rank 0 ends last
        assert all(rank.step == third * chunks for rank in same.ranks)
        assert all(rank.busy + rank.bubble + rank.step == same.seconds for rank in same.ranks)
        assert [r.events for r in same.ranks] == [r.events for r in without.ranks]
    last = simulate(build_schedule("1f1b", 4, 8), [*plain[:3], plain[3]._replace(step=Fraction(10))])
    assert last.seconds == last.ranks[3].events[-1].end + 10 and last.ranks[0].step == 0


def test_gradients_for_weights_lie_between_the_two_parts_of_the_backward():
    held = [StageBytes(saved=100, for_weight=10, transient=5, gradients=20)] * 2
    first, last = simulate(build_schedule("zb-h1", 2, 3), [StageTime(1, 2, 1)] * 2, held).ranks
    # Rank 1, F0 B0 F1 B1: 110 twice, what waits for W 0 less 100 more 20, and the transient.
    assert (last.peak_bytes, last.peak_at) == (10 + 20 + 110 + 5, 4)
    assert first.peak_bytes == 2 * 110 + 5


def test_the_order_of_zbv_follows_the_pace():
    p, m, pace = 4, 32, (10, 13, 9)
    times = [StageTime(pace[0], pace[1] + pace[2], pace[2])] * (2 * p)
    equal, followed = (simulate(build_schedule("zbv", p, m, 2, each), times).seconds for each in ((1, 1, 1), pace))
    assert 2 * m * sum(pace) + (p - 1) * pace[0] <= followed == 2087 < equal
