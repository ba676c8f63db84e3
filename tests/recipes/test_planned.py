"""Recipes that state their GPUs: each is planned on them, fits, and has nothing that cannot go together."""

import pytest

import undertow
from undertow.config.paths import recipe_names
from undertow.config.resolve import resolve
from undertow.launch.prepare import prepare
from undertow.launch.processes import on_cores
from undertow.train.widths import refuse_wider

PLANNED = [name for name in recipe_names() if resolve(name, [], {}).config.parallel.gpus]


def prepared(name: str):
    gpus = resolve(name, [], {}).config.parallel.gpus
    count = int((gpus or "").partition("x")[0])
    return prepare(name, max(1, count // 8), None, None, [], {})


def test_they_are_all_here():
    assert set(PLANNED) == {
        "pretrain/flash-32xMI355X",
        "pretrain/flash-64xH200",
        "pretrain/pro-128xMI355X",
        "pretrain/proxy-1xH200",
        "pretrain/proxy-2xH200",
        "pretrain/proxy-4xH200",
    }


@pytest.mark.parametrize("name", PLANNED)
def test_recipe_plans_on_its_gpus(name):
    found = prepared(name)
    assert found.plan.fits and found.conflicts == () and found.words == () and found.replanned is None
    assert str(found.plan.task.pool) == found.resolved.config.parallel.gpus


@pytest.mark.parametrize(
    ("name", "seconds", "peak"),
    [
        ("pretrain/flash-32xMI355X", 8.551, None),
        ("pretrain/flash-64xH200", 23.161, 130.5),
        ("pretrain/pro-128xMI355X", 33.089, 263.2),
    ],
)
def test_figures_of_the_planned_layouts(name, seconds, peak):
    plan = prepared(name).plan
    assert plan.time.seconds_per_iteration == pytest.approx(seconds, rel=2e-3)
    if peak:
        assert plan.memory.peak.total_bytes / 1e9 == pytest.approx(peak, rel=5e-3)


def test_no_layout_is_faster_than_the_one_of_flash_on_h200():
    tuned = undertow.plan("pretrain/flash-64xH200", "64xH200", tune=True)
    assert tuned.layout == prepared("pretrain/flash-64xH200").plan.layout


def test_the_published_run_in_the_published_memory():
    plan = undertow.plan("pretrain/flash-32xMI355X", "32xMI355X", implementation="primus", state="published-bf16")
    assert plan.memory.peak.total_bytes / 2**30 == pytest.approx(242.98, rel=0.01)


def test_proxies_share_more_experts_in_the_same_time():
    every = [prepared(f"pretrain/proxy-{count}xH200") for count in (1, 2, 4)]
    assert [found.resolved.config.model.n_routed_experts for found in every] == [32, 64, 128]
    assert [found.plan.task.geometry.expert for found in every] == [1, 2, 4] and not any(f.unbuilt for f in every)
    seconds = [found.plan.time.seconds_per_iteration for found in every]
    assert seconds[1:] == pytest.approx(seconds[:1] * 2, rel=0.01)


@pytest.mark.parametrize(("name", "processes"), [("cpu-2proc", 2), ("cpu-4proc", 4)])
def test_recipes_for_processor_cores_suit_their_processes(name, processes):
    found = on_cores(f"pretrain/{name}", 1, processes, [], {})
    assert (found.conflicts, found.words) == ((), ())
    refuse_wider(found.resolved.config, processes)
