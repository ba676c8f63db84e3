"""Searches for a layout against exhaustive ones, on random models; what a case weighs against the simulation itself."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from dataclasses import replace
from itertools import chain, combinations, pairwise, product
from random import Random

import pytest

import undertow
from undertow.config.layout import parse_layout
from undertow.config.model import ModelConfig
from undertow.planner.calibration.file import shipped_calibration
from undertow.planner.geometry import Batch, build_geometry
from undertow.planner.memory.activations import Microbatch
from undertow.planner.memory.model import Held, MemoryModel
from undertow.planner.memory.recompute import MODULES, Recompute
from undertow.planner.memory.state import state_profile
from undertow.planner.pipeline.run import pipeline_timeline
from undertow.planner.pipeline.schedules import build_schedule
from undertow.planner.pipeline.timeline import StageTime, simulate
from undertow.planner.timing.costs import ModelTimes, stage_times
from undertow.planner.tuner.case import Case, Cuts, Span, spans
from undertow.planner.tuner.cpsat import cpsat_cuts
from undertow.planner.tuner.descent import even_cuts, neighbours
from undertow.planner.tuner.search import search
from undertow.planner.tuner.trials import Trials


def random_case(seed: int, layers: int, ranks: int, microbatches: int, **options) -> Case:
    """A small model with random seconds of every layer, random bytes by kind, and a limit that most likely binds.

    Odd seeds take seconds once an iteration too, for the embedding and its copy beside an MTP block as well.
    """
    random, others = Random(seed), Random(1000 + seed)
    ratios = [random.choice((0, 4, 128)) for _ in range(layers)]
    config = ModelConfig.from_preset("v4-small", num_hidden_layers=layers, compress_ratios=[*ratios, 0])
    forward = [random.uniform(0.5, 1.5) for _ in range(layers + 2)]
    most = 3.0 * (seed % 2)
    times = [StageTime(f, f * random.uniform(1.5, 2.5), 0.5 * f, others.uniform(0, most)) for f in forward]
    embedding = StageTime(0.0, 0.0, 0.0, others.uniform(0, most))
    saved = {kind: random.randrange(50_000_000, 90_000_000) for kind in ("swa", "csa", "hca")}
    m = Microbatch(config, build_geometry(ranks, pipeline=ranks), Batch(microbatches, 512), "tight")
    calibration = replace(shipped_calibration().memory, saved=saved, constant=0, heap=0)
    memory = MemoryModel(m, state_profile("published-bf16"), calibration)
    modules = tuple({module: f * others.uniform(0.05, 0.2) for module in MODULES} for f in forward[:layers])
    parts = ModelTimes(config, tuple(times[:-1]), times[-1], embedding, modules=modules)
    case = Case(parts, memory, microbatches, (10**15,) * ranks, **options)
    trials, even = Trials.of(case), even_cuts(case)
    of = case.rank_spans(even)
    most = max(trials.knapsacks.bytes(rank, each) for rank, each in enumerate(of))
    least = max(trials.knapsacks.fewest_bytes(rank, each) for rank, each in enumerate(of))
    return replace(case, limits=(int(least + (most - least) * random.uniform(0.1, 1.1)),) * ranks)


def subsets(layers: range) -> Iterator[frozenset[int]]:
    return map(frozenset, chain.from_iterable(combinations(layers, n) for n in range(len(layers) + 1)))


def every_cut(case: Case) -> Iterator[Cuts]:
    count = len(case.parts)
    for inner in combinations(range(1, count), case.stages - 1):
        yield (*inner, count)


def exhaustive(case: Case) -> tuple[float, int]:
    """Seconds and peak of the best of all layouts with all sets of layers computed again, one stage a rank."""
    best = (float("inf"), 0)
    schedule = build_schedule(case.schedule, case.ranks, case.microbatches)
    for cuts in every_cut(case):
        layout = case.layout(cuts)
        fitting = []
        for rank, span in enumerate(spans(cuts)):
            held = [Held(case.stage(span), min(case.microbatches, case.ranks - rank))]
            sizes = ((case.memory.rank(rank, held, Recompute(s)).total_bytes, s) for s in subsets(layout.layers(rank)))
            fitting.append([(size, chosen) for size, chosen in sizes if size <= case.limits[rank]])
        for chosen in product(*fitting):
            times = stage_times(case.times, layout, Recompute(frozenset().union(*(layers for _, layers in chosen))))
            seconds = round(float(simulate(schedule, times).seconds), 9)
            best = min(best, (seconds, max(size for size, _ in chosen)))
    return best


SIZES = [(10, 2, 2)] * 2 + [(8, 2, 3)] * 6 + [(6, 3, 4)] * 12 + [(4, 4, 5)] * 15 + [(3, 3, 3)] * 15


@pytest.mark.parametrize("chunk", range(5))
def test_search_equals_exhaustive_search(chunk):
    assert len(SIZES) == 50
    for seed in range(chunk, 50, 5):
        case = random_case(seed, *SIZES[seed])
        trials, proven = search(Trials.of(case), 1)
        seconds, peak = exhaustive(case)
        if not trials:
            assert seconds == float("inf")
            continue
        assert proven and round(trials[0].seconds, 9) == seconds
        assert max(choice.bytes for choice in trials[0].choices) == peak


@pytest.mark.parametrize("seed", range(10))
def test_search_equals_exhaustive_search_under_a_split_backward_pass(seed):
    """Nothing is computed again there, so that a layout fits or does not."""
    case = random_case(seed, *[(10, 2, 2), (8, 3, 4), (6, 4, 5)][seed % 3], schedule="zb-h1")
    best = float("inf")
    for cuts in every_cut(case):
        layout = case.layout(cuts)
        if case.weigh(layout, Recompute(), case.limits[0]).fits:
            best = min(best, float(simulate(case.plan, stage_times(case.times, layout)).seconds))
    trials, proven = search(Trials.of(case), 1)
    assert proven and bool(trials) == (best < float("inf"))
    if trials:
        assert trials[0].seconds == pytest.approx(best, rel=1e-12)


@pytest.mark.parametrize(
    ("schedule", "chunks"), [("1f1b", 1), ("zb-h1", 1), ("interleaved", 2), ("interleaved", 3), ("zbv", 2)]
)
def test_nothing_over_its_limit_and_seconds_are_those_of_the_simulation(schedule, chunks):
    found = 0
    for seed in range(12):
        options = {"transfer": 0.01 * (seed % 2), "granularity": ("layer", "module")[seed // 2 % 2]}
        case = random_case(seed, 10, 2 + seed % 3, 12, schedule=schedule, chunks=chunks, **options)
        for trial in search(Trials.of(case), 4, share=0.02).trials:
            layout = case.layout(trial.cuts)
            assert str(parse_layout(str(layout))) == str(layout)
            memory = case.weigh(layout, trial.recompute, case.limits[0])
            assert memory.fits
            assert memory.peak.total_bytes <= max(choice.bytes for choice in trial.choices) <= case.limits[0]
            timeline = pipeline_timeline(
                layout, case.times, ranks=case.ranks, microbatches=12, schedule=schedule, recompute=trial.recompute,
                transfer=case.transfer,
            )  # fmt: skip
            assert timeline.seconds == pytest.approx(trial.seconds, rel=1e-12)
            found += 1
    assert found >= 12


def test_interleaved_comes_near_the_best():
    """No proof here: against all layouts, each with the cheapest layers computed again."""
    for seed in range(6):
        case = random_case(seed, 6, 2, 4, schedule="interleaved", chunks=2)
        trials = Trials.of(case)
        every = [trial for cuts in every_cut(case) if case.allows(cuts) and (trial := trials.trial(cuts))]
        best = search(trials, 1).trials
        assert bool(best) == bool(every)
        if best:
            assert best[0].seconds == min(trial.seconds for trial in every)


def test_parts_cover_every_placement_of_mtp_and_head():
    case = random_case(0, 3, 3, 3)
    layouts = {str(case.layout(cuts)) for cuts in every_cut(case)}
    assert {"Et*3|m|L", "E|t*3|mL", "Et|t*2m|L", "Et|t|tmL"} <= layouts
    assert len(layouts) == 10  # two cuts in the five places between six parts
    assert case.stage(Span(2, 6)).layers == (1, 2, 3) and case.stage(Span(2, 6)).head
    doubled = random_case(0, 6, 2, 4, schedule="interleaved", chunks=2)
    assert doubled.allows((1, 7, 8, 9)) and not doubled.allows((7, 8, 9, 9))


def test_in_flight_counts():
    assert random_case(0, 6, 3, 8).in_flight == (((3,),), ((2,),), ((1,),))
    interleaved = random_case(0, 6, 2, 4, schedule="interleaved", chunks=2).in_flight
    assert [max(map(sum, counts)) for counts in interleaved] == [5, 3]


def test_neighbours_move_one_part():
    assert sorted(neighbours((1, 3, 4), 4)) == [(1, 2, 4), (2, 3, 4)]
    for cuts in neighbours((3, 6, 9, 12), 12):
        before, after = ([b - a for a, b in pairwise((0, *c))] for c in ((3, 6, 9, 12), cuts))
        assert sorted(x - y for x, y in zip(after, before, strict=True)) == [-1, 0, 0, 1]


def test_integer_program_needs_no_ortools(monkeypatch):
    case = random_case(3, 8, 2, 4, schedule="interleaved", chunks=2)
    with_solver = search(Trials.of(case), 1, share=0.3).trials
    if "ortools" in sys.modules:
        cuts = cpsat_cuts(case)
        assert cuts is None or (len(cuts) == 4 and cuts[-1] == len(case.parts))
    monkeypatch.setitem(sys.modules, "ortools.sat.python", None)
    assert cpsat_cuts(case) is None
    without = search(Trials.of(case), 1, share=0.3).trials
    assert without[0].seconds == with_solver[0].seconds


@pytest.mark.parametrize(("schedule", "chunks"), [("1f1b", 1), ("interleaved", 2), ("zb-h1", 1), ("zbv", 2)])
def test_many_microbatches_follow_from_fewer(schedule, chunks):
    """A pipeline in its steady state: seconds of two shorter orders give those of all microbatches."""
    task = undertow.plan("v4-flash", "32xMI355X", pipeline=4, expert=8, global_batch=8 * 240).task
    case = Case(task.times, task.memory_model, 240, (10**15,) * 4, schedule, chunks, 0.001)
    assert case.order.schedule.microbatches == 48 and case.shorter and case.shorter.schedule.microbatches == 32
    times = [StageTime(1 + 0.1 * (stage % 3), 2.2 - 0.1 * (stage % 2), 0.9, 0.5) for stage in range(4 * chunks)]
    assert case.seconds(times) == pytest.approx(case.exact_seconds(times), rel=1e-9)
    few = Case(task.times, task.memory_model, 48, (10**15,) * 4, schedule, chunks, 0.001)
    assert few.shorter is None and few.seconds(times) == few.exact_seconds(times)


def test_a_layout_as_cuts_and_back():
    task = undertow.plan("v4-flash", "32xMI355X", pipeline=4, expert=8).task
    case = Case(task.times, task.memory_model, 32, (10**15,) * 4)
    for text in ("Et*10|t*12|t*12|t*9mL", "Et*10|t*12|t*21m|L", "E|t*21|t*22|mL"):
        assert str(case.layout(case.cuts(parse_layout(text)))) == text


def test_limits_beyond_any_memory_do_not_stop_the_solver():
    pytest.importorskip("ortools")
    task = undertow.plan("v4-flash", "32xMI355X", pipeline=4, expert=8).task
    case = Case(task.times, task.memory_model, 32, (10**32,) * 4)
    assert cpsat_cuts(case, 0.1)
