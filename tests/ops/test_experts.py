"""Routed experts: the order of a permuted batch, products per expert, the clamped SwiGLU, and the sum back."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from tests.ops import naive
from tests.ops.compare import DTYPES, Draw, check, gradients, island, relative
from undertow.ops.reference.experts import (
    dispatch_order,
    grouped_linear,
    permute,
    permute_weights,
    swiglu,
    tally,
    unpermute,
)

LIMIT = 10.0
COUNTS = [(1,), (0, 5, 0), (0, 0), (33, 1, 0, 40), (32, 64, 7)]


@given(tokens=st.integers(0, 30), k=st.integers(1, 4), experts=st.integers(4, 9), seed=st.integers(0, 999))
def test_dispatch_order(tokens, k, experts, seed):
    indices = Draw(seed).integers(experts, tokens, k)
    order = dispatch_order(indices, experts)
    flat = indices.flatten().tolist()
    assert order.choice.tolist() == sorted(range(len(flat)), key=lambda i: (flat[i], i))
    assert order.choice[order.slot].tolist() == list(range(len(flat)))
    assert order.counts.tolist() == [flat.count(e) for e in range(experts)]
    assert order.k == k


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(("tokens", "k"), [(7, 1), (1, 3), (20, 2)])
def test_permute_and_unpermute(tokens, k, dtype):
    draw = Draw(tokens, k)
    indices = draw.integers(5, tokens, k)
    order = dispatch_order(indices, 5)
    slots = sorted((e, t * k + i) for t, row in enumerate(indices.tolist()) for i, e in enumerate(row))
    x, rows = draw.normal(tokens, 6, dtype=dtype), draw.normal(tokens * k, 6, dtype=dtype)
    check(lambda x: permute(x, order), lambda x: torch.stack([x[choice // k] for _, choice in slots]), [x])

    def summed(rows):
        where = {choice: slot for slot, (_, choice) in enumerate(slots)}
        return torch.stack([sum(rows[where[t * k + i]] for i in range(k)) for t in range(tokens)])

    check(lambda r: unpermute(r, order), summed, [rows])
    assert unpermute(rows, order).dtype == island(dtype)
    assert permute(x, order).dtype == dtype
    weights = draw.normal(tokens, k, dtype=dtype)
    check(lambda w: permute_weights(w, order), lambda w: torch.stack([w.view(-1)[c] for _, c in slots]), [weights])


def test_tally():
    assert tally(torch.tensor([3, 0, 3]), 5).tolist() == [1, 0, 0, 2, 0]
    assert tally(torch.zeros(0, dtype=torch.int64), 2).tolist() == [0, 0]


def test_permuted_rows_come_back_in_place():
    indices = torch.tensor([[2, 0], [1, 2], [0, 1], [2, 1]])
    x = Draw("back").normal(4, 3)
    order = dispatch_order(indices, 4)
    assert order.counts.tolist() == [2, 3, 3, 0]
    assert torch.equal(unpermute(permute(x, order), order), 2 * x)


def test_no_tokens():
    order = dispatch_order(torch.zeros(0, 2, dtype=torch.int64), 3)
    assert order.counts.tolist() == [0, 0, 0]
    x = torch.zeros(0, 4, requires_grad=True)
    out = unpermute(permute(x, order), order)
    assert out.shape == gradients(out, [x])[0].shape == (0, 4)


@pytest.mark.parametrize("invariant", [False, True])
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("counts", COUNTS)
def test_grouped_linear(counts, dtype, invariant):
    draw = Draw(counts)
    operands = [draw.normal(sum(counts), 10, dtype=dtype), draw.normal(len(counts), 7, 10, dtype=dtype)]
    check(
        lambda x, w: grouped_linear(x, w, torch.tensor(counts), invariant=invariant),
        lambda x, w: naive.grouped_linear(x, w, counts),
        operands,
    )


def test_experts_without_rows_have_zero_gradient():
    x, weight = Draw("zero").normal(3, 4).requires_grad_(), torch.ones(3, 2, 4, requires_grad=True)
    _, grad = gradients(grouped_linear(x, weight, torch.tensor([0, 3, 0])), [x, weight])
    assert (grad[0] == 0).all()
    assert (grad[2] == 0).all()
    assert (grad[1] != 0).any()


def test_rows_without_an_expert_are_refused():
    with pytest.raises(RuntimeError):
        grouped_linear(torch.ones(5, 4), torch.ones(2, 3, 4), torch.tensor([2, 2]))


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("weighted", [False, True])
@pytest.mark.parametrize(("rows", "width"), [(6, 30), (1, 7), (40, 3), (0, 5)])
def test_swiglu(rows, width, weighted, dtype):
    draw = Draw(rows, width)
    inputs = [draw.normal(rows, width, dtype=dtype, scale=8.0) for _ in range(2)]
    if weighted:
        inputs.append(draw.normal(rows, dtype=island(dtype)))
    check(lambda *x: swiglu(x[0], x[1], LIMIT, *x[2:]), lambda *x: naive.swiglu(x[0], x[1], LIMIT, *x[2:]), inputs)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("weighted", [False, True])
def test_swiglu_of_both_halves_side_by_side_has_the_same_bits(weighted, dtype):
    draw = Draw("halves")
    both = draw.normal(6, 60, dtype=dtype, scale=8.0).requires_grad_()
    weight = [draw.normal(6, dtype=island(dtype)).requires_grad_()] if weighted else []
    apart, joined = swiglu(*both.chunk(2, -1), LIMIT, *weight), swiglu(both, None, LIMIT, *weight)
    assert torch.equal(apart, joined)
    assert all(map(torch.equal, gradients(apart, [both, *weight]), gradients(joined, [both, *weight])))


def test_swiglu_clamps_the_gate_above_and_the_up_on_both_sides():
    gate = torch.tensor([[12.0, -50.0, 3.0, 3.0, 9.0]], dtype=torch.float64, requires_grad=True)
    up = torch.tensor([[2.0, 2.0, 11.0, -11.0, -9.0]], dtype=torch.float64, requires_grad=True)
    out = swiglu(gate, up, LIMIT)
    silu = torch.nn.functional.silu
    gates, ups = torch.tensor([10.0, -50.0, 3.0, 3.0, 9.0]), torch.tensor([2.0, 2.0, 10.0, -10.0, -9.0])
    torch.testing.assert_close(out[0], (silu(gates.double()) * ups.double()))
    grad_gate, grad_up = gradients(out, [gate, up], [torch.ones_like(out)])
    assert (grad_gate != 0).tolist() == [[False, True, True, True, True]]
    assert (grad_up != 0).tolist() == [[True, True, False, False, True]]


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("weighted", [False, True])
def test_extreme_gates(weighted, dtype):
    values = torch.tensor([-1e4, -200.0, -89.0, 0.0, 89.0, 200.0, 1e4])
    gate, up = (x.flatten()[None].to(dtype) for x in torch.meshgrid(values, values, indexing="ij"))
    leaves = [x.clone().requires_grad_() for x in (gate, up)]
    weight = [torch.full((1,), 1e4, dtype=island(dtype), requires_grad=True)] if weighted else []
    out = swiglu(*leaves, LIMIT, *weight)
    assert relative(out, naive.swiglu(gate.double(), up.double(), LIMIT, *(w.double() for w in weight))) < 4e-3
    grads = gradients(out, [*leaves, *weight], [torch.full_like(out, 1e6)])
    assert all(torch.isfinite(x).all() for x in (out, *grads))


def test_swiglu_gradcheck_and_inputs_left_alone():
    draw = Draw("gradcheck")
    leaves = [draw.normal(3, 4, dtype=torch.float64, scale=6.0).requires_grad_() for _ in range(2)]
    leaves.append(draw.normal(3, dtype=torch.float64).requires_grad_())
    before = [x.detach().clone() for x in leaves]
    assert torch.autograd.gradcheck(lambda g, u, w: swiglu(g, u, LIMIT, w), leaves)
    assert all(torch.equal(x, b) for x, b in zip(leaves, before, strict=True))


def test_bound_itself_is_inside():
    gate, up = (torch.full((1, 1), LIMIT, requires_grad=True) for _ in range(2))
    assert all((g != 0).all() for g in gradients(swiglu(gate, up, LIMIT), [gate, up]))
