"""Axes over ranks: widths, places, groups, and refusals in one sentence."""

from __future__ import annotations

import pytest
import torch
import torch.distributed as dist

from tests.parallel.gang import RankError
from undertow.config.errors import ConfigError
from undertow.config.model import ModelConfig
from undertow.config.parallel import ParallelConfig
from undertow.parallel.mesh import DENSE_AXES, EXPERT_AXES, build_axes, build_mesh


def members(axes, axis, ranks):
    """Groups of ranks that differ on one axis alone, of the mesh that has it."""
    others = [name for name in (DENSE_AXES if axis in DENSE_AXES else EXPERT_AXES) if name != axis]
    groups: dict[tuple[int, ...], list[int]] = {}
    for rank in range(ranks):
        at = axes.coordinates(rank)
        groups.setdefault(tuple(at[name] for name in others), []).append(rank)
    return sorted(groups.values())


def test_published_run():
    axes = build_axes(ParallelConfig(pipeline=4, expert=8), 32)
    assert (axes.dense, axes.experts) == ((4, 1, 8, 1, 1), (4, 1, 8))
    assert members(axes, "expert", 32) == members(axes, "shard", 32) == [[*range(s, s + 8)] for s in range(0, 32, 8)]
    assert members(axes, "pipeline", 32) == [[rank + 8 * s for s in range(4)] for rank in range(8)]


def test_experts_take_ranks_of_tensor_and_data_parallelism():
    axes = build_axes(ParallelConfig(tensor=2, expert=4), 8, shard=2)
    assert (axes.dense, axes.experts) == ((1, 2, 2, 1, 2), (1, 2, 4))
    assert members(axes, "tensor", 8) == [[0, 1], [2, 3], [4, 5], [6, 7]]
    assert members(axes, "shard", 8) == [[0, 2], [1, 3], [4, 6], [5, 7]]
    assert members(axes, "replicate", 8) == [[0, 4], [1, 5], [2, 6], [3, 7]]
    assert members(axes, "expert", 8) == [[0, 1, 2, 3], [4, 5, 6, 7]]
    assert members(axes, "expert_data", 8) == [[0, 4], [1, 5], [2, 6], [3, 7]]


def test_the_recipe_says_how_many_share_dense_weights():
    axes = build_axes(ParallelConfig(expert=4, shard=2), 8)
    assert (axes.dense, axes.experts) == ((1, 4, 2, 1, 1), (1, 2, 4))
    assert str(axes) == "replicate 4, shard 2, expert 4"
    assert build_axes(ParallelConfig(shard=1), 4).dense == (1, 4, 1, 1, 1)


@pytest.mark.parametrize("ranks", [8, 16, 48])
def test_places_are_those_of_ranks_laid_out_in_a_grid(ranks):
    axes = build_axes(ParallelConfig(tensor=2, pipeline=2, expert=4), ranks, shard=2 if ranks > 8 else 1)
    for names, widths in ((DENSE_AXES, axes.dense), (EXPERT_AXES, axes.experts)):
        grid = torch.arange(ranks).view(widths)
        for rank in range(ranks):
            at = axes.coordinates(rank)
            assert grid[tuple(at[name] for name in names)] == rank
            assert [axes.width(name) for name in names] == list(widths)


@pytest.mark.parametrize(
    ("parallel", "ranks", "shard", "message"),
    [
        (
            {"pipeline": 4},
            6,
            None,
            "6 GPUs are not a multiple of tensor 1 x pipeline 4 x context 1 = 4",
        ),
        (
            {"expert": 4},
            6,
            None,
            "expert 4 does not divide the 6 ranks of a stage (6 GPUs / pipeline 1), over which experts are dealt out",
        ),
        ({}, 6, 4, "shard 4 does not divide the 6 data-parallel ranks; allowed: 1, 2, 3, 6"),
        ({}, 2, 0, "shard 0 does not divide the 2 data-parallel ranks; allowed: 1, 2"),
        ({"expert": 16}, 16, None, "expert 16 does not divide n_routed_experts 8: every rank must hold as many"),
        ({"pipeline": 8}, 8, None, "pipeline 8 exceeds num_hidden_layers 5: every stage needs a layer"),
    ],
)
def test_what_cannot_be_shared_out_is_told(parallel, ranks, shard, message):
    with pytest.raises(ConfigError) as caught:
        build_axes(ParallelConfig(**parallel), ranks, shard, ModelConfig.from_preset("v4-debug"))
    assert str(caught.value).startswith(message) and "\n" not in str(caught.value)


def groups_of(parallel, shard):
    mesh = build_mesh(ParallelConfig(**parallel), shard)
    lists = {axis: dist.get_process_group_ranks(mesh.group(axis)) for axis in DENSE_AXES + EXPERT_AXES}
    for axis, ranks in lists.items():
        value = torch.tensor([1 << dist.get_rank()])
        dist.all_reduce(value, group=mesh.group(axis))
        assert int(value) == sum(1 << rank for rank in ranks), axis
        assert ranks[mesh.place(axis)] == dist.get_rank() and len(ranks) == mesh.width(axis)
    return lists | {"data": dist.get_process_group_ranks(mesh.data), "place": mesh.data_place}


def test_groups_of_four_ranks(four):
    found = four.run(groups_of, {"expert": 2}, 2)
    assert [rank["replicate"] for rank in found] == [[0, 2], [1, 3], [0, 2], [1, 3]]
    assert [rank["shard"] for rank in found] == [[0, 1], [0, 1], [2, 3], [2, 3]]
    assert [rank["expert"] for rank in found] == [[0, 1], [0, 1], [2, 3], [2, 3]]
    assert [rank["expert_data"] for rank in found] == [[0, 2], [1, 3], [0, 2], [1, 3]]
    assert [rank["data"] for rank in found] == [[0, 1, 2, 3]] * 4
    assert [rank["place"] for rank in found] == [(0, 4), (1, 4), (2, 4), (3, 4)]
    found = four.run(groups_of, {"pipeline": 2, "expert": 2}, 1)
    assert [rank["pipeline"] for rank in found] == [[0, 2], [1, 3], [0, 2], [1, 3]]
    assert [rank["replicate"] for rank in found] == [rank["expert"] for rank in found] == [[0, 1]] * 2 + [[2, 3]] * 2
    assert [rank["data"] for rank in found] == [[0, 1], [0, 1], [2, 3], [2, 3]]
    assert [rank["place"] for rank in found] == [(0, 2), (1, 2)] * 2


@pytest.mark.parametrize(("axis", "told"), [("tensor", "tensor parallelism"), ("context", "context parallelism")])
def test_axes_that_are_not_built_refuse(two, axis, told):
    with pytest.raises(RankError, match=f"parallel.{axis} is 2: {told} is not built yet; set parallel.{axis}=1"):
        two.run(groups_of, {axis: 2}, 1)
