"""Muon on matrices in parts over ranks: the plan alone, and steps against those of one process."""

from __future__ import annotations

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Shard, distribute_tensor

from undertow.optim.groups import Entry, Groups
from undertow.optim.optimizer import MuonAdamW
from undertow.optim.parted import plan
from undertow.parallel.held import rows_of

SHAPES = (
    (96, 40, (96,)),
    (40, 96, (40,)),
    (130, 64, (65, 65)),
    (24, 16, (4, 4, 16)),
    (128, 32, (32,) * 4),  # of four ranks, each holds one of the matrices
    (3, 50, (3,)),  # fewer rows than ranks
    (1, 8, (1,)),
    *((384, 256, (384,)),) * 6,  # several rounds
)


@pytest.mark.parametrize(("ranks", "most"), [(1, 1 << 18), (2, 1 << 18), (4, 1 << 18), (4, 1), (7, 10_000), (64, 10)])
def test_a_plan_has_every_row_of_every_matrix_once(ranks, most):
    rounds = plan(SHAPES, ranks, most)
    places = [place for each in rounds for place in each]
    assert sorted((place.tensor, place.top, place.height) for place in places) == [
        (number, sum(heights[:i]), height)
        for number, (_, _, heights) in enumerate(SHAPES)
        for i, height in enumerate(heights)
    ]
    assert all(sum(place.rows) == place.height and 0 <= place.owner < ranks for place in places)
    for each in rounds:
        assert [place.owner for place in each] == sorted(place.owner for place in each)
        for rank in range(ranks):
            sizes = [place.size for place in each if place.owner == rank]
            assert sum(sizes) <= most or len(sizes) == 1


def test_work_is_shared_out_and_whole_matrices_stay_where_they_are():
    places = [place for each in plan(SHAPES, 4, 1 << 18) for place in each]
    assert all(place.rows[place.owner] == place.height for place in places if place.height in place.rows)
    assert [place.owner for place in sorted(places) if place.tensor == 4] == [0, 1, 2, 3]
    work = [sum(place.work for place in places if place.owner == rank) for rank in range(4)]
    largest = max(place.work for place in places)
    assert max(work) - min(work) <= largest


def steps(profile, dtype, iteration, count=3):
    """Farthest number of a weight, and of its state, from one process'; and whether a matrix without gradient and one
    of zeros have moved."""
    mesh = init_device_mesh("cpu", (dist.get_world_size(),), mesh_dim_names=("shard",))
    generator = torch.Generator().manual_seed(0)
    shapes = (*SHAPES, (8, 8, (8,)), (12, 8, (12,)))
    starts = [torch.randn(rows, width, generator=generator).to(dtype) for rows, width, _ in shapes]
    starts[-1].zero_()
    optimizers = []
    for parted in (False, True):
        held = [distribute_tensor(start, mesh, [Shard(0)]) if parted else start.clone() for start in starts]
        entries = [
            Entry(f"w{i}", nn.Parameter(weight), heights)
            for i, (weight, (_, _, heights)) in enumerate(zip(held, shapes, strict=True))
        ]
        optimizers.append(MuonAdamW(
            Groups(entries, []), lr=0.1, profile=profile, muon_dtype=iteration, shard=mesh.get_group("shard")
        ))  # fmt: skip
    whole, parts = (optimizer.param_groups[0]["params"] for optimizer in optimizers)
    for _ in range(count):
        for ours, theirs in zip(parts[:-2], whole[:-2], strict=True):
            theirs.grad = torch.randn(theirs.shape, generator=generator).to(dtype)
            ours.grad = distribute_tensor(theirs.grad, mesh, [Shard(0)])
        whole[-1].grad = torch.zeros_like(whole[-1])
        parts[-1].grad = distribute_tensor(whole[-1].grad, mesh, [Shard(0)])
        for optimizer in optimizers:
            optimizer.step()
    untouched = parts[-2] not in optimizers[1].state and torch.equal(parts[-2].full_tensor(), starts[-2])
    far, state_far = 0.0, 0.0
    for ours, theirs in zip(parts, whole, strict=True):
        far = max(far, float((ours.full_tensor() - theirs).detach().float().abs().max()))
        local = ours.to_local()
        state = optimizers[1].state.get(ours, {})
        assert all(tensor.shape == local.shape and type(tensor) is torch.Tensor for tensor in state.values())
        if local.numel() and state:
            rows = rows_of(len(theirs), dist.get_world_size())[dist.get_rank()]
            there = optimizers[0].state[theirs]["momentum_buffer"][rows.start : rows.stop]
            state_far = max(state_far, float((state["momentum_buffer"] - there).float().abs().max()))
    return far, state_far, untouched and not parts[-1].full_tensor().any()


KINDS = pytest.mark.parametrize(
    ("profile", "dtype", "iteration", "tolerance"),
    [
        ("fp32", torch.float32, torch.float32, 2e-6),
        ("fp32", torch.float64, None, 1e-14),
        ("fp32", torch.bfloat16, torch.float32, 2**-6),  # last bits of weights of up to 4
        ("bf16", torch.bfloat16, torch.float32, 2**-6),
        ("fp32", torch.float32, torch.bfloat16, 4e-3),  # directions travel rounded to 2^-9 of their numbers
    ],
)


def check(answers, tolerance):
    for far, state_far, still in answers:
        assert (far <= tolerance, state_far == 0.0, still) == (True,) * 3, (far, state_far, still)


@KINDS
def test_two_ranks_take_the_steps_of_one_process(two, profile, dtype, iteration, tolerance):
    check(two.run(steps, profile, dtype, iteration), tolerance)


@KINDS
def test_four_ranks_take_the_steps_of_one_process(four, profile, dtype, iteration, tolerance):
    check(four.run(steps, profile, dtype, iteration), tolerance)


def offloaded(profile):
    """Whether steps with state on the host leave the same bits of weights and state as those without."""
    mesh = init_device_mesh("cpu", (dist.get_world_size(),), mesh_dim_names=("shard",))
    found = []
    for offload in (False, True):
        generator = torch.Generator().manual_seed(0)
        entries = []
        for rows, width, heights in SHAPES:
            start = torch.randn(rows, width, generator=generator).bfloat16()
            entries.append(Entry("w", nn.Parameter(distribute_tensor(start, mesh, [Shard(0)])), heights))
        group = mesh.get_group("shard")
        optimizer = MuonAdamW(Groups(entries, []), lr=0.1, profile=profile, shard=group, offload=offload)
        for _ in range(3):
            for entry in entries:
                gradient = torch.randn(entry.parameter.shape, generator=generator).bfloat16()
                entry.parameter.grad = distribute_tensor(gradient, mesh, [Shard(0)])
            optimizer.step()
        states = [value for entry in entries for value in optimizer.state[entry.parameter].values()]
        found.append([*(entry.parameter.to_local() for entry in entries), *states])
    return all(torch.equal(one, other) for one, other in zip(*found, strict=True))


@pytest.mark.parametrize("profile", ["fp32", "bf16"])
def test_state_on_the_host_gives_the_same_bits(two, profile):
    assert two.run(offloaded, profile) == [True, True]


def without_a_group():
    mesh = init_device_mesh("cpu", (2,), mesh_dim_names=("shard",))
    parameter = nn.Parameter(distribute_tensor(torch.ones(4, 4), mesh, [Shard(0)]))
    parameter.grad = parameter.detach().clone()
    MuonAdamW(Groups([Entry("w", parameter, (4,))], []), lr=0.1).step()


def test_an_optimizer_without_the_group_of_its_parts_refuses(two):
    with pytest.raises(AssertionError, match="give MuonAdamW the group of those"):
        two.run(without_a_group)
