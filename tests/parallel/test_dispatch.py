"""Experts over ranks against all experts in one process: results, gradients, bits, and ranks with nothing to send."""

from __future__ import annotations

import pytest
import torch
import torch.distributed as dist

from undertow.config.model import ModelConfig
from undertow.model.moe import Experts, dispatch_locally
from undertow.model.router import Routing, uniform_choices
from undertow.ops import Ops
from undertow.parallel.dispatch import AllToAll

CONFIG = ModelConfig.from_preset("v4-debug")
E, K, D = CONFIG.n_routed_experts, CONFIG.num_experts_per_tok, CONFIG.hidden_size


def choices(kind, tokens, generator):
    if kind == "one expert":  # all choices on the first rank: the others have no row
        return torch.tensor([0, 1]).repeat(tokens, 1)
    if kind == "uniform":
        return uniform_choices(tokens, K, E)
    return torch.rand(tokens, E, generator=generator).topk(K).indices


def stacks(dtype):
    experts = Experts(CONFIG, Ops()).to(dtype)
    generator = torch.Generator().manual_seed(1)
    with torch.no_grad():
        for parameter in experts.parameters():
            parameter.copy_(0.3 * torch.randn(parameter.shape, generator=generator, dtype=torch.float64))
    return experts


def passed(dispatch, experts, x, indices, weights, upstream):
    """Result and gradients of inputs, routing weights and both stacks."""
    x, weights = x.clone().requires_grad_(), weights.clone().requires_grad_()
    out = dispatch(x, Routing(indices, weights, weights), experts)
    (out * upstream).sum().backward()
    grads = [x.grad, weights.grad, experts.w13.grad, experts.w2.grad]
    experts.zero_grad()
    return [out.detach(), *grads]


def distance(a, b):
    assert a.shape == b.shape and a.dtype == b.dtype
    return float((a - b).double().norm() / b.double().norm().clamp(min=1e-30)) if b.numel() else 0.0


def compare(lengths, kind, dtype):
    """Largest relative distance to one process that has the tokens of all ranks end to end, and whether a second pass
    has the same bits."""
    rank, ranks = dist.get_rank(), dist.get_world_size()
    generator = torch.Generator().manual_seed(2)
    total = sum(lengths)
    x, upstream = torch.randn(2, total, D, generator=generator, dtype=torch.float64).to(dtype)
    indices = choices(kind, total, generator)
    wide = torch.float64 if dtype == torch.float64 else torch.float32
    weights = torch.rand(total, K, generator=generator, dtype=torch.float64).to(wide)
    whole = stacks(dtype)
    out, *grads, w13, w2 = passed(dispatch_locally, whole, x, indices, weights, upstream)
    mine = slice(sum(lengths[:rank]), sum(lengths[: rank + 1]))
    held = slice(rank * E // ranks, (rank + 1) * E // ranks)
    expected = [out[mine], *(grad[mine] for grad in grads), w13[held], w2[held]]
    local = stacks(dtype)
    local.w13, local.w2 = (torch.nn.Parameter(w.detach()[held].clone()) for w in (local.w13, local.w2))
    dispatch = AllToAll(dist.group.WORLD)
    first, second = (passed(dispatch, local, x[mine], indices[mine], weights[mine], upstream[mine]) for _ in range(2))
    same = all(torch.equal(a, b) for a, b in zip(first, second, strict=True))
    return max(distance(a, b) for a, b in zip(first, expected, strict=True)), same


CASES = [
    ((7, 7), "random"),
    ((100, 300), "random"),
    ((127, 129), "random"),
    ((0, 9), "random"),
    ((9, 0), "one expert"),
    ((1, 1), "random"),
    ((0, 0), "random"),
    ((16, 24), "uniform"),
]


@pytest.mark.parametrize(("dtype", "tolerance"), [(torch.float32, 1e-6), (torch.float64, 1e-12)])
@pytest.mark.parametrize(("lengths", "kind"), CASES)
def test_two_ranks_give_what_one_process_gives(two, lengths, kind, dtype, tolerance):
    for far, same in two.run(compare, lengths, kind, dtype):
        assert far <= tolerance and same


@pytest.mark.parametrize(
    ("lengths", "kind"),
    [((127, 128, 129, 1), "random"), ((0, 5, 0, 3), "one expert"), ((8, 8, 8, 8), "uniform")],
)
def test_four_ranks_give_what_one_process_gives(four, lengths, kind):
    for dtype, tolerance in ((torch.float32, 1e-6), (torch.float64, 1e-12)):
        for far, same in four.run(compare, lengths, kind, dtype):
            assert far <= tolerance and same


def bfloat16_rows():
    generator = torch.Generator().manual_seed(dist.get_rank())
    x = torch.randn(20, D, generator=generator).bfloat16()
    indices, weights = choices("random", 20, generator), torch.rand(20, K, generator=generator)
    whole, local = stacks(torch.bfloat16), stacks(torch.bfloat16)
    held = slice(dist.get_rank() * E // 2, (dist.get_rank() + 1) * E // 2)
    local.w13, local.w2 = (torch.nn.Parameter(w.detach()[held].clone()) for w in (local.w13, local.w2))
    upstream = torch.ones(20, D)
    ours = passed(AllToAll(dist.group.WORLD), local, x, indices, weights, upstream)[:3]
    one = passed(dispatch_locally, whole, x, indices, weights, upstream)[:3]
    return [str(t.dtype) for t in ours], max(distance(a, b) for a, b in zip(ours, one, strict=True))


def test_rows_travel_in_bfloat16_and_are_summed_in_float32(two):
    for dtypes, far in two.run(bfloat16_rows):
        assert dtypes == ["torch.float32", "torch.bfloat16", "torch.float32"] and far <= 1e-3


def counted(many):
    """Each rank has rows for expert `e` of rank `r` alone; counts beyond int32 are told apart."""
    rank, ranks = dist.get_rank(), dist.get_world_size()
    counts = torch.arange(2 * ranks) + 100 * rank + many
    return AllToAll(dist.group.WORLD).exchange_counts(counts).tolist()


def test_counts_are_told_in_int64(two):
    many = 2**40
    assert two.run(counted, many) == [
        [[many, many + 1], [many + 100, many + 101]],
        [[many + 2, many + 3], [many + 102, many + 103]],
    ]
