"""RMSNorm of heads with the rotary embedding against the definition in float64, every buffer poisoned."""

import pytest
import torch

from tests.ops.compare import Draw
from tests.ops.triton.norm.calls import DTYPES, EPS, check, run, tables
from undertow.ops.reference.rotary import head_norm_rotary as reference
from undertow.ops.triton.norm.heads import head_norm_rotary, refusal

SHAPES = [((11, 2, 10), 3), ((1, 1, 16), 1), ((9, 5, 64), 32), ((2, 64, 512), 32), ((2, 7, 96), 5), ((300, 2, 6), 2)]


def ops(cos, sin):
    """The kernel and its definition with these tables."""
    return tuple(lambda q, op=op: op(q, cos, sin, EPS) for op in (head_norm_rotary, reference))


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(("shape", "pairs"), SHAPES)
def test_values_and_gradients(shape, pairs, dtype, device):
    q = Draw(shape).normal(*shape, dtype=dtype, scale=2.0).to(device)
    check(*ops(*tables(len(q), pairs, device)), [q])


@pytest.mark.parametrize("seed", range(8))
def test_drawn_shapes(seed, device):
    draw = Draw("shapes", seed)
    tokens, heads, half = (int(draw.integers(high, 1)) + 4 for high in (25, 6, 280))
    q = draw.normal(tokens, heads, 2 * half, dtype=DTYPES[seed % 2], scale=10.0 ** (seed % 5 - 2)).to(device)
    check(*ops(*tables(tokens, int(draw.integers(half, 1)) + 1, device)), [q])


@pytest.mark.parametrize("along", [0.3, 1.0])
def test_a_gradient_along_the_normalised_q(along, device):
    """What is taken from it is then as large as what is left; q is read from its rounding to bfloat16."""
    draw = Draw("along", along)
    q = draw.normal(17, 4, 512, dtype=torch.bfloat16).to(device)
    cos, sin = tables(17, 32, device)
    kernel, definition = ops(cos, sin)
    grad = (draw.normal(17, 4, 512).to(device) + along * definition(q.float())).bfloat16()
    got, want = run(kernel, [q], grad)[1].double(), run(definition, [q.double()], grad.double())[1]
    assert (got - want).norm() <= 3e-3 * want.norm()


def test_zero_rows_stay_zero_with_a_finite_gradient(device):
    q = torch.zeros(2, 3, 8, device=device)
    cos, sin = tables(2, 2, device)
    out, dq = run(ops(cos, sin)[0], [q], torch.ones_like(q))
    assert (out == 0).all()
    torch.testing.assert_close(dq, run(ops(cos, sin)[1], [q], torch.ones_like(q))[1])


@pytest.mark.parametrize("shape", [(0, 3, 8), (3, 0, 8)])
def test_no_rows(shape, device):
    q = torch.zeros(shape, device=device)
    out, dq = run(ops(*tables(len(q), 3, device))[0], [q], torch.zeros_like(q))
    assert out.shape == dq.shape == shape


def test_strides(device):
    draw = Draw("strides")
    q, grad = draw.normal(4, 9, 24).to(device).transpose(0, 1), draw.normal(9, 1, 24).to(device).expand(9, 4, 24)
    kernel, _ = ops(*tables(9, 5, device))
    got, want = run(kernel, [q], grad), run(kernel, [q.contiguous()], grad.contiguous())
    assert all(torch.equal(a, b) for a, b in zip(got, want, strict=True))


@pytest.mark.parametrize("dtype", DTYPES)
def test_a_row_has_its_bits_among_any_others(dtype, device):
    draw = Draw("bits")
    q, grad = (draw.normal(43, 3, 96, dtype=dtype).to(device) for _ in range(2))
    cos, sin = tables(43, 16, device)
    out, dq = run(ops(cos, sin)[0], [q], grad)
    for first, last in ((0, 1), (7, 12), (42, 43), (1, 43)):
        part = run(ops(cos[first:last], sin[first:last])[0], [q[first:last]], grad[first:last])
        assert torch.equal(part[0], out[first:last]) and torch.equal(part[1], dq[first:last])


def test_its_result_and_a_number_a_head_are_kept_for_backward(device):
    q = torch.ones(6, 4, 32, dtype=torch.bfloat16, device=device, requires_grad=True)
    cos, sin = tables(6, 8, device)
    kept = []
    with torch.autograd.graph.saved_tensors_hooks(lambda x: kept.append(x) or x, lambda x: x):
        out = head_norm_rotary(q, cos, sin, EPS)
    assert [(k.numel(), k.dtype) for k in kept[:2]] == [(768, q.dtype), (24, torch.float32)]
    assert [k.data_ptr() for k in (kept[0], *kept[2:])] == [out.data_ptr(), cos.data_ptr(), sin.data_ptr()]


def test_refusals():
    q, table = torch.empty(7, 2, 64, device="meta"), torch.empty(7, 16, device="meta")
    assert refusal(q, table, table) is None
    assert refusal(q.double(), table, table) == "the kernels take rows in bfloat16 or float32, not float64"
