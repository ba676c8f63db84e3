"""Products of experts: a row has the same bits whatever the other rows are, and however many of them its expert has."""

import random

import pytest
import torch

from tests.ops.compare import Draw
from undertow.ops.registry import Machine, choose, function
from undertow.ops.triton.grouped.linear import grouped_linear

EXPERTS, OUT, DEPTH = 5, 48, 144
COUNTS = (70, 0, 3, 130, 1)


@pytest.fixture(autouse=True)
def poisoned(monkeypatch):
    """What is read without having been written shows."""
    made = torch.empty

    def empty(*shape, **options):
        x = made(*shape, **options)
        return x.fill_(float("nan") if x.is_floating_point() else 1 << 29)

    monkeypatch.setattr(torch, "empty", empty)
    monkeypatch.setattr(torch, "empty_like", lambda x: empty(x.shape, dtype=x.dtype, device=x.device))


@pytest.fixture(scope="module")
def call(device):
    """Rows, their experts, weights and upstream gradients, and what the products of all of them are."""
    draw, rows = Draw("grouped"), sum(COUNTS)
    x, weight, grad = (
        draw.normal(*shape).bfloat16().to(device) for shape in ((rows, DEPTH), (EXPERTS, OUT, DEPTH), (rows, OUT))
    )
    expert = torch.repeat_interleave(torch.arange(EXPERTS), torch.tensor(COUNTS)).to(device)
    return (x, expert, weight, grad), products(x, expert, weight, grad)


def products(x, expert, weight, grad):
    """Of rows in any order: results and gradients of rows, in that order."""
    order = torch.argsort(expert, stable=True)
    counts = torch.bincount(expert, minlength=EXPERTS)
    rows = x[order].requires_grad_()
    y = grouped_linear(rows, weight, counts, invariant=True)
    (grad_rows,) = torch.autograd.grad(y, rows, grad[order])
    back = torch.argsort(order)
    return y.detach()[back], grad_rows[back]


@pytest.mark.parametrize("seed", range(6))
def test_any_choice_of_rows(seed, call):
    (x, expert, weight, grad), whole = call
    chosen = torch.randperm(len(x), generator=torch.Generator().manual_seed(seed))
    chosen = chosen[: random.Random(seed).choice((1, 2, 40, len(x)))].to(x.device)
    found = products(x[chosen], expert[chosen], weight, grad[chosen])
    assert all(torch.equal(mine, all_of[chosen]) for mine, all_of in zip(found, whole, strict=True))


@pytest.mark.filterwarnings("ignore:invalid value")
def test_rows_that_are_not_numbers_stay_alone(call):
    (x, expert, weight, grad), whole = call
    others, hurt = torch.full_like(x[:90], torch.nan), torch.arange(90, device=x.device) % EXPERTS
    both = torch.cat([others, x]), torch.cat([hurt, expert]), weight, torch.cat([grad[:90] * torch.inf, grad])
    assert all(torch.equal(mine[90:], all_of) for mine, all_of in zip(products(*both), whole, strict=True))


def test_the_registry_takes_them_for_a_fixed_order(call):
    (x, expert, weight, _), whole = call
    op = function(choose("grouped_linear", Machine("cuda", "sm_90"), invariant=True), True)
    assert torch.equal(op(x, weight, torch.bincount(expert, minlength=EXPERTS)), whole[0])
