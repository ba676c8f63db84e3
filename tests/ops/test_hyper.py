"""Hyper-connections: coefficients, collapse, expand and the Sinkhorn iteration."""

from __future__ import annotations

import pytest
import torch

from tests.ops import naive
from tests.ops.compare import DTYPES, Draw, check, gradients, island, relative
from undertow.ops.reference.hyper import (
    hyper_coefficients,
    hyper_collapse,
    hyper_expand,
    hyper_head,
    hyper_in,
    sinkhorn,
)

EPS = 1e-6


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32])
@pytest.mark.parametrize(("n", "iterations"), [(4, 20), (4, 1), (3, 2), (2, 20), (1, 3)])
def test_sinkhorn(n, iterations, dtype):
    logits = Draw(n, iterations).normal(9, n, n, dtype=dtype, scale=2.0)
    check(lambda x: sinkhorn(x, iterations, EPS), lambda x: naive.sinkhorn(x, iterations, EPS), [logits])


@pytest.mark.parametrize("eps", [1e-6, 3e-3])
def test_sinkhorn_gradcheck(eps):
    logits = Draw("gradcheck").normal(2, 4, 4, dtype=torch.float64).requires_grad_()
    assert torch.autograd.gradcheck(lambda x: sinkhorn(x, 20, eps), (logits,))


def test_iterations_and_their_order():
    """Far from convergence each step leaves its mark, and the last one is over columns."""
    logits = Draw("order").normal(3, 4, 4, dtype=torch.float64, scale=8.0)
    want = naive.sinkhorn(logits, 4, EPS)
    assert relative(sinkhorn(logits, 4, EPS), want) < 1e-12
    assert relative(sinkhorn(logits, 3, EPS), want) > 1e-3
    assert relative(sinkhorn(logits, 5, EPS), want) > 1e-3
    assert relative(sinkhorn(logits.transpose(1, 2), 4, EPS).transpose(1, 2), want) > 1e-3
    assert (sinkhorn(logits, 4, EPS).sum(1) - 1).abs().max() < 1e-5
    assert (sinkhorn(logits, 4, EPS).sum(2) - 1).abs().max() > 1e-3


@pytest.mark.parametrize("scale", [0.0, 0.5, 1.5])
def test_doubly_stochastic(scale):
    m = sinkhorn(Draw(scale).normal(50, 4, 4, scale=scale), 20, EPS)
    assert m.dtype == torch.float32
    assert (m > 0).all()
    torch.testing.assert_close(m.sum(1), torch.ones(50, 4), atol=1e-5, rtol=0)
    torch.testing.assert_close(m.sum(2), torch.ones(50, 4), atol=1e-2 if scale > 1 else 1e-4, rtol=0)


def test_bfloat16_logits_give_float32_matrices():
    logits = Draw("bf16").normal(5, 4, 4, dtype=torch.bfloat16).requires_grad_()
    m = sinkhorn(logits, 20, EPS)
    assert m.dtype == torch.float32
    assert relative(m, naive.sinkhorn(logits.double(), 20, EPS)) < 3e-6
    assert gradients(m, [logits])[0].dtype == torch.bfloat16


def saturated() -> torch.Tensor:
    """Logits of +-1e4: a permutation, a constant, one dominant row, one dominant column, a sign pattern."""
    eye = torch.eye(4)
    row, column = torch.zeros(4, 4), torch.zeros(4, 4)
    row[1], column[:, 2] = 1.0, 1.0
    signs = Draw("signs").normal(4, 4).sign()
    permuted = eye[[2, 0, 3, 1]]
    return 1e4 * torch.stack([2 * permuted - 1, torch.ones(4, 4), 2 * row - 1, 2 * column - 1, signs])


@pytest.mark.parametrize("size", [1.0, 1e6])
def test_saturated_logits_are_finite_forward_and_backward(size):
    logits = saturated().requires_grad_()
    m = sinkhorn(logits, 20, EPS)
    (grad,) = gradients(m, [logits], [size * Draw("up").normal(*m.shape)])
    assert torch.isfinite(m).all()
    assert torch.isfinite(grad).all()
    assert relative(m, naive.sinkhorn(logits.detach().double(), 20, EPS)) < 1e-5
    assert torch.allclose(m[0], torch.eye(4)[[2, 0, 3, 1]], atol=1e-4)


@pytest.mark.parametrize("scale", [0.5, 3.0, 8.0])
def test_large_upstream_gradients_in_float32(scale):
    logits = Draw("large", scale).normal(60, 4, 4, scale=scale).requires_grad_()
    exact = logits.detach().double().requires_grad_()
    upstream = 1e6 * Draw("up", scale).normal(60, 4, 4)
    (got,) = gradients(sinkhorn(logits, 20, EPS), [logits], [upstream])
    (want,) = gradients(naive.sinkhorn(exact, 20, EPS), [exact], [upstream.double()])
    assert torch.isfinite(got).all()
    assert relative(got, want) < 1e-4


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("n", [1, 2, 4])
def test_coefficients(n, dtype):
    draw = Draw(n, dtype)
    logits = draw.normal(8, (2 + n) * n, dtype=dtype)
    scale, base = (draw.normal(size, dtype=island(dtype)) for size in (3, (2 + n) * n))
    check(
        lambda *x: hyper_coefficients(*x, 20, EPS),
        lambda *x: naive.hyper_coefficients(*x, n, 20, EPS),
        [logits, scale, base],
        tolerance=1e-11 if dtype == torch.float64 else 4e-3 if dtype == torch.bfloat16 else 1e-5,
    )


def test_coefficients_have_the_right_ends():
    """Only `pre` carries the eps; `post` reaches 2, `pre` 1."""
    logits = torch.cat([torch.full((1, 4), -1e4), torch.full((1, 4), -1e4), torch.zeros(1, 16)], 1)
    pre, post, mix = hyper_coefficients(logits, torch.ones(3), torch.zeros(24), 20, EPS)
    assert torch.equal(pre, torch.full((1, 4), EPS))
    assert torch.equal(post, torch.zeros(1, 4))
    torch.testing.assert_close(mix, torch.full((1, 4, 4), 0.25), atol=1e-5, rtol=0)
    pre, post, _ = hyper_coefficients(-logits, torch.ones(3), torch.zeros(24), 20, EPS)
    assert torch.equal(pre, torch.full((1, 4), 1 + EPS))
    assert torch.equal(post, torch.full((1, 4), 2.0))


@pytest.mark.parametrize("size", [90.0, 1e4])
def test_extreme_coefficients_are_finite_forward_and_backward(size):
    draw = Draw("extreme", size)
    leaves = [draw.normal(6, 24).sign().requires_grad_(), (size * draw.normal(3).sign()).requires_grad_()]
    leaves.append((size * draw.normal(24).sign()).requires_grad_())
    outputs = hyper_coefficients(*leaves, 20, EPS)
    grads = gradients(outputs, leaves, [torch.full_like(o, 1e6) for o in outputs])
    assert all(torch.isfinite(x).all() for x in (*outputs, *grads))


def test_coefficients_are_float32_for_a_bfloat16_model():
    logits = Draw("type").normal(3, 24, dtype=torch.bfloat16)
    outputs = hyper_coefficients(logits, torch.ones(3), torch.zeros(24), 20, EPS)
    assert [x.dtype for x in outputs] == [torch.float32] * 3


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(("tokens", "n", "d"), [(1, 4, 24), (6, 4, 30), (5, 1, 7), (9, 3, 100)])
def test_collapse_and_expand(tokens, n, d, dtype):
    draw = Draw(tokens, n, d)
    streams, y = draw.normal(tokens, n, d, dtype=dtype), draw.normal(tokens, d, dtype=dtype)
    pre, post = (draw.normal(tokens, n, dtype=island(dtype)) for _ in range(2))
    mix = draw.normal(tokens, n, n, dtype=island(dtype))
    check(hyper_collapse, naive.hyper_collapse, [streams, pre])
    check(hyper_expand, naive.hyper_expand, [y, post, mix, streams])


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("n", [2, 3, 4])
def test_what_a_sub_layer_reads(n, dtype):
    draw, rows, d = Draw("in", n, dtype), (2 + n) * n, 20
    operands = [draw.normal(6, n, d, dtype=dtype), draw.normal(rows, n * d, dtype=island(dtype), scale=0.1)]
    operands += [draw.normal(size, dtype=island(dtype)) for size in (3, rows)] + [draw.normal(d, dtype=dtype)]
    tolerance = {torch.float64: 1e-11, torch.float32: 2e-5, torch.bfloat16: 1e-2}[dtype]
    check(lambda *x: hyper_in(*x, 1e-6, 20, EPS), lambda *x: naive.hyper_in(*x, 1e-6, 20, EPS), operands, tolerance)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("n", [2, 3, 4])
def test_what_the_head_reads(n, dtype):
    draw, d = Draw("head", n, dtype), 20
    operands = [draw.normal(6, n, d, dtype=dtype), draw.normal(n, n * d, dtype=island(dtype), scale=0.1)]
    operands += [draw.normal(size, dtype=island(dtype)) for size in (1, n)] + [draw.normal(d, dtype=dtype)]
    tolerance = {torch.float64: 1e-11, torch.float32: 2e-5, torch.bfloat16: 1e-2}[dtype]
    check(lambda *x: hyper_head(*x, 1e-6, EPS), lambda *x: naive.hyper_head(*x, 1e-6, EPS), operands, tolerance)


def test_streams_that_are_read_come_back():
    draw = Draw("back")
    streams = draw.normal(3, 2, 5)
    found = hyper_in(streams, draw.normal(8, 10), torch.ones(3), torch.zeros(8), torch.ones(5), 1e-6, 2, EPS)
    assert found[3] is streams


def test_expand_sums_over_the_first_stream_axis():
    """Stream 2 flows into stream 0 through `mix[2, 0]`; the transposed matrix gives another result."""
    streams = torch.zeros(1, 4, 3)
    streams[0, 2] = 1.0
    mix = torch.zeros(1, 4, 4)
    mix[0, 2, 0] = 5.0
    out = hyper_expand(torch.zeros(1, 3), torch.zeros(1, 4), mix, streams)
    assert out[0, :, 0].tolist() == [5.0, 0.0, 0.0, 0.0]
    draw = Draw("axes")
    streams, y, post = draw.normal(5, 4, 6), draw.normal(5, 6), draw.normal(5, 4)
    mix = sinkhorn(draw.normal(5, 4, 4, scale=3.0), 20, EPS)
    swapped = naive.hyper_expand(y, post, mix.transpose(1, 2), streams)
    assert relative(hyper_expand(y, post, mix, streams), swapped) > 0.05


def test_streams_are_mixed_in_float32():
    """Small parts of large sums survive a bfloat16 stream type."""
    streams = torch.tensor([[[256.0], [-256.0], [1.0]]], dtype=torch.bfloat16)
    ones = torch.ones(1, 3)
    assert hyper_collapse(streams, torch.tensor([[1.0, 1.0, 0.0078125]])).item() == 0.0078125
    out = hyper_expand(torch.zeros(1, 1, dtype=torch.bfloat16), ones, torch.ones(1, 3, 3), streams)
    assert out.flatten().tolist() == [1.0, 1.0, 1.0]


def test_no_tokens():
    streams, y = torch.zeros(0, 4, 6, requires_grad=True), torch.zeros(0, 6)
    pre, post, mix = hyper_coefficients(torch.zeros(0, 24), torch.ones(3), torch.zeros(24), 20, EPS)
    assert (pre.shape, post.shape, mix.shape) == ((0, 4), (0, 4), (0, 4, 4))
    assert hyper_collapse(streams, pre).shape == (0, 6)
    out = hyper_expand(y, post, mix, streams)
    assert out.shape == gradients(out, [streams])[0].shape == (0, 4, 6)
