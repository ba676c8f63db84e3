"""Steps of the optimizer as tasks: their bytes and operations, and that another step than the one wanted is found."""

import pytest
import torch

from undertow.bench import kernels, optimizer
from undertow.bench.optimizer import PROFILES, TINY, State, optimizer_tasks
from undertow.optim.adamw import MOMENTS, adamw_step
from undertow.optim.muon import MOMENTUM, muon_step


def found(cpu):
    return {task.op: task for task in optimizer_tasks(TINY, cpu, ("reference", "torch"))}


def test_a_step_moves_so_many_bytes_an_element(cpu):
    named = found(cpu)
    elements = 2 * 2 * 16 * 32
    assert [named[f"adamw with {p} state"].work.bytes / 5000 for p in PROFILES] == [30, 18]
    assert [named[f"muon with {p} state"].work.bytes / elements for p in PROFILES] == [22, 14]
    work = named["muon with fp32 state"].work
    assert work.nominal == 4 * 10 * 2 * (2 * 16 * 16 * 32 + 16**3)
    assert work.exact == 4 * 10 * (3 * 16 * 16 * 32 + 16**3)
    assert not any(task.captured for task in named.values())


@pytest.mark.parametrize("profile", PROFILES)
def test_another_step_of_adamw_is_found(profile, cpu):
    task = found(cpu)[f"adamw with {profile} state"]
    wrong = State((TINY.elements,), profile, MOMENTS, cpu).part
    rule = dict(optimizer._ADAMW)
    adamw_step([wrong], 3, **(rule | {"lr": 1.1e-3}))
    assert task.error(wrong) == pytest.approx(0.1, rel=0.02)
    other = State((TINY.elements,), profile, MOMENTS, cpu).part
    adamw_step([other], 3, **(rule | {"betas": (0.9, 0.94)}))
    assert task.error(other) > 0.01


@pytest.mark.parametrize("profile", PROFILES)
def test_another_step_of_muon_is_found(profile, cpu):
    task = found(cpu)[f"muon with {profile} state"]
    wrong = State((2, 32, 32), profile, (MOMENTUM,), cpu).part
    muon_step([(wrong, (32,))], lr=1e-3, momentum=0.95, weight_decay=0.1)  # the two matrices taken for one
    assert task.error(wrong) > 0.1


def test_ways_have_state_of_their_own(cpu):
    task = found(cpu)["adamw with fp32 state"]
    for name in ("reference", "torch", "reference"):
        run = task.ways[name].build()
        assert task.error(run()) < 1e-6
        assert task.error(run()) > 0.1  # a second step is not the one that is judged


def test_the_profiles_hold_the_same_weights(cpu):
    fine, coarse = (State((100,), profile, MOMENTS, cpu).part for profile in PROFILES)
    assert fine.weight.dtype == coarse.weight.dtype == torch.bfloat16
    assert torch.equal(optimizer.read_master(fine), optimizer.read_master(coarse))
    assert (fine.grad.dtype, coarse.grad.dtype) == (torch.float32, torch.bfloat16)


def test_an_optimizer_is_measured_once_for_all_shapes(cpu):
    assert kernels._shapes("optimizer", [(4096,), (8192,)], cpu) == [(4096,)]
    assert kernels._shapes("norm", [(4096,), (8192,)], cpu) == [(4096,), (8192,)]
