"""The tuner on the published MI355X case: the table of limits, its grid, its prices and what it says."""

from __future__ import annotations

import subprocess
import sys
from dataclasses import replace
from random import Random

import pytest

import undertow
from undertow.config.errors import ConfigError, DoesNotFit
from undertow.config.layout import parse_layout
from undertow.config.model import ModelConfig
from undertow.model.activations import Objective
from undertow.planner.calibration.file import shipped_calibration
from undertow.planner.geometry import Batch, Geometry, build_geometry
from undertow.planner.memory.activations import Microbatch
from undertow.planner.memory.model import Held, MemoryModel
from undertow.planner.memory.parameters import Stage
from undertow.planner.memory.recompute import Recompute
from undertow.planner.memory.state import state_profile
from undertow.planner.pipeline.run import pipeline_timeline
from undertow.planner.timing.costs import MicrobatchShape, model_times
from undertow.planner.tuner.case import Case
from undertow.planner.tuner.grid import Grid
from undertow.planner.tuner.price import StagePrice
from undertow.planner.tuner.search import search
from undertow.planner.tuner.trials import Trials
from undertow.planner.tuner.tune import tune, tune_cases

SHIPPED = shipped_calibration()
PUBLISHED = ModelConfig.from_preset("v4-flash", indexer="own_rank")
TIMES = model_times(MicrobatchShape(PUBLISHED, 4096, frozen_indexer=True), SHIPPED.rates)
FINAL = parse_layout("Et*10|t*12|t*12|t*9mL")


def case(limit: float, implementation="primus", ranks: int = 4, **options) -> Case:
    """Costs and memory of the published runs: 8 GPUs a stage, 32 microbatches, `limit` in GB."""
    m = Microbatch(PUBLISHED, build_geometry(8 * ranks, pipeline=ranks, expert=8), Batch(256, 4096), implementation)
    memory = MemoryModel(m, state_profile("published-bf16"), SHIPPED.memory)
    return Case(TIMES, memory, 32, (round(limit * 1e9),) * ranks, **options)


@pytest.mark.parametrize(
    ("limit", "implementation", "layout", "recompute", "seconds", "printed"),
    [
        (288, "primus", "Et*11|t*12|t*11|t*9mL", (), 8.5280, 8.529),
        (273.6, "primus", "Et*11|t*12|t*11|t*9mL", (0,), 8.5342, 8.551),
        (260, "primus", "Et*11|t*11|t*12|t*9mL", (0, 1), 8.5622, 8.563),
        (220, "primus", "Et*10|t*11|t*12|t*10mL", (0, 1, 3, 11, 13), 8.7454, 8.734),
        (192, "primus", "Et*10|t*11|t*12|t*10mL", (0, 1, 3, 5, 7, 11, 13, 15, 17, 19, 21, 23, 25), 9.2189, 9.207),
        (192, "tight", "Et*11|t*11|t*12|t*9mL", (0, 1), 8.5622, 8.570),
    ],
)
def test_table_of_limits(limit, implementation, layout, recompute, seconds, printed):
    tuned = tune_cases([case(limit, implementation)])
    best = tuned.best
    assert (str(best.layout), best.recompute, round(best.seconds, 4)) == (layout, Recompute.of(recompute), seconds)
    assert best.seconds <= 1.003 * printed
    assert best.proven and best.memory.fits and best.memory.limit_bytes == round(limit * 1e9)
    assert len(tuned.runners_up) == 3 and all(plan.memory.fits for plan in tuned.runners_up)
    order = [round(plan.seconds, 10) for plan in (best, *tuned.runners_up)]
    assert order == sorted(order)
    assert tuned.unlimited_seconds == pytest.approx(8.411, abs=1e-3)


def test_five_per_cent_margin_gives_the_published_layout_or_a_faster_one():
    tuned = tune_cases([case(0.95 * 288)])
    published = float(pipeline_timeline(FINAL, TIMES, ranks=4, microbatches=32).seconds)
    assert tuned.best.seconds <= published
    # The fastest layout without recomputation is the published one.
    plain = [plan for plan in tuned.runners_up if not plan.recompute]
    assert plain[0].layout == FINAL and plain[0].seconds == published
    assert tuned.prices == (
        StagePrice(0, 16, pytest.approx(0.0062, abs=1e-4)),
        *(StagePrice(r, 0, 0) for r in (1, 2, 3)),
    )
    assert tuned.prices[0].seconds_per_gb == tuned.prices[0].seconds / 16
    assert tuned.binding == (
        "memory of rank 0 (271.4 of 273.6 GB with layers 0 computed again): without a limit an iteration would take "
        "8.411 s instead of 8.534 s"
    )


def test_without_a_limit_time_binds():
    tuned = tune_cases([case(10_000)])
    assert tuned.best.seconds == tuned.unlimited_seconds and not any(price.gb for price in tuned.prices)
    assert tuned.binding.startswith("time of rank ") and "more memory buys nothing" in tuned.binding


def test_tight_activations_and_interleaving_beat_the_published_layout():
    tuned = tune_cases([case(273.6, "tight"), case(273.6, "tight", schedule="interleaved", chunks=2)])
    published = float(pipeline_timeline(FINAL, TIMES, ranks=4, microbatches=32).seconds)
    assert tuned.best.schedule == "interleaved" and tuned.best.memory.fits
    assert published / tuned.best.seconds > 1.08
    # The prediction that was published with the costs: 7.90 s for this layout.
    assert str(tuned.best.layout) == "Et*6|t*5|t*6|t*6|t*6|t*6|t*5|t*3mL"
    assert tuned.best.seconds == pytest.approx(7.9116, abs=1e-4)


def simulated(monkeypatch) -> list[int]:
    """Operations of each layout that is simulated from now on."""
    sizes: list[int] = []
    plain = Case.seconds

    def counted(self, times):
        sizes.append(self.order.operations)
        return plain(self, times)

    monkeypatch.setattr(Case, "seconds", counted)
    return sizes


@pytest.mark.parametrize("limit", [288, 220, 192])
def test_four_ranks_take_few_simulations(monkeypatch, limit):
    sizes = simulated(monkeypatch)
    assert tune_cases([case(limit)]).best.proven
    assert len(sizes) < 1500 and sum(sizes) < 400_000


def test_eight_ranks_with_virtual_stages_keep_to_their_work(monkeypatch):
    sizes = simulated(monkeypatch)
    tuned = tune_cases([case(200, ranks=8, schedule="interleaved", chunks=2)])
    assert tuned.best.memory.fits and tuned.best.seconds < 4.70 and not tuned.best.proven
    assert sum(sizes) < 4_000_000


def test_single_modules_are_cheaper_than_whole_layers():
    whole = tune_cases([case(220)]).best
    parts = tune_cases([case(220, granularity="module")]).best
    assert parts.seconds < whole.seconds and parts.recompute.modules and parts.memory.fits


def test_never_over_the_limit():
    random = Random(0)
    for _ in range(3):
        limit, implementation = random.uniform(110, 290), random.choice(("tight", "primus"))
        try:
            tuned = tune_cases([case(limit, implementation)], keep=2)
        except DoesNotFit:
            assert not search(Trials.of(case(limit, implementation)), 1).trials
            continue
        for plan in (tuned.best, *tuned.runners_up):
            again = case(limit, implementation).weigh(plan.layout, plan.recompute, round(limit * 1e9))
            assert again.peak.total_bytes == plan.peak_bytes <= limit * 1e9


def test_grid_of_widths():
    start = undertow.plan(PUBLISHED, "32xMI355X", pipeline=4, expert=8).task
    four = tune([(start, Grid((4, 8), (8, 4), schedules=(("1f1b", 1),)))], 273_600_000_000)
    assert (four.best.geometry.pipeline, four.best.geometry.expert) == (4, 8)
    assert four.best.memory.limit_bytes == 273_600_000_000
    heard = []
    wide = tune(
        [(start, Grid((2, 4, 8), (8, 4), schedules=(("1f1b", 1), ("zb-h1", 1))))],
        273_600_000_000,
        progress=lambda done, of: heard.append((done, of)),
    )
    assert wide.best.seconds <= four.best.seconds
    assert heard == [(n, wide.cases) for n in range(1, wide.cases + 1)]
    assert 0 < len(wide.searched) < wide.cases


def test_a_case_that_is_nowhere_better_is_not_searched():
    """Fewer experts a rank: the same seconds, and less memory."""
    m = case(288).memory.m
    narrow = replace(m, geometry=build_geometry(32, pipeline=4, expert=4))
    memory = MemoryModel(narrow, state_profile("published-bf16"), SHIPPED.memory)
    found = tune_cases([Case(TIMES, memory, 32, (288 * 10**9,) * 4), case(288)])
    assert found.cases == 2 and [each.memory.m.geometry.expert for each in found.searched] == [8]


@pytest.mark.parametrize("share", [0.0, 0.5, 1.0])
def test_one_gpu_with_exact_memory(share):
    """The peak of one GPU is known moment by moment: the plan is held to it."""
    config = ModelConfig.from_preset("v4-small")
    m = Microbatch(config, Geometry(), Batch(4, 4096), "reference", "bfloat16", Objective(balance_rows=1))
    memory = MemoryModel(m, state_profile("muon-fp32"))
    times = model_times(MicrobatchShape(config, 4096), SHIPPED.rates)
    held = [Held(Stage((*range(len(times.blocks)),), True, True), 1)]
    most, least = (memory.rank(0, held, Recompute.of(range(n))).total_bytes for n in (0, 9))
    limit = int(least + share * (most - least))
    best = tune_cases([Case(times, memory, 4, (limit,))]).best
    assert str(best.layout) == "Et*9mL" and least <= best.peak_bytes <= limit < 1.001 * most
    assert bool(best.recompute) == (share < 1)


def test_nothing_fits():
    with pytest.raises(DoesNotFit) as refusal:
        tune_cases([case(80)])
    assert str(refusal.value).startswith(
        "no layout fits 80.0 GB a GPU: the nearest, evenly laid out under 1f1b on tensor 1, pipeline 4, expert 8 and "
        "context 1, takes at least "
    )
    assert "\n" not in str(refusal.value) and refusal.value.exit_code == 3


@pytest.mark.parametrize(
    ("grid", "limit", "message"),
    [
        (Grid(), 0, "limit is 0 bytes; allowed: at least 1"),
        (Grid(pipeline=(3,)), 10**11, "32 GPUs are not a multiple of tensor 1 x pipeline 3 x context 1 = 3"),
        (Grid(expert=(16,), pipeline=(2,)), 10**11, "implementation primus: its expert kernel needs expert 2 to 8"),
        (Grid(pipeline=()), 10**11, "the grid is empty; give at least one of every width and schedule"),
        (Grid((8,), (4,), schedules=(("zbv", 1),)), 10**11, "schedule zbv: 1 stages on each rank; it takes 2"),
    ],
)
def test_what_cannot_be_tuned(grid, limit, message):
    start = undertow.plan(PUBLISHED, "32xMI355X", pipeline=4, expert=8).task
    with pytest.raises(ConfigError) as refusal:
        tune([(start, grid)], limit)
    assert str(refusal.value).startswith(message)


def test_import_loads_neither_torch_nor_numpy_nor_the_solver():
    code = (
        "import sys, undertow.planner.tuner.tune; print([m for m in ('torch', 'numpy', 'ortools') if m in sys.modules])"
    )
    assert subprocess.run([sys.executable, "-c", code], capture_output=True, text=True).stdout.strip() == "[]"
