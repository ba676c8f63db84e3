"""Router: which experts, with which weights, and gradients where scores underflow."""

from __future__ import annotations

import pytest
import torch

from tests.ops import naive
from tests.ops.compare import Draw, check, gradients, relative
from undertow.ops.reference.router import route, sqrt_softplus, stable_topk

SCALE = 1.5


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32])
@pytest.mark.parametrize("scale", [1.0, 6.0])
@pytest.mark.parametrize("bias", [False, True])
@pytest.mark.parametrize(("tokens", "experts", "k"), [(9, 16, 6), (1, 4, 4), (20, 3, 1)])
def test_route(tokens, experts, k, bias, scale, dtype):
    """Weights and scores, and their gradients together: the balance loss differentiates the scores."""
    draw = Draw(tokens, experts, scale)
    logits = draw.normal(tokens, experts, dtype=dtype, scale=scale).clamp(max=19.0)
    b = draw.normal(experts, dtype=torch.float32) if bias else None
    indices = route(logits, b, k, SCALE)[0]
    assert indices.tolist() == naive.route(logits.double(), b, k, SCALE)[0].tolist()
    check(
        lambda x: route(x, b, k, SCALE)[1:],
        lambda x: naive.route(x, None, k, SCALE, chosen=indices)[1:],
        [logits],
        1e-12 if dtype == torch.float64 else 3e-6,
    )


def test_types_and_shapes():
    indices, weights, scores = route(Draw("types").normal(5, 8, dtype=torch.bfloat16), None, 2, SCALE)
    assert (indices.dtype, weights.dtype, scores.dtype) == (torch.int64, torch.float32, torch.float32)
    assert (indices.shape, weights.shape, scores.shape) == ((5, 2), (5, 2), (5, 8))
    assert [len(x) for x in route(torch.zeros(0, 8), torch.zeros(8), 2, SCALE)] == [0, 0, 0]


@pytest.mark.parametrize("bias", [None, 0.0, 3.0])
def test_weights_sum_to_the_scale_and_experts_are_distinct(bias):
    draw = Draw("sum")
    logits = draw.normal(200, 16, scale=20.0)
    indices, weights, _ = route(logits, None if bias is None else bias * draw.normal(16), 6, 2.5)
    torch.testing.assert_close(weights.sum(-1), torch.full((200,), 2.5))
    assert all(len(set(row)) == 6 for row in indices.tolist())


def test_bias_moves_the_choice_only():
    logits = torch.tensor([[3.0, 2.0, 1.0, 0.0]])
    bias = torch.tensor([0.0, 0.0, 0.0, 50.0])
    indices, weights, scores = route(logits, bias, 2, SCALE)
    assert indices.tolist() == [[3, 0]]
    want = naive.route(logits, None, 2, SCALE, chosen=indices)[1]
    torch.testing.assert_close(weights, want)
    torch.testing.assert_close(scores, route(logits, None, 2, SCALE)[2])


def test_given_choice_is_kept_in_its_order():
    """Hash layers and replay: the choice is taken as it stands, the weights come from today's scores."""
    logits = Draw("hash").normal(4, 6).requires_grad_()
    chosen = torch.tensor([[5, 0], [0, 5], [2, 3], [3, 2]])
    indices, weights, _ = route(logits, None, 2, SCALE, chosen)
    assert indices.tolist() == chosen.tolist()
    torch.testing.assert_close(weights, naive.route(logits, None, 2, SCALE, chosen)[1])
    (grad,) = gradients(weights, [logits])
    assert (grad != 0).tolist() == [[e in row for e in range(6)] for row in chosen.tolist()]


def test_ties_go_to_the_lowest_expert():
    assert route(torch.zeros(2, 8), None, 3, SCALE)[0].tolist() == [[0, 1, 2]] * 2
    logits = torch.tensor([[0.0, 1.0, 1.0, 0.0, 1.0, 0.0]])
    assert route(logits, None, 5, SCALE)[0].tolist() == [[1, 2, 4, 0, 3]]
    assert stable_topk(torch.zeros(2, 3000), 3000).tolist() == [list(range(3000))] * 2
    assert stable_topk(torch.tensor([1.0, 2.0, 2.0, 1.0]), 10).tolist() == [1, 2, 0, 3]


@pytest.mark.parametrize("logit", [-60.0, -88.0, -90.0, -91.0, -93.0, -100.0])
def test_small_scores_are_exact(logit):
    """Close to float32's end weights still sum to the scale and gradients are those of float64."""
    logits = (logit + 0.5 * Draw(logit).normal(4, 3)).requires_grad_()
    exact = logits.detach().double().requires_grad_()
    _, weights, _ = route(logits, None, 3, SCALE)
    want = naive.route(exact, None, 3, SCALE, chosen=torch.arange(3).expand(4, -1))[1]
    order = route(logits, None, 3, SCALE)[0]
    upstream = Draw("up").normal(4, 3)
    (grad,) = gradients(weights, [logits], [upstream])
    (grad_want,) = gradients(want.gather(1, order), [exact], [upstream.double()])
    tolerance = 1e-5 if logit > -89 else 2e-2  # subnormal softplus has few digits
    torch.testing.assert_close(weights.sum(-1), torch.full((4,), SCALE))
    assert relative(weights, want.gather(1, order)) < tolerance
    assert relative(grad, grad_want) < tolerance


@pytest.mark.parametrize("logits", [[-200.0] * 4, [-1e4] * 4, [-200.0, -200.0, 3.0, -95.0], [1e4, -1e4, 0.0, 30.0]])
def test_extreme_logits_are_finite_forward_and_backward(logits):
    x = torch.tensor([logits]).requires_grad_()
    _, weights, scores = route(x, torch.zeros(4), 2, SCALE)
    grads = gradients([weights, scores], [x], [1e6 * Draw("up").normal(1, 2), torch.ones(1, 4)])
    assert all(torch.isfinite(t).all() for t in (weights, scores, *grads))
    assert weights.sum().item() in (0.0, pytest.approx(SCALE))


@pytest.mark.parametrize("x", [-30.0, -1.0, 0.0, 5.0, 19.99, 20.01, 50.0, 1e4])
def test_sqrt_softplus(x):
    value = torch.tensor(x, dtype=torch.float64, requires_grad=True)
    exact = value.detach().clone().requires_grad_()
    out, want = sqrt_softplus(value), torch.nn.functional.softplus(exact).sqrt()
    assert relative(out, want) < 1e-14
    assert relative(torch.autograd.grad(out, value)[0], torch.autograd.grad(want, exact)[0]) < 1e-8


def test_gradcheck():
    logits = Draw("gradcheck").normal(3, 5, dtype=torch.float64, scale=3.0).requires_grad_()
    chosen = torch.tensor([[0, 3], [4, 1], [2, 0]])
    assert torch.autograd.gradcheck(lambda x: route(x, None, 2, SCALE, chosen)[1:], (logits,))
