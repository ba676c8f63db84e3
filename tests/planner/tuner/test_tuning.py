"""Plans with `tune`: what is fixed, what is compared, fragments that come back as the same plan, and refusals."""

from __future__ import annotations

import json

import pytest

import undertow
from undertow.config.errors import ConfigError, DoesNotFit
from undertow.config.resolve import resolve
from undertow.planner.calibration.file import shipped_calibration
from undertow.planner.memory.recompute import Recompute
from undertow.planner.tuner.gains import gains_of
from undertow.planner.tuner.tune import tune_cases

AMD = ["model.indexer=own_rank", "indexer.frozen=true"]
FOUR = {"pipeline": 4, "expert": 8, "micro_batch": 1, "schedule": "1f1b"}


@pytest.fixture(scope="module")
def four():
    """The published geometry, at a margin of 5 %."""
    return undertow.plan("v4-flash", "32xMI355X", overrides=AMD, tune=True, **FOUR)


def test_the_plan_is_the_tuned_one(four):
    tuned = four.tuned
    assert four.layout == tuned.layout == "Et*11|t*12|t*11|t*9mL"
    assert four.recompute == tuned.recompute == Recompute.of((0,))
    assert four.time.seconds_per_iteration == pytest.approx(tuned.seconds_per_iteration, rel=1e-12)
    assert four.memory.peak.total_bytes == tuned.peak_bytes <= tuned.limit_bytes == 273_600_000_000
    published = undertow.plan("v4-flash", "32xMI355X", overrides=AMD, layout="Et*10|t*12|t*12|t*9mL")
    assert tuned.seconds_per_iteration <= published.time.seconds_per_iteration
    assert (tuned.start.layout, tuned.start.seconds_per_iteration) == (
        "Et*10|t*11|t*11|t*11mL",
        pytest.approx(9.38, abs=0.01),
    )
    assert tuned.proven and tuned.margin == 0.05
    assert [way.seconds_per_iteration for way in tuned.runners_up] == sorted(
        way.seconds_per_iteration for way in tuned.runners_up
    )


def test_plain_values(four):
    plain = json.loads(json.dumps(four.json()))["tuned"]
    assert plain["layout"] == four.layout and plain["recompute"] == {"layers": [0], "modules": {}}
    assert plain["seconds_per_iteration"] == four.tuned.seconds_per_iteration
    assert plain["peak_bytes"] == four.tuned.peak_bytes
    assert len(plain["runners_up"]) == 3 and plain["runners_up"][0]["schedule"] == "1f1b"
    assert plain["binding"].startswith("memory of rank 0 (")
    assert plain["prices"][0]["seconds_per_gb"] == plain["prices"][0]["seconds"] / plain["prices"][0]["gb"]
    assert plain["fragment"] == four.tuned.fragment and "frontier" not in plain


def test_text_names_all_that_was_compared(four):
    text = str(four)
    for part in (
        "tuned within 273.6 GB a GPU, a margin of 0.05",
        "as planned before",
        "runner-up 3",
        "held back by memory of rank 0",
        "more on rank 0 alone",
        "10 % faster work",
        "of this geometry and schedule, no layout is faster",
        'layout: "Et*11|t*12|t*11|t*9mL"',
    ):
        assert part in text


def test_what_a_faster_kernel_buys(four):
    gains = {gain.work: gain.seconds for gain in four.tuned.gains}
    # 32 microbatches of the slowest stage's experts, a tenth faster: a few per cent of the iteration.
    assert 0.03 < gains["experts"] / four.tuned.seconds_per_iteration < 0.07
    assert gains["experts"] > gains["attention core"] > gains["heads"] >= 0


def test_frontier_falls_with_memory(four):
    points = four.tuned.frontier
    assert 5 <= len(points) <= 10
    limits = [point.limit_bytes for point in points]
    seconds = [point.way.seconds_per_iteration for point in points]
    assert limits == sorted(limits) and seconds == sorted(seconds, reverse=True) and seconds[0] > seconds[-1]
    assert all(point.way.peak_bytes <= point.limit_bytes for point in points)
    assert seconds[-1] == pytest.approx(four.tuned.unlimited_seconds)
    tokens = 256 * 4096
    assert points[-1].tokens_per_second_per_gpu == pytest.approx(tokens / (32 * seconds[-1]))


@pytest.mark.parametrize(
    "options",
    [
        FOUR,
        {**FOUR, "schedule": "interleaved", "pipeline": 2, "implementation": "primus"},
        {"granularity": "module"},
    ],
)
def test_a_fragment_gives_the_same_plan_again(tmp_path, options):
    options = {**FOUR, **options}
    first = undertow.plan("v4-flash", "32xMI355X", overrides=AMD, tune=True, memory_limit=250, **options)
    recipe = tmp_path / "tuned.yaml"
    words = ["model.indexer=own_rank", "indexer.frozen=true"]
    told = first.tuned.fragment.splitlines()[0]
    assert told.endswith(
        f"undertow plan FILE {' '.join(words)} --implementation {first.task.microbatch.implementation} "
        "--state published-bf16 --gpus 32xMI355X"
    )
    recipe.write_text(first.tuned.fragment, encoding="utf-8")
    used = first.task.microbatch.implementation
    again = undertow.plan(recipe, "32xMI355X", overrides=words, implementation=used, state="published-bf16")
    assert (again.layout, again.recompute) == (first.layout, first.recompute)
    assert (again.task.geometry, again.task.batch) == (first.task.geometry, first.task.batch)
    assert (again.task.schedule, again.task.chunks) == (first.task.schedule, first.task.chunks)
    assert again.time.seconds_per_iteration == first.time.seconds_per_iteration
    assert again.memory.peak.total_bytes == first.memory.peak.total_bytes
    shown = resolve(recipe, [], {}).config
    assert shown.parallel.layout == first.layout and shown.parallel.pipeline == options["pipeline"]


def test_one_gpu_is_tuned_by_what_is_computed_again():
    start = undertow.plan("v4-small", "1xH200", micro_batch=8)
    limit = 0.7 * start.memory.peak.total_bytes / 1e9
    found = undertow.plan("v4-small", "1xH200", micro_batch=8, tune=True, margin=0, memory_limit=limit)
    assert found.layout == "Et*9mL" and found.recompute.layers
    assert found.memory.peak.total_bytes <= limit * 1e9


def test_what_a_recipe_states_is_kept():
    found = undertow.plan("pretrain/v4-flash-amd", "32xMI355X", tune=True, schedule="1f1b", micro_batch=1)
    geometry = found.task.geometry
    assert (geometry.pipeline, geometry.expert) == (4, 8) and found.tuned.compared == 1
    assert found.tuned.start.layout == "Et*10|t*12|t*12|t*9mL"


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"layout": "Et*43mL"}, "layout with tuning: the tuner chooses the layout; give one of the two"),
        ({"recompute": "all"}, "recompute with tuning: the tuner chooses the recompute; give one of the two"),
        ({"margin": 1.0}, "margin is 1.0; allowed: at least 0, below 1"),
        ({"memory_limit": 0.0}, "memory limit is 0.0 GB; allowed: above 0, at most the 288 GB of MI355X"),
        ({"memory_limit": 1000}, "memory limit is 1000 GB; allowed: above 0, at most the 288 GB of MI355X"),
        ({"memory_limit": float("inf")}, "memory limit is inf GB; allowed: above 0, at most the 288 GB of MI355X"),
        ({"granularity": "atom"}, "granularity is 'atom'; allowed: layer, module"),
    ],
)
def test_what_cannot_be_asked(options, message):
    with pytest.raises(ConfigError) as refusal:
        undertow.plan("v4-flash", "32xMI355X", tune=True, **options)
    assert str(refusal.value).startswith(message)


def test_where_nothing_fits_the_nearest_is_named():
    with pytest.raises(DoesNotFit) as refusal:
        undertow.plan("v4-flash", "8xMI355X", tune=True, memory_limit=60)
    assert str(refusal.value).startswith("no layout fits 57.0 GB a GPU: the nearest, evenly laid out under ")
    assert "\n" not in str(refusal.value) and refusal.value.exit_code == 3


def test_gains_are_those_of_the_simulation(four):
    """With every rate of the heads 10 % higher the head and the MTP block's head take 1 / 1.1 of their time."""
    from undertow.planner.tuner.case import Case

    task = four.task
    case = Case(task.times, task.memory_model, task.microbatches, (10**15,) * 4)
    best = tune_cases([case], keep=0).best
    gains = {gain.work: gain.seconds for gain in gains_of(best, shipped_calibration().rates)}
    head = 2 * float(task.times.head.forward + task.times.head.backward)
    assert 0 < gains["heads"] <= task.microbatches * head * (1 - 1 / 1.1) * (1 + 1e-9)


def test_less_memory_is_not_faster():
    """Where memory holds the best back by much, wider tensor and context parallelism are searched too."""
    options = {"tune": True, "margin": 0.0, "pipeline": 4, "expert": 8, "micro_batch": 1, "schedule": "1f1b"}
    some = undertow.plan("v4-flash", "32xMI355X", memory_limit=120, **options).tuned
    less = undertow.plan("v4-flash", "32xMI355X", memory_limit=110, **options).tuned
    assert some.seconds_per_iteration <= less.seconds_per_iteration < 10
    assert some.seconds_per_iteration == pytest.approx(8.604, abs=1e-3) and some.best.geometry.context == 8
    assert some.unlimited_seconds <= some.seconds_per_iteration and some.kept == ""


def test_widths_that_were_kept_are_told(four):
    assert four.tuned.kept == (
        "tensor 1 and context 1 were kept, for something fits: wider ones may be faster, --tp N or --cp N searches "
        "with them"
    )
    assert f"  {four.tuned.kept}\n" in str(four)


def test_room_on_every_gpu_saves_at_least_what_it_saves_on_one(four):
    tuned = four.tuned
    saved = [price.seconds for price in tuned.room]
    assert [price.gb for price in tuned.room] == [8, 16, 32] and saved == sorted(saved)
    best = tuned.seconds_per_iteration
    for room in tuned.room:
        alone = [price.seconds for price in tuned.prices if 0 < price.gb <= room.gb]
        assert room.seconds >= max(alone, default=0) and best - room.seconds >= tuned.unlimited_seconds - 1e-9


@pytest.mark.parametrize(
    ("gpus", "options"),
    [("1xH200", {}), ("2xH200", {}), ("8xH200", {}), ("8xH200", {"pipeline": 1})],
)
def test_tuning_is_never_slower_than_the_plan_without(gpus, options):
    plain = undertow.plan("v4-tiny", gpus, schedule="interleaved", **options)
    tuned = undertow.plan("v4-tiny", gpus, schedule="interleaved", tune=True, **options)
    assert tuned.time.seconds_per_iteration <= plain.time.seconds_per_iteration * (1 + 1e-12)
    assert tuned.task.schedule == "interleaved"
    ways = [tuned.tuned.best, *tuned.tuned.runners_up]
    assert len({(way.layout, way.geometry) for way in ways}) == len(ways)
