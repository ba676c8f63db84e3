"""The router's kernels: the reference's choice of their own scores, weights and gradients against float64."""

import pytest
import torch

from tests.ops import naive
from tests.ops.compare import Draw, relative
from undertow.ops.reference import router as reference
from undertow.ops.triton.router import route as module
from undertow.ops.triton.router.route import refusal, route

SCALE = 1.5
CASES = [(3, 256, 6), (2, 384, 6), (9, 20, 3), (1, 8, 8), (1, 1000, 16), (3, 1, 1), (5, 33, 2)]


@pytest.fixture(autouse=True)
def poisoned(monkeypatch):
    """What is read without having been written shows."""

    def empty(size, dtype, device):
        return torch.full(size, float("nan") if dtype.is_floating_point else 1 << 30, dtype=dtype, device=device)

    monkeypatch.setattr(module.torch, "empty", empty)


def check(logits, bias, k, device, chosen=None):
    """Scores to 2 units in the last place, the exact choice of those, weights and gradients to 1e-5."""
    x = logits.to(device).requires_grad_()
    on = [None if t is None else t.to(device) for t in (bias, chosen)]
    indices, weights, scores = route(x, on[0], k, SCALE, on[1])
    exact = logits.double().requires_grad_()
    want = reference.sqrt_softplus(exact)
    assert ((scores.cpu().double() - want).abs() <= 2.4e-7 * want).all()
    if chosen is None:
        selection = scores.detach() if bias is None else scores.detach() + on[0]
        assert torch.equal(indices, reference.stable_topk(selection, k))
        assert indices.dtype == torch.int64 and not indices.requires_grad
    else:
        assert indices is on[1]
    picked = want.gather(1, indices.cpu())
    share = picked / picked.sum(1, keepdim=True) * SCALE
    assert relative(weights.cpu(), share) <= 1e-6
    draw = Draw("up", logits.shape)
    upstream = [draw.normal(*share.shape), draw.normal(*want.shape)]
    for parts in ((0,), (1,), (0, 1)):
        got = torch.autograd.grad(
            [(weights, scores)[i] for i in parts], x, [upstream[i].to(device) for i in parts], retain_graph=True
        )[0]
        due = torch.autograd.grad(
            [(share, want)[i] for i in parts], exact, [upstream[i].double() for i in parts], retain_graph=True
        )[0]
        assert got.dtype == torch.float32
        if parts == (0,) and k == 1:  # a lone weight is the scale, whatever its score
            assert got.abs().max() <= 1e-6
        else:
            assert relative(got.cpu(), due) <= 1e-5, parts


@pytest.mark.parametrize("biased", [False, True])
@pytest.mark.parametrize(("tokens", "experts", "k"), CASES)
def test_values_and_gradients(tokens, experts, k, biased, device):
    draw = Draw(tokens, experts, k)
    logits = draw.normal(tokens, experts, scale=4.0)
    check(logits, draw.normal(experts) if biased else None, k, device)


def test_several_tokens_of_a_program(device, monkeypatch):
    shipped = module.tiles
    monkeypatch.setattr(module, "tiles", lambda *args: {**shipped(*args), "ROWS": 4})
    check(Draw("rows").normal(6, 40, scale=4.0), Draw("bias").normal(40), 6, device)
    check(Draw("rows").normal(5, 20), None, 4, device, Draw("given").integers(20, 5, 4))


@pytest.mark.parametrize("tokens", [1, 6])
def test_given_choices(tokens, device):
    draw = Draw("given", tokens)
    chosen = draw.integers(20, tokens, 4)
    chosen[0, 1:3] = chosen[0, 0]  # one expert several times
    check(draw.normal(tokens, 20), None, 4, device, chosen)
    check(draw.normal(tokens, 20), draw.normal(20), 4, device, chosen.t().contiguous().t())


def test_equal_scores_go_to_the_lowest_expert(device):
    draw = Draw("ties")
    logits = (draw.normal(9, 64) * 2).round() / 2
    logits[0], logits[1] = 0.0, -500.0
    assert route(logits.to(device), None, 7, SCALE)[0].tolist() == reference.route(logits, None, 7, SCALE)[0].tolist()
    bias = -route(logits[:1].to(device), None, 1, SCALE)[2][0]
    bias[::3] *= -0.0  # sums of 0.0 and -0.0 beside the others
    check(logits[:1], bias.cpu(), 7, device)


def test_a_bias_moves_the_choice_and_not_the_weights(device):
    logits = torch.zeros(2, 12)
    bias = torch.arange(12.0)
    indices, weights, _ = route(logits.to(device), bias.to(device), 3, SCALE)
    assert indices.tolist() == [[11, 10, 9]] * 2
    torch.testing.assert_close(weights.cpu(), torch.full((2, 3), SCALE / 3))


def test_biases_of_any_size_choose_each_expert_once(device):
    bias = torch.tensor([-torch.inf, torch.inf, 3e38, -3e38, 0.0, torch.nan])
    indices = route(torch.zeros(1, 6, device=device), bias.to(device), 6, SCALE)[0]
    assert indices.tolist() == [[5, 1, 2, 4, 3, 0]]


@pytest.mark.parametrize("logit", [-60.0, -87.2, -90.0, -93.0, -100.0])
def test_small_scores(logit, device):
    """As the reference's own test: weights sum to the scale, and are those of float64 as far as there are digits."""
    logits = logit + 0.5 * Draw(logit).normal(4, 3)
    x = logits.to(device).requires_grad_()
    order, weights, scores = route(x, None, 3, SCALE)
    # Softplus to 2 units in the last place, which is 2^-149 where numbers are not normal.
    due = torch.nn.functional.softplus(logits.double())
    assert ((scores.cpu().double().square() - due).abs() <= 1.01 * 2.0**-149 + 4.8e-7 * due).all()
    assert order.tolist() == reference.stable_topk(scores, 3).tolist()
    exact = logits.double().requires_grad_()
    want = naive.route(exact, None, 3, SCALE, chosen=torch.arange(3).expand(4, -1))[1].gather(1, order.cpu())
    upstream = Draw("up").normal(4, 3)
    (grad,) = torch.autograd.grad(weights, x, upstream.to(device))
    (grad_want,) = torch.autograd.grad(want, exact, upstream.double())
    tolerance = 1e-5 if logit > -87 else 2e-2
    torch.testing.assert_close(weights.sum(-1).cpu(), torch.full((4,), SCALE))
    assert relative(weights.cpu(), want) < tolerance and relative(grad.cpu(), grad_want) < tolerance


@pytest.mark.parametrize("logits", [[-200.0] * 4, [-1e38] * 4, [-200.0, -200.0, 3.0, -95.0], [3e38, -1e4, 0.0, 30.0]])
def test_extreme_logits_are_finite_forward_and_backward(logits, device):
    x = torch.tensor([logits], device=device).requires_grad_()
    indices, weights, scores = route(x, torch.zeros(4, device=device), 2, SCALE)
    upstream = [1e6 * Draw("up").normal(1, 2).to(device), torch.ones(1, 4, device=device)]
    (grad,) = torch.autograd.grad([weights, scores], x, upstream)
    assert all(torch.isfinite(t).all() for t in (weights, scores, grad))
    assert weights.sum().item() in (0.0, pytest.approx(SCALE))
    assert indices.tolist() == reference.route(x.detach(), torch.zeros(4, device=device), 2, SCALE)[0].tolist()


@pytest.mark.parametrize("odd", [torch.nan, torch.inf])
def test_what_is_not_finite_is_so_in_all_that_the_reference_makes_of_it(odd, device):
    """A lone NaN or infinite logit that is chosen leaves no weight of its token a number, and none of 1e24."""
    logits = Draw("odd").normal(3, 6)
    logits[1, 4] = odd
    upstream = [torch.ones(3, 2), torch.ones(3, 6)]
    found, due = [], []
    for function, results, place in ((route, found, device), (reference.route, due, "cpu")):
        x = logits.to(place).requires_grad_()
        chosen, weights, scores = function(x, None, 2, SCALE)
        gradient = torch.autograd.grad([weights, scores], x, [each.to(place) for each in upstream])[0]
        results += [chosen.cpu(), weights.cpu(), scores.cpu(), gradient.cpu()]
    assert torch.equal(found[0], due[0]) and not due[1][1].isfinite().all()
    for mine, his in zip(found[1:], due[1:], strict=True):
        assert torch.equal(mine.isnan(), his.isnan())
        torch.testing.assert_close(mine, his, equal_nan=True)


def test_no_tokens_and_rows_that_do_not_lie_end_to_end(device):
    x = torch.zeros(0, 8, device=device, requires_grad=True)
    out = route(x, torch.zeros(8, device=device), 2, SCALE)
    assert [tuple(t.shape) for t in out] == [(0, 2), (0, 2), (0, 8)]
    assert torch.autograd.grad(out[2].sum(), x)[0].shape == (0, 8)
    wide = Draw("strides").normal(24, 10).to(device)
    whole = route(wide.t().contiguous(), None, 3, SCALE)
    assert all(map(torch.equal, route(wide.t(), None, 3, SCALE), whole))


def test_refusals():
    assert refusal(torch.zeros(3, 256), 6) is None
    assert refusal(torch.zeros(3, 1024), 16) is None
    assert "float64" in str(refusal(torch.zeros(3, 8, dtype=torch.float64), 2))
    assert refusal(torch.zeros(3, 1025), 2) == "1025 experts, more than 1024"
    assert refusal(torch.zeros(3, 256), 17) == "17 choices of 256 experts, not 1 to 16"
    assert refusal(torch.zeros(3, 4), 5) == "5 choices of 4 experts, not 1 to 4"
