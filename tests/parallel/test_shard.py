"""A whole model over ranks against one process: losses and gradients of a packed batch, with all of its losses."""

from __future__ import annotations

from functools import lru_cache

import numpy as np
import pytest
import torch
import torch.distributed as dist
from torch.distributed.tensor import DTensor

from tests.model.small import stirred
from undertow.config.model import ModelConfig
from undertow.config.parallel import ParallelConfig
from undertow.config.training import TrainConfig
from undertow.data.packing import IGNORED, Batch
from undertow.optim.build import build_optimizer
from undertow.parallel.experts import expert_parameters
from undertow.parallel.held import held as part
from undertow.parallel.mesh import build_mesh
from undertow.parallel.norm import gradient_norm
from undertow.parallel.shard import share_out, sum_gradients, widen_gradients
from undertow.train.batches import Denominators, flat_batch
from undertow.train.objective import Weights, objective

SLOW = pytest.mark.slow
CONFIG = ModelConfig.from_preset("v4-debug")
WEIGHTS = Weights(mtp=0.3, balance=0.05, z=1e-3, indexer=0.2)
ROWS = ((64, (20, 21, 64)), (64, (7, 60, 64)), (64, (64,)), (64, (1, 2, 30, 64)))


def packed(seed, length, ends):
    """One row of documents that end where told; the label of a token is the next one of its document."""
    generator = np.random.default_rng(seed)
    ids = generator.integers(0, CONFIG.vocab_size, (1, length))
    segments = np.searchsorted(np.array(ends), np.arange(length), side="right")[None]
    labels = np.where(np.diff(segments, append=-1) == 0, np.roll(ids, -1, 1), IGNORED)
    return flat_batch(Batch(ids, segments, labels))


def backward(model, batches, whole, recompute=()):
    """Gradients of the batches, and their losses by name, summed."""
    found: dict[str, float] = {}
    for batch in batches:
        losses = objective(model, batch, WEIGHTS, whole, recompute=recompute)
        losses.total.backward()
        for name, value in {"total": losses.total.detach(), **losses.parts}.items():
            found[name] = found.get(name, 0.0) + float(value)
    return found


def all_rows(rows):
    batches = [packed(seed, *row) for seed, row in enumerate(rows)]
    return batches, Denominators.of(batches)


@lru_cache(maxsize=2)
def one_process(rows, dtype):
    model = stirred(CONFIG, dtype=dtype)
    losses = backward(model, *all_rows(rows))
    return losses, {name: parameter.grad for name, parameter in model.named_parameters()}


def over_ranks(parallel, shard, dtype=torch.float32):
    mesh = build_mesh(ParallelConfig(**parallel), shard, CONFIG)
    model = stirred(CONFIG, dtype=dtype)
    share_out(model, mesh)
    return model, mesh


def of_all_ranks(losses, mesh):
    total = torch.tensor(list(losses.values()), dtype=torch.float64)
    dist.all_reduce(total, group=mesh.data)
    return dict(zip(losses, total.tolist(), strict=True))


def joined(tensor, of_expert, mesh):
    """A tensor that a rank has in part, as one process has it."""
    if isinstance(tensor, DTensor):
        tensor = tensor.full_tensor()
    if of_expert:
        parts = [torch.empty_like(tensor) for _ in range(mesh.width("expert"))]
        dist.all_gather(parts, tensor.contiguous(), group=mesh.group("expert"))
        tensor = torch.cat(parts)
    return tensor


def whole_gradients(model, mesh):
    """Gradients as one process has them, by name."""
    experts = set(expert_parameters(model))
    return {
        name: None if parameter.grad is None else joined(parameter.grad, parameter in experts, mesh)
        for name, parameter in model.named_parameters()
    }


def compare(parallel, shard, rows, recompute=(), dtype=torch.float32):
    """Largest distance of a loss to one process, that of all gradients together, that of the farthest parameter, and
    which parameters have a gradient in one of them alone."""
    expected, theirs = one_process(rows, dtype)
    model, mesh = over_ranks(parallel, shard, dtype)
    batches, whole = all_rows(rows)
    place, parts = mesh.data_place
    found = of_all_ranks(backward(model, batches[place::parts], whole, recompute), mesh)
    sum_gradients(model, mesh)
    ours = whole_gradients(model, mesh)
    assert found.keys() == expected.keys() == {"total", "lm", "mtp", "balance", "z", "indexer"}
    assert list(ours) == list(theirs)
    off = max(abs(found[name] - expected[name]) / abs(expected[name]) for name in expected)
    odd = [name for name in ours if (ours[name] is None) != (theirs[name] is None)]
    both = [name for name in ours if ours[name] is not None and theirs[name] is not None]
    assert all(ours[name].dtype == theirs[name].dtype for name in both)
    far = torch.stack([(ours[name].double() - theirs[name].double()).norm() for name in both])
    norm = torch.stack([theirs[name].double().norm() for name in both])
    return off, float(far.norm() / norm.norm()), float((far / norm.clamp(min=1e-15)).max()), odd


def check(answers, tolerance=1e-5, each=1e-4):
    for off, gradient, worst, odd in answers:
        assert (off <= tolerance, gradient <= tolerance, worst <= each, odd) == (True, True, True, []), (
            off, gradient, worst, odd,
        )  # fmt: skip


@pytest.mark.parametrize(
    ("parallel", "shard", "recompute"),
    [
        pytest.param({}, 1, (), id="DP2"),
        pytest.param({}, 2, (), id="FSDP2"),
        pytest.param({"expert": 2}, 1, (), id="EP2"),
        pytest.param({"expert": 2}, 2, (), id="EP2xFSDP2"),
        pytest.param({"expert": 2}, 1, (0, 2, 3), id="EP2-recomputed"),
        pytest.param({"expert": 2}, 2, (0, 1, 2, 3, 4), id="EP2xFSDP2-recomputed"),
    ],
)
def test_two_ranks_have_the_gradients_of_one_process(two, parallel, shard, recompute):
    check(two.run(compare, parallel, shard, ROWS[:2], recompute))


@pytest.mark.parametrize("lengths", [(100, 300), pytest.param((127, 129), marks=SLOW), (1, 40)])
def test_ranks_with_other_lengths_finish_with_the_gradients_of_one_process(two, lengths):
    check(two.run(compare, {"expert": 2}, 2, tuple((length, (length,)) for length in lengths)))


def test_passes_before_a_step_add_up(two):
    check(two.run(compare, {"expert": 2}, 2, ROWS))


@pytest.mark.parametrize(("expert", "shard"), [pytest.param(2, 1, marks=SLOW), pytest.param(4, 2, marks=SLOW), (2, 4)])
def test_four_ranks_have_the_gradients_of_one_process(four, expert, shard):
    check(four.run(compare, {"expert": expert}, shard, ROWS))


def rounded_once(shard):
    """Share of a bfloat16 model's bfloat16 gradients that is not the sum of the ranks' own, rounded once."""
    batches, whole = all_rows(ROWS)
    own, _ = over_ranks({}, 1, torch.bfloat16)
    backward(own, batches[dist.get_rank() :: 4], whole)
    model, mesh = over_ranks({}, shard, torch.bfloat16)
    backward(model, batches[dist.get_rank() :: 4], whole)
    sum_gradients(model, mesh)
    other = total = 0
    for mine, gradient in zip(own.parameters(), whole_gradients(model, mesh).values(), strict=True):
        if mine.grad is not None and mine.dtype == torch.bfloat16:
            exact = mine.grad.double()
            dist.all_reduce(exact)
            other, total = other + int((exact.to(gradient.dtype) != gradient).sum()), total + exact.numel()
    return other / total


@pytest.mark.parametrize("shard", [pytest.param(1, marks=SLOW), 2, pytest.param(4, marks=SLOW)])
def test_bfloat16_gradients_are_summed_in_float32(four, shard):
    assert max(four.run(rounded_once, shard)) < 0.01


def test_bfloat16_model_has_the_gradients_of_one_process(two):
    check(two.run(compare, {"expert": 2}, 2, ROWS[:2], dtype=torch.bfloat16), tolerance=5e-3, each=2e-2)


def widened():
    """Types of a bfloat16 model's gradients after two passes and a step, whether their sum is rounded to bfloat16, and
    how far it is from one process'."""
    batches, whole = all_rows(ROWS)
    one = stirred(CONFIG, dtype=torch.bfloat16)
    model, mesh = over_ranks({}, 2, torch.bfloat16)
    for each in (one, model, model):  # again: nothing more
        widen_gradients(each)
    backward(one, batches, whole)
    backward(model, batches[dist.get_rank() :: 2], whole)
    sum_gradients(model, mesh)
    ours = whole_gradients(model, mesh)
    head, theirs = ours["head.weight"], one.head.weight.grad
    rounded = torch.equal(head, head.bfloat16().float())
    muon(model, mesh).step()
    dtypes = {str(gradient.dtype) for gradient in ours.values() if gradient is not None}
    return dtypes, rounded, float((head - theirs).norm() / theirs.norm())


def test_passes_of_a_bfloat16_model_add_up_in_float32(two):
    for dtypes, rounded, off in two.run(widened):
        assert dtypes == {"torch.float32"} and not rounded and off < 3e-3


def adamw(model, mesh=None):
    return torch.optim.AdamW(model.parameters(), lr=1e-3, foreach=False)


def muon(model, mesh=None):
    settings = TrainConfig(optimizer="muon", learning_rate=1e-3, muon_dtype="float32", state_profile="fp32")
    return build_optimizer(model, settings, mesh)


def steps(parallel, shard, optimizer, count):
    """Losses of a few steps, over ranks and in one process."""
    batches, whole = all_rows(ROWS[:2])
    model, mesh = over_ranks(parallel, shard)
    one = stirred(CONFIG)
    found, expected = [], []
    optimizers = [optimizer(model, mesh), optimizer(one)]
    for _ in range(count):
        found.append(of_all_ranks(backward(model, batches[dist.get_rank() :: 2], whole), mesh)["total"])
        sum_gradients(model, mesh)
        expected.append(backward(one, batches, whole)["total"])
        for each in optimizers:
            each.step()
            each.zero_grad()
    return found, expected


@pytest.mark.parametrize(
    ("parallel", "shard", "optimizer"),
    [({"expert": 2}, 2, adamw), ({"expert": 2}, 1, muon), pytest.param({}, 1, muon, marks=SLOW)],
)
def test_steps_have_the_losses_of_one_process(two, parallel, shard, optimizer):
    for found, expected in two.run(steps, parallel, shard, optimizer, 5):
        assert found == pytest.approx(expected, rel=1e-5) and expected[-1] < expected[0]


def norms(expert, shard):
    """Global norm of all gradients, and of the two sites of a layer alone, over ranks and in one process."""
    batches, whole = all_rows(ROWS)
    model, mesh = over_ranks({"expert": expert}, shard)
    backward(model, batches[dist.get_rank() :: 4], whole)
    sum_gradients(model, mesh)
    found = [gradient_norm(model, mesh)]
    found += [gradient_norm(model, mesh, part.parameters()) for part in (model.layers[2].attn, model.layers[2].ffn)]
    _, gradients = one_process(ROWS, torch.float32)
    expected = []
    for start in ("", "layers.2.attn.", "layers.2.ffn."):
        named = [g for name, g in gradients.items() if name.startswith(start) and g is not None]
        expected.append(float(torch.cat([g.double().flatten() for g in named]).norm()))
    return [float(norm) for norm in found], expected


@pytest.mark.parametrize(("expert", "shard"), [(2, 2), pytest.param(4, 1, marks=SLOW)])
def test_norm_counts_every_number_once(four, expert, shard):
    answers = four.run(norms, expert, shard)
    for found, expected in answers:
        assert found == pytest.approx(expected, rel=1e-6) and found == answers[0][0]


def some_gradients_are_missing():
    """Rank 1 alone has a gradient of the embedding, nobody one of the head, every rank one of the norm."""
    model, mesh = over_ranks({}, 1)
    rank = dist.get_rank()
    if rank == 1:
        model.embed.weight.grad = torch.full_like(model.embed.weight, 3.0)
    model.norm.weight.grad = torch.full_like(model.norm.weight, rank + 1.0)
    sum_gradients(model, mesh)
    embed, norm = (parameter.grad for parameter in (model.embed.weight, model.norm.weight))
    return embed.unique().tolist(), norm.unique().tolist(), model.head.weight.grad


def test_a_gradient_that_one_rank_has_is_had_by_all(two):
    assert two.run(some_gradients_are_missing) == [([3.0], [3.0], None)] * 2


def evaluated():
    """Loss of a pass without gradients, then a step: both as in one process; whether weights lie in parts between."""
    batches, whole = all_rows(ROWS[:2])
    model, mesh = over_ranks({}, 2)
    with torch.no_grad():
        losses = objective(model, batches[dist.get_rank()], WEIGHTS, whole)
    model.reshard()
    parted = isinstance(model.embed.weight, DTensor)
    found = [of_all_ranks({"total": float(losses.total)}, mesh)["total"]]
    found.append(of_all_ranks(backward(model, batches[dist.get_rank() :: 2], whole), mesh)["total"])
    return parted, found, one_process(ROWS[:2], torch.float32)[0]["total"]


def test_a_pass_without_gradients_goes_before_a_step(two):
    for parted, found, expected in two.run(evaluated):
        assert parted and found == pytest.approx([expected] * 2, rel=1e-5)


def held(expert):
    model, _ = over_ranks({"expert": expert}, 1)
    whole = stirred(CONFIG).state_dict()
    ours = model.state_dict()
    first = "layers.0.ffn.experts.w13"
    per_rank = CONFIG.n_routed_experts // expert
    start = dist.get_rank() % expert * per_rank
    assert list(ours) == list(whole)
    assert torch.equal(ours[first], whole[first][start : start + per_rank])
    return {name.rpartition(".")[2] for name in ours if ours[name].shape != whole[name].shape}


def test_each_rank_holds_its_slice_of_the_experts_under_the_same_names(four):
    assert four.run(held, 4) == [{"w13", "w2"}] * 4
    assert four.run(held, 2) == [{"w13", "w2"}] * 4


def numbers_held(parallel, shard):
    """Numbers of experts, and of the other matrices and rows that lie in parts, on this rank, as shares of all."""
    model, _ = over_ranks(parallel, shard)
    sizes = {name: parameter.numel() for name, parameter in stirred(CONFIG).named_parameters()}
    experts = [name for name in sizes if ".experts." in name]
    others = [name for name, p in model.named_parameters() if isinstance(p, DTensor) and name not in experts]
    return [
        sum(part(model.get_parameter(name)).numel() for name in names) / sum(sizes[name] for name in names)
        for names in (experts, others)
    ]


def test_no_rank_holds_more_experts_than_its_part(four):
    assert four.run(numbers_held, {"expert": 2}, 4) == [[1 / 4, 1 / 4]] * 4
    assert four.run(numbers_held, {}, 2) == [[1 / 4, 1 / 2]] * 4
    assert four.run(numbers_held, {"expert": 4}, 2) == [[1 / 4, 1 / 2]] * 4
