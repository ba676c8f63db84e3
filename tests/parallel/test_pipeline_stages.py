"""Stages read off a layout, what each rank holds of a model, and schedules that suit them or are refused."""

from __future__ import annotations

import pytest
import torch

from undertow.config.errors import ConfigError
from undertow.config.model import ModelConfig
from undertow.config.parallel import ParallelConfig
from undertow.model.part import Part
from undertow.model.transformer import Transformer
from undertow.parallel.pipeline.edge import enter, leave
from undertow.parallel.pipeline.stage import Stage
from undertow.parallel.pipeline.stages import build_stages, check_schedule, check_torch

CONFIG = ModelConfig.from_preset("v4-debug")  # five layers and an MTP block


def stages_of(**parallel):
    return build_stages(ParallelConfig(**parallel), CONFIG)


def test_without_a_layout_layers_are_spread_evenly():
    assert str(stages_of(pipeline=2).layout) == "Et*2|t*3mL"
    assert str(stages_of(pipeline=2, schedule="interleaved").layout) == "Et|t|t|t*2mL"
    assert str(stages_of(pipeline=2, schedule="zbv").layout) == "Et|t|t|t*2mL"


def test_stages_and_ranks_of_a_looped_layout():
    stages = stages_of(pipeline=2, schedule="interleaved", layout="E|t*3|tt|mL")
    assert [stages.of_rank(rank) for rank in (0, 1)] == [[0, 2], [1, 3]]
    assert [stages.stage(number) for number in range(4)] == [
        Part((), True, False, False),
        Part((0, 1, 2), False, False, False),
        Part((3, 4), False, False, False),
        Part((), False, True, True),
    ]
    assert stages.part(0) == Part((3, 4), True, False, False)
    assert stages.part(1) == Part((0, 1, 2), False, True, True)
    assert stages.part(1).copies == {"embed.weight"} and not stages.part(0).copies
    assert [stages.rank_with(letter) for letter in "EmL"] == [0, 1, 1]


def test_a_folded_layout_has_both_ends_on_the_first_rank():
    stages = stages_of(pipeline=2, schedule="zbv")
    assert [stages.of_rank(rank) for rank in (0, 1)] == [[0, 3], [1, 2]]
    assert stages.part(0) == Part((0, 3, 4), True, True, True) and not stages.part(0).copies
    apart = stages_of(pipeline=2, schedule="zbv", layout="Et|tt|ttm|L")
    assert apart.part(1).copies == {"embed.weight", "head.weight"}


def test_parts_hold_their_modules_under_the_names_of_the_whole():
    stages = stages_of(pipeline=2, schedule="interleaved", layout="Et|tt|ttm|L")
    whole = Transformer(CONFIG, device="meta")
    parts = [Transformer(CONFIG, device="meta", part=stages.part(rank)) for rank in (0, 1)]
    names = [set(part.state_dict()) for part in parts]
    assert names[0] | names[1] == set(whole.state_dict()) and names[0] & names[1] == {"head.weight"}
    assert list(whole.state_dict()) == list(Transformer(CONFIG, device="meta", part=Part.whole(CONFIG)).state_dict())
    shapes = {name: tensor.shape for name, tensor in whole.state_dict().items()}
    assert all(tensor.shape == shapes[name] for part in parts for name, tensor in part.state_dict().items())
    assert {name.split(".")[1] for name in names[0] if name.startswith("layers.")} == {"0", "3", "4"}
    assert parts[1].dtype == torch.float32 and parts[1].device.type == "meta"


@pytest.mark.parametrize(
    ("parallel", "message"),
    [
        ({"schedule": "interleaved", "layout": "Ett|tttmL"}, "parallel.schedule interleaved takes 2 or more stages on"),
        ({"layout": "Et|t|tt|tmL"}, "parallel.schedule 1f1b takes 1 stages on each rank; layout 'Et|t|t*2|tmL' has 2"),
        ({"layout": "Ett|ttmL"}, "layout 'Et*2|t*2mL', stages 0 to 1: 4 t (2, 2 by stage); the model has 5"),
        ({"schedule": "zbv", "layout": "Ett|tttmL"}, "layout 'Et*2|t*3mL', after stage 1: 2 stages; a folded schedule"),
    ],
)
def test_a_layout_that_does_not_suit_is_refused(parallel, message):
    with pytest.raises(ConfigError) as refusal:
        stages_of(pipeline=2, **parallel)
    assert str(refusal.value).startswith(message) and "\n" not in str(refusal.value)


@pytest.mark.parametrize(
    ("schedule", "microbatches", "recompute", "message"),
    [
        ("1f1b", 3, (), "3 micro-batches of a step on each data-parallel rank are fewer than the 4 pipeline ranks"),
        ("interleaved", 6, (), "6 micro-batches of a step on each data-parallel rank; allowed: a multiple of the 4"),
        ("zb-h1", 9, (), "9 micro-batches of a step on each data-parallel rank; allowed: at most, or a multiple of"),
        ("zbv", 8, (2,), "splits the backward pass, so nothing can be recomputed"),
    ],
)
def test_a_number_that_a_schedule_does_not_run_is_refused(schedule, microbatches, recompute, message):
    with pytest.raises(ConfigError) as refusal:
        check_schedule(schedule, 4, microbatches, recompute)
    assert message in str(refusal.value) and "\n" not in str(refusal.value)


@pytest.mark.parametrize(
    ("schedule", "microbatches"),
    [("1f1b", 4), ("1f1b", 7), ("interleaved", 8), ("zb-h1", 3), ("zb-h1", 12), ("zbv", 1)],
)
def test_numbers_that_schedules_run(schedule, microbatches):
    check_schedule(schedule, 4, microbatches)


@pytest.mark.parametrize("schedule", ["zb-h1", "zbv"])
def test_a_split_backward_pass_needs_a_torch_that_splits_it_rightly(schedule):
    check_torch(schedule, "2.13.0+cpu")
    check_torch("1f1b", "2.11.0+cu130")
    with pytest.raises(ConfigError, match=f"parallel.schedule {schedule}: it splits the backward pass, which torch 2"):
        check_torch(schedule, "2.12.1")


def test_a_stage_knows_its_microbatch_without_a_tensor():
    stages, seen = stages_of(pipeline=2), []
    stage = Stage(0, Transformer(CONFIG, device="meta", part=stages.part(0)), stages.stage(0))
    stage.register_forward_pre_hook(lambda _, __, named: seen.append(named), with_kwargs=True)  # where FSDP2 stands
    stage.work = lambda number, streams, microbatch: torch.tensor(microbatch)
    assert stage(microbatch=torch.tensor([7])) == 7
    assert seen == [{"microbatch": 7}] and type(seen[0]["microbatch"]) is int


def test_the_loss_of_a_stage_enters_the_backward_pass_where_streams_leave():
    given = torch.arange(12.0).view(2, 2, 3).requires_grad_()
    streams = enter(given) * 2
    left = leave(streams.transpose(0, 1), (3 * streams).sum())
    assert left.is_contiguous() and not left._is_view() and torch.equal(left, streams.transpose(0, 1))
    left.backward(torch.full_like(left, 5.0))
    assert torch.equal(given.grad, torch.full_like(given, 2 * (5.0 + 3.0)))


def test_a_gradient_that_is_sent_back_is_contiguous():
    given = torch.zeros(4, 3, requires_grad=True)
    (grad,) = torch.autograd.grad(enter(given).sum(), given)
    assert grad.is_contiguous() and torch.equal(grad, torch.ones(4, 3))
