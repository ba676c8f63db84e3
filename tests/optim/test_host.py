"""State on the host: the same bits as beside the weights, whatever passes through at once."""

from __future__ import annotations

import pytest
import torch

from tests.optim import plain
from tests.optim.test_optimizer import CONFIG, KINDS, advance, assert_same
from undertow.checkpoint.training import Progress, load_checkpoint, save_checkpoint
from undertow.model.build import build_model
from undertow.optim.build import build_optimizer
from undertow.optim.host import BESIDE, Host, through
from undertow.optim.part import Part


def begin(algorithm, profile, dtype, offload):
    model = build_model(CONFIG, 0, dtype=dtype)
    return model, build_optimizer(model, plain.Settings(algorithm, profile, offload_optimizer=offload))


@pytest.mark.parametrize(
    ("algorithm", "profile", "dtype"),
    [*((*kind, torch.bfloat16) for kind in KINDS), ("muon", "fp32", torch.float32), ("adamw", "fp32", torch.float32)],
)
def test_a_step_has_the_same_bits(algorithm, profile, dtype):
    resident, offloaded = (begin(algorithm, profile, dtype, offload) for offload in (False, True))
    for each in (resident, offloaded):
        advance(*each, range(3))
    assert_same(resident, offloaded)


def test_state_goes_on_from_either_to_the_other():
    runs = [begin("muon", "bf16", torch.bfloat16, offload) for offload in (False, True, True, False)]
    for each in runs[:2]:
        advance(*each, range(2))
    for (model, optimizer), (first, saved) in zip(runs[2:], runs[:2], strict=True):
        model.load_state_dict(first.state_dict())
        optimizer.load_state_dict(saved.state_dict())
    for each in runs:
        advance(*each, [2])
    for other in runs[1:]:
        assert_same(runs[0], other)


def test_a_checkpoint_of_either_goes_on(tmp_path):
    first = begin("adamw", "fp32", torch.bfloat16, True)
    advance(*first, range(2))
    path = save_checkpoint(tmp_path, *first, Progress(2, 0, {}))
    runs = [begin("adamw", "fp32", torch.bfloat16, offload) for offload in (False, True)]
    for each in (first, *runs):
        if each is not first:
            load_checkpoint(path, *each)
        advance(*each, [2])
    assert_same(first, runs[0])
    assert_same(first, runs[1])


def parts(*sizes):
    return [[Part(torch.zeros(size), torch.ones(size), {"m": torch.full((size,), float(size))})] for size in sizes]


def test_batches_come_as_copies_and_go_back_in_order():
    kept, seen = parts(3, 5, 0, 2), []
    for (part,) in through(kept, Host(torch.device("cpu"))):
        seen.append(part.state["m"].tolist())
        part.state["m"].add_(part.grad)
    assert seen == [[3.0] * 3, [5.0] * 5, [], [2.0] * 2]
    assert [part.state["m"].tolist() for (part,) in kept] == [[4.0] * 3, [6.0] * 5, [], [3.0] * 2]


def test_state_beside_the_weights_is_not_copied():
    kept = parts(3, 5)
    for (part,), (own,) in zip(through(kept, BESIDE), kept, strict=True):
        assert part.state["m"] is own.state["m"]


def test_rows_of_a_stack_with_gaps_come_and_go():
    whole = torch.arange(48.0).view(2, 6, 4)
    state = whole[:, 2:4]
    part = Part(state.clone(), state.clone(), {"m": state})
    for (here,) in through([[part]], Host(torch.device("cpu"))):
        assert torch.equal(here.state["m"], state)
        here.state["m"].neg_()
    expected = torch.arange(48.0).view(2, 6, 4)
    expected[:, 2:4].neg_()
    assert torch.equal(whole, expected)
