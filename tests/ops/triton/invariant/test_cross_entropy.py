"""Log-probabilities of labels: a row has the same bits alone, in any cut, among others, and from either operator."""

import random
from itertools import pairwise

import pytest
import torch

from tests.ops.compare import Draw, relative
from undertow.ops.reference.cross_entropy import IGNORE
from undertow.ops.reference.cross_entropy import linear_cross_entropy as reference
from undertow.ops.triton.cross_entropy import linear as module
from undertow.ops.triton.cross_entropy.linear import linear_cross_entropy, linear_cross_entropy_mean
from undertow.ops.triton.invariant.linear import wide_linear

ROWS, WIDTH, VOCABULARY = 20, 36, 131


@pytest.fixture(autouse=True)
def small(monkeypatch):
    """Chunks that end within the rows; what is read without having been written shows."""
    given = {
        "rows": {"DEEP": 2, "LANES": 64, "STAGES": 1, "num_warps": 1},
        "scale": {"PROGRAMS": 3, "BLOCK": 64, "num_warps": 1},
        "chunk": {"LOGITS": 7, "GRADIENTS": 11},
    }
    monkeypatch.setattr(module, "tiles", lambda _, kernel: dict(given[kernel]))
    made = torch.empty
    monkeypatch.setattr(torch, "empty", lambda *shape, **options: made(*shape, **options).fill_(torch.nan))


@pytest.fixture(scope="module")
def call(device):
    draw = Draw("rows")
    hidden, weight = draw.normal(ROWS, WIDTH).bfloat16(), draw.normal(VOCABULARY, WIDTH).bfloat16()
    labels = draw.integers(VOCABULARY, ROWS)
    labels[::9] = IGNORE
    return hidden.to(device), weight.to(device), labels.to(device)


def losses(hidden, weight, labels):
    return torch.stack(linear_cross_entropy(hidden, weight, labels, 1e-3, invariant=True), 1)


def test_values_and_gradients(call):
    *leaves, labels = call
    mine, exact = ([x.to(kind).detach().requires_grad_() for x in leaves] for kind in (torch.bfloat16, torch.float64))
    grad = Draw("upstream").normal(ROWS).to(labels.device)
    got, want = linear_cross_entropy(*mine, labels, 1e-3, invariant=True), reference(*exact, labels, 1e-3)
    assert all(relative(a, b) <= 1e-5 for a, b in zip(got, want, strict=True))
    found, wanted = torch.autograd.grad(got[0], mine, grad), torch.autograd.grad(want[0], exact, grad.double())
    assert all(relative(a, b) <= 3e-3 for a, b in zip(found, wanted, strict=True))


@pytest.mark.parametrize("seed", range(3))
def test_rows_in_any_company(seed, call):
    hidden, weight, labels = call
    whole, draw = losses(hidden, weight, labels), random.Random(seed)
    cuts = sorted({0, ROWS, *(draw.randrange(ROWS) for _ in range(3))})
    for a, b in pairwise(cuts):
        assert torch.equal(losses(hidden[a:b], weight, labels[a:b]), whole[a:b])
    row = draw.randrange(ROWS)
    assert torch.equal(losses(hidden[row, None], weight, labels[row, None]), whole[row, None])
    order = Draw("order", seed).order(ROWS).to(hidden.device)
    assert torch.equal(losses(hidden[order], weight, labels[order]), whole[order])


def test_the_mean_has_the_same_rows(call):
    hidden, weight, labels = call
    leaves = [x.detach().requires_grad_() for x in (hidden, weight)]
    of_rows = losses(hidden, weight, labels)
    for operands in (leaves, (hidden, weight)):
        mean, normaliser = linear_cross_entropy_mean(*operands, labels, ROWS, 1e-3, invariant=True)
        assert torch.equal(normaliser, of_rows[:, 1])
        assert torch.equal(mean.detach(), of_rows[:, 0].sum() / ROWS)


def test_logits_are_those_of_the_head(call):
    """A sampler that has logits, and a trainer that has losses, start from the same bits."""
    hidden, weight, labels = call
    known, seen = labels >= 0, []
    rows, made = module.cross_entropy_rows, wide_linear(hidden, weight)

    class Watched:
        def __getitem__(self, grid):
            def launch(logits, *rest, **options):
                seen.append(logits.clone())
                rows[grid](logits, *rest, **options)

            return launch

    module.cross_entropy_rows = Watched()
    try:
        losses(hidden, weight, labels)
    finally:
        module.cross_entropy_rows = rows
    assert known.any() and torch.equal(torch.cat(seen), made)
