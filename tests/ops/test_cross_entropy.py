"""Linear layer with cross-entropy in chunks, against torch's own and against single rows."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from tests.ops import naive
from tests.ops.compare import DTYPES, Draw, check, gradients, island, relative
from undertow.ops.reference import cross_entropy
from undertow.ops.reference.cross_entropy import IGNORE, linear_cross_entropy, linear_cross_entropy_mean

MODES = pytest.mark.parametrize("invariant", [False, True])


def operands(rows: int, width: int, vocabulary: int, dtype: torch.dtype, ignored: int = 3) -> tuple:
    draw = Draw(rows, width, vocabulary)
    labels = draw.integers(vocabulary, rows)
    labels[draw.order(rows)[:ignored]] = IGNORE
    return draw.normal(rows, width, dtype=dtype), draw.normal(vocabulary, width, dtype=dtype), labels


@MODES
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("z_loss", [0.0, 1e-2])
@pytest.mark.parametrize(("rows", "width", "vocabulary"), [(1, 5, 7), (40, 24, 33), (75, 6, 100), (10, 3, 1)])
def test_per_row_losses_and_gradients(rows, width, vocabulary, z_loss, dtype, invariant):
    """`check` sends a different upstream gradient into every row."""
    hidden, weight, labels = operands(rows, width, vocabulary, dtype, ignored=rows // 4)
    check(
        lambda h, w: linear_cross_entropy(h, w, labels, z_loss, invariant=invariant),
        lambda h, w: naive.linear_cross_entropy(h, w, labels, z_loss),
        [hidden, weight],
        {torch.float64: 1e-12, torch.float32: 5e-6, torch.bfloat16: 4e-3}[dtype],
    )


@MODES
@pytest.mark.parametrize("elements", [1, 3000])
@pytest.mark.parametrize("rows", [31, 32, 33, 100])
def test_chunks(rows, elements, invariant, monkeypatch):
    """A vocabulary beyond the chunk's budget leaves chunks of the least size; the last one may be partial."""
    monkeypatch.setattr(cross_entropy, "_CHUNK_ELEMENTS", elements)
    hidden, weight, labels = operands(rows, 6, 40, torch.float64)
    check(
        lambda h, w: linear_cross_entropy(h, w, labels, 1e-2, invariant=invariant),
        lambda h, w: naive.linear_cross_entropy(h, w, labels, 1e-2),
        [hidden, weight],
    )


@MODES
def test_equals_torch(invariant):
    hidden, weight, labels = operands(50, 8, 60, torch.float64)
    leaves = [x.requires_grad_() for x in (hidden, weight)]
    twins = [x.detach().clone().requires_grad_() for x in (hidden, weight)]
    got, _ = linear_cross_entropy(*leaves, labels, invariant=invariant)
    want = torch.nn.functional.cross_entropy(twins[0] @ twins[1].t(), labels, reduction="none", ignore_index=IGNORE)
    assert relative(got, want) < 1e-13
    for g, w in zip(gradients(got.mean(), leaves), gradients(want.mean(), twins), strict=True):
        assert relative(g, w) < 1e-12


@MODES
@pytest.mark.parametrize("dtype", DTYPES)
def test_loss_type(dtype, invariant):
    for result in linear_cross_entropy(*operands(4, 3, 9, dtype), invariant=invariant):
        assert (result.dtype, result.shape) == (island(dtype), (4,))


@MODES
@pytest.mark.parametrize("z_loss", [0.0, 0.5])
def test_all_labels_ignored(z_loss, invariant):
    hidden, weight, labels = operands(35, 4, 20, torch.float32, ignored=35)
    leaves = [x.requires_grad_() for x in (hidden, weight)]
    loss, normaliser = linear_cross_entropy(*leaves, labels, z_loss, invariant=invariant)
    assert (loss == 0).all() and (normaliser == 0).all()
    assert all((g == 0).all() for g in gradients(loss, leaves))


@MODES
def test_no_rows(invariant):
    hidden, weight = torch.zeros(0, 4, requires_grad=True), torch.ones(9, 4, requires_grad=True)
    loss, _ = linear_cross_entropy(hidden, weight, torch.zeros(0, dtype=torch.int64), invariant=invariant)
    assert loss.shape == (0,)
    assert [g.shape for g in gradients(loss, [hidden, weight])] == [(0, 4), (9, 4)]


@MODES
def test_large_logits(invariant):
    hidden, weight, labels = operands(20, 4, 30, torch.float32)
    leaves = [(1e3 * hidden).requires_grad_(), weight.requires_grad_()]
    loss, _ = linear_cross_entropy(*leaves, labels, 1e-4, invariant=invariant)
    want, _ = naive.linear_cross_entropy(*(x.detach().double() for x in leaves), labels, 1e-4)
    assert relative(loss, want) < 1e-5
    assert all(torch.isfinite(g).all() for g in gradients(loss, leaves))


def test_the_plain_loss_is_what_the_z_loss_leaves():
    hidden, weight, labels = operands(9, 5, 11, torch.float64)
    weight.requires_grad_()
    loss, normaliser = linear_cross_entropy(hidden, weight, labels, 0.1)
    plain, same = linear_cross_entropy(hidden, weight, labels)
    assert not normaliser.requires_grad and torch.equal(normaliser, same)
    assert relative(loss - 0.1 * normaliser.square(), plain) < 1e-14


def test_negative_loss_is_the_log_probability():
    hidden, weight, labels = operands(6, 5, 11, torch.float64, ignored=0)
    logp = torch.log_softmax(hidden @ weight.t(), -1)[torch.arange(6), labels]
    assert relative(-linear_cross_entropy(hidden, weight, labels)[0], logp) < 1e-14


@MODES
def test_rows_with_zero_upstream_gradient_give_none(invariant):
    hidden, weight, labels = operands(40, 5, 11, torch.float64, ignored=0)
    leaves = [x.requires_grad_() for x in (hidden, weight)]
    upstream = torch.zeros(40, dtype=torch.float64)
    upstream[7] = 2.0
    loss, _ = linear_cross_entropy(*leaves, labels, 0.1, invariant=invariant)
    grad_hidden, _ = gradients(loss, leaves, [upstream])
    assert grad_hidden.abs().sum(1).nonzero().flatten().tolist() == [7]


@MODES
def test_gradcheck(invariant):
    hidden, weight, labels = operands(5, 3, 7, torch.float64, ignored=1)
    leaves = [x.requires_grad_() for x in (hidden, weight)]

    def loss(h: Tensor, w: Tensor) -> Tensor:
        return linear_cross_entropy(h, w, labels, 0.3, invariant=invariant)[0]

    assert torch.autograd.gradcheck(loss, leaves)


@MODES
def test_labels_outside_the_vocabulary_are_refused(invariant):
    with pytest.raises((RuntimeError, IndexError)):
        linear_cross_entropy(torch.ones(2, 3), torch.ones(4, 3), torch.tensor([0, 4]), invariant=invariant)


@MODES
@pytest.mark.parametrize("upstream", [1.0, 0.3])
def test_the_mean_is_the_sum_of_losses_over_a_count(upstream, invariant):
    hidden, weight, labels = operands(40, 5, 11, torch.float64)
    leaves = [x.requires_grad_() for x in (hidden, weight)]
    losses, same = linear_cross_entropy(*leaves, labels, 0.1, invariant=invariant)
    mean, normaliser = linear_cross_entropy_mean(*leaves, labels, 50, 0.1, upstream, invariant=invariant)
    assert torch.equal(mean, losses.sum() / 50) and torch.equal(normaliser, same) and not normaliser.requires_grad
    for g, w in zip(gradients(3.0 * mean, leaves), gradients(losses.sum() / 50 * 3.0, leaves), strict=True):
        assert torch.equal(g, w)
