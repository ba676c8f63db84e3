"""What a recipe states of widths, layout, schedule and recomputation, beneath the options of a plan."""

from __future__ import annotations

import pytest

import undertow
from undertow.config.errors import ConfigError
from undertow.planner.memory.recompute import Recompute

AMD = "pretrain/v4-flash-amd"
FINAL = "Et*10|t*12|t*12|t*9mL"


def test_a_recipe_is_planned_as_it_stands():
    plan = undertow.plan(AMD, "32xMI355X")
    geometry = plan.task.geometry
    assert (geometry.pipeline, geometry.expert, plan.layout) == (4, 8, FINAL)
    assert plan.task.schedule == "1f1b"


def test_options_win_and_another_pipeline_spreads_layers_anew():
    plan = undertow.plan(AMD, "64xMI355X", pipeline=8, expert=4)
    assert (plan.task.geometry.pipeline, plan.task.geometry.expert) == (8, 4)
    assert plan.layout == "Et*5|t*5|t*5|t*5|t*5|t*6|t*6|t*6mL"
    assert undertow.plan(AMD, "64xMI355X", pipeline=4).layout == FINAL
    given = undertow.plan(AMD, "32xMI355X", layout="Et*11|t*11|t*12|t*9mL")
    assert given.layout == "Et*11|t*11|t*12|t*9mL"


def test_keys_on_the_command_line_are_stated_too():
    words = ["parallel.pipeline=4", "parallel.expert=8", "parallel.schedule=interleaved", "parallel.context=2"]
    plan = undertow.plan("v4-flash", "32xMI355X", overrides=words)
    assert (plan.task.geometry.context, plan.task.schedule, plan.task.chunks) == (2, "interleaved", 2)
    assert undertow.plan("v4-flash", "32xMI355X", overrides=words, context=1).task.geometry.context == 1


def test_the_list_form_of_a_layout():
    stages = "[[embedding,decoder,decoder],[decoder,decoder,mtp,loss]]"
    plan = undertow.plan("pretrain/quickstart", "2xH200", overrides=[f"parallel.layout={stages}"])
    assert plan.layout == "Et*2|t*2mL" and plan.task.geometry.pipeline == 2


def test_three_stages_a_rank_by_a_layout():
    layout = "Et*3|t*4|t*4|t*4|t*4|t*4|t*4|t*4|t*4|t*4|t*4mL"
    with pytest.raises(ConfigError, match="11 stages"):
        undertow.plan("v4-flash", "32xMI355X", layout=layout, pipeline=4)
    plan = undertow.plan("v4-flash", "32xMI355X", layout=layout.replace("t*4mL", "t*4|mL"), pipeline=4)
    assert (plan.task.schedule, plan.task.chunks) == ("interleaved", 3)


def test_recomputation_of_a_recipe():
    words = ["recompute.layers=[0,3]", "recompute.modules.query=all", "recompute.modules.moe=[5,6]"]
    plan = undertow.plan("v4-flash", "32xMI355X", overrides=words)
    others = set(range(43)) - {0, 3}
    assert plan.recompute == Recompute.of((0, 3), query=others, moe=(5, 6))
    assert undertow.plan("v4-flash", "32xMI355X", overrides=words, recompute="none").recompute == Recompute()
