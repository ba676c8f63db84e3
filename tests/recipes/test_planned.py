"""Recipes that state their GPUs: each is planned on them, fits, and has nothing that cannot go together."""

import pytest

import undertow
from undertow.config.paths import recipe_names
from undertow.config.resolve import resolve
from undertow.launch.prepare import prepare

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


def test_two_proxies_share_twice_the_experts():
    one, two = (prepared(f"pretrain/proxy-{count}xH200") for count in (1, 2))
    experts = [found.resolved.config.model.n_routed_experts for found in (one, two)]
    assert experts == [32, 64] and two.plan.task.geometry.expert == 2
    seconds = [found.plan.time.seconds_per_iteration for found in (one, two)]
    assert seconds[1] == pytest.approx(seconds[0], rel=0.01)
