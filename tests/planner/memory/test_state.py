"""Optimizer state in the memory of the host: what leaves the GPU, what stays there, and what is said of it."""

from __future__ import annotations

import json

import pytest

import undertow
from undertow.config.model import ModelConfig
from undertow.config.schema import RunConfig
from undertow.config.training import TrainConfig
from undertow.model.parameters import Parameters
from undertow.model.weights import all_weights
from undertow.planner.geometry import build_geometry
from undertow.planner.memory.parameters import RankParameters, rank_parameters
from undertow.planner.memory.state import on_host, profile_of_run, state_bytes, state_profile

MIB = 2**20


@pytest.fixture(scope="module")
def published():
    """The published reinforcement learning on 16 GPUs that train and 8 that sample."""
    return undertow.plan(
        "v4-flash", "16xMI308X+8xMI308X", tensor=4, pipeline=4, expert=4, sequence_length=16_384, offload_optimizer=True
    )


def test_state_moves_to_the_host_and_two_chunks_stay():
    held = RankParameters(Parameters(10**9, 0, 10**9, 0, 1), Parameters(2 * 10**9, 0, 2 * 10**9, 0, 1))
    geometry, profile = build_geometry(16, tensor=4, pipeline=4, expert=4), state_profile("published-bf16")
    here, there = (state_bytes(held, held, geometry, p) for p in (profile, on_host(profile)))
    assert (here.optimizer, here.host) == (6 * 3 * 10**9, 0)
    assert (there.optimizer, there.host) == (2 * 256 * MIB, 6 * 3 * 10**9)
    assert (there.weights, there.gradients) == (here.weights, here.gradients)


def test_a_run_says_where_its_state_lies():
    run = RunConfig(model=ModelConfig.from_preset("v4-debug"), train=TrainConfig(offload_optimizer=True))
    profile = profile_of_run(run)
    assert (profile.name, profile.host) == ("muon-fp32 on the host", True) and on_host(profile) is profile


def test_the_published_case_fits_with_state_on_the_host(published):
    geometry, memory = published.task.geometry, published.memory
    assert (geometry.tensor, geometry.pipeline, geometry.expert, geometry.data) == (4, 4, 4, 1)
    assert published.fits and published.task.profile.name == "published-bf16 on the host"
    # Sixteen ranks hold everything once, but for what is whole on the tensor ranks, and the second embedding.
    weights = sum(rank.bytes_of("weights") for rank in memory.ranks)
    assert (
        weights == pytest.approx(2 * published.parameters.total, rel=0.01) and weights > 2 * published.parameters.total
    )
    assert sum(rank.host_bytes for rank in memory.ranks) == 3 * weights
    assert {rank.bytes_of("chunks of the optimizer state") for rank in memory.ranks} == {512 * MIB}
    assert all(rank.bytes_of("optimizer state") == 0 for rank in memory.ranks)
    # Ranks 8 to 15, the last two stages, are one machine.
    assert memory.machine_host_bytes() == sum(rank.host_bytes for rank in memory.ranks[8:])
    assert 850e9 < memory.machine_host_bytes() < 1000e9


def test_the_gpu_is_relieved_by_what_the_host_holds(published):
    beside = undertow.plan(
        "v4-flash", "16xMI308X", tensor=4, pipeline=4, expert=4, sequence_length=16_384, recompute="none"
    )
    for here, there in zip(beside.memory.stages, published.memory.stages, strict=True):
        assert here.total_bytes - there.total_bytes == there.host_bytes - 512 * MIB and here.host_bytes == 0


def test_the_published_case_does_not_fit_without(published):
    beside = undertow.plan("v4-flash", "16xMI308X", tensor=4, pipeline=4, expert=4, sequence_length=16_384)
    assert not beside.fits and published.memory.peak.total_bytes < 0.9 * published.memory.limit_bytes


def test_what_is_said_of_it(published):
    notes = published.uncalibrated
    assert "time: moving the optimizer state from the host and back once an iteration is not in the rates" in notes
    assert any(note.startswith("memory: chunks of 256 MiB") for note in notes)
    assert "\n  on the host: optimizer state, " in str(published) and "GB a machine of 8 GPUs at most" in str(published)
    ranks = json.loads(json.dumps(published.json()))["memory"]["ranks"]
    assert [rank["host_bytes"] for rank in ranks] == [rank.host_bytes for rank in published.memory.ranks]


def test_the_rollout_of_the_published_case(published):
    rollout = published.rollout
    assert rollout and rollout.fits and rollout.serving.length == 16_384
    assert rollout.serving.budget == 172_800_000_000 and rollout.serving.form == "fp8"


def test_one_gpu():
    alone = undertow.plan("v4-tiny", "1xH200", offload_optimizer=True)
    whole = rank_parameters(all_weights(alone.task.config), alone.task.geometry)
    state = sum(alone.task.profile.profile.optimizer_state(part) for part in whole)
    assert alone.fits and alone.memory.stages[0].host_bytes == alone.memory.machine_host_bytes() == state


def test_tensor_parallelism_is_chosen_where_nothing_else_fits():
    plan = undertow.plan("v4-flash", "24xMI300X")
    assert plan.fits and plan.task.geometry.tensor == 2
    assert plan.uncalibrated[0] == (
        "choice: tensor 2, for with less nothing fits under implementation primus or tight on 24xMI300X; "
        "--tp gives another"
    )
    given = undertow.plan("v4-flash", "24xMI300X", tensor=1)
    assert not given.fits and given.task.geometry.tensor == 1
    assert not any(note.startswith("choice") for note in given.uncalibrated)


def test_a_run_shares_weights_among_as_many_ranks_as_it_asks_for():
    held = RankParameters(Parameters(8 * 10**6, 0, 0, 0, 1), Parameters(16 * 10**6, 0, 0, 0, 1))
    run = RunConfig(model=ModelConfig.from_preset("v4-debug"), train=TrainConfig(optimizer="adamw"))
    found = [
        state_bytes(held, held, build_geometry(8, expert=2, shard=shard), profile_of_run(run)) for shard in (None, 2, 1)
    ]
    # Dense weights over 8, 2 and 1 ranks, experts over 4, 4 and 1; in float32, with two moments.
    assert [each.weights for each in found] == [4 * (10**6 + 4 * 10**6), 4 * (4 * 10**6 + 4 * 10**6), 4 * 24 * 10**6]
    assert [each.optimizer for each in found] == [2 * each.weights for each in found]
