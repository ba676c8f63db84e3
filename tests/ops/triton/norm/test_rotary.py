"""The rotary embedding against the definition in float64, every buffer poisoned."""

import pytest
import torch

from tests.ops.compare import Draw, relative
from tests.ops.triton.norm.calls import DTYPES, check, run, tables
from undertow.ops.reference.rotary import rotary as reference
from undertow.ops.triton.norm.rotary import refusal, rotary

SHAPES = [((11, 6), 3), ((11, 10), 3), ((11, 2, 10), 3), ((1, 2, 3, 8), 1), ((5, 3, 512), 32), ((9, 128), 32)]


@pytest.mark.parametrize("inverse", [False, True])
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(("shape", "pairs"), SHAPES)
def test_values_and_gradients(shape, pairs, dtype, inverse, device):
    x = Draw(shape).normal(*shape, dtype=dtype).to(device)
    cos, sin = tables(len(x), pairs, device)
    check(lambda x: rotary(x, cos, sin, inverse=inverse), lambda x: reference(x, cos, sin, inverse=inverse), [x])


@pytest.mark.parametrize("seed", range(8))
def test_drawn_shapes(seed, device):
    draw = Draw("shapes", seed)
    tokens, heads, half = (int(draw.integers(high, 1)) + 1 for high in (60, 9, 200))
    x = draw.normal(tokens, heads, 2 * half, dtype=DTYPES[seed % 2]).to(device)
    cos, sin = tables(tokens, int(draw.integers(half, 1)) + 1, device)
    check(lambda x: rotary(x, cos, sin), lambda x: reference(x, cos, sin), [x])


@pytest.mark.parametrize("dtype", DTYPES)
def test_the_leading_numbers_pass_to_the_bit_whatever_they_are(dtype, device):
    x = Draw("leading").normal(5, 2, 16, dtype=dtype).to(device)
    x[1, 0, 3], x[2, 1, 9], x[3, 0, 0] = float("inf"), -0.0, float("nan")
    cos, sin = tables(5, 3, device)
    out = rotary(x, cos, sin)
    kind = torch.int32 if dtype == torch.float32 else torch.int16
    finite = ~out[..., :10].isnan()
    assert torch.equal(out[..., :10].contiguous().view(kind)[finite], x[..., :10].contiguous().view(kind)[finite])
    assert torch.equal(out[..., :10].isnan(), x[..., :10].isnan())
    assert not out[..., 10:].isnan().any()


def test_the_inverse_restores(device):
    x = Draw("inverse").normal(6, 2, 10).to(device)
    cos, sin = tables(6, 4, device)
    assert relative(rotary(rotary(x, cos, sin), cos, sin, inverse=True), x) < 1e-6
    assert torch.equal(rotary(x, cos, sin)[0], x[0])


@pytest.mark.parametrize("shape", [(0, 8), (0, 3, 8), (3, 0, 8)])
def test_no_rows(shape, device):
    x = torch.zeros(shape, device=device)
    cos, sin = tables(len(x), 3, device)
    out, dx = run(lambda x: rotary(x, cos, sin), [x], torch.zeros_like(x))
    assert out.shape == dx.shape == shape


def test_strides(device):
    draw = Draw("strides")
    x, grad = draw.normal(4, 9, 24).to(device).transpose(0, 1), draw.normal(9, 1, 24).to(device).expand(9, 4, 24)
    cos, sin = (table.t().contiguous().t() for table in tables(9, 5, device))
    got = run(lambda x: rotary(x, cos, sin), [x], grad)
    plain = cos.contiguous(), sin.contiguous()
    want = run(lambda x: rotary(x, *plain), [x.contiguous()], grad.contiguous())
    assert all(torch.equal(a, b) for a, b in zip(got, want, strict=True))


@pytest.mark.parametrize("dtype", DTYPES)
def test_a_row_has_its_bits_among_any_others(dtype, device):
    x = Draw("bits").normal(43, 3, 64, dtype=dtype).to(device)
    cos, sin = tables(43, 16, device)
    out = rotary(x, cos, sin)
    for first, last in ((0, 1), (7, 12), (42, 43)):
        assert torch.equal(rotary(x[first:last], cos[first:last], sin[first:last]), out[first:last])


def test_the_tables_alone_are_kept_for_backward(device):
    x = torch.ones(6, 4, 32, device=device, requires_grad=True)
    cos, sin = tables(6, 8, device)
    kept = []
    with torch.autograd.graph.saved_tensors_hooks(lambda x: kept.append(x) or x, lambda x: x):
        rotary(x, cos, sin)
    assert [k.data_ptr() for k in kept] == [cos.data_ptr(), sin.data_ptr()]


def test_refusals():
    def empty(*shape, dtype=torch.float32):
        return torch.empty(*shape, dtype=dtype, device="meta")

    x, table = empty(7, 2, 64), empty(7, 16)
    assert refusal(x, table, table) is None
    assert refusal(x.bfloat16(), table, table) is None
    assert refusal(x.half(), table, table) == "the kernels take rows in bfloat16 or float32, not float16"
    assert refusal(x, table.double(), table.double()) == "the kernels take tables in float32, not float64"
    assert refusal(x, empty(1, 16), empty(1, 16)) == (
        "the kernels take tables of a row for each of 7 tokens, not of [1, 16]"
    )
    assert refusal(empty(7, 9), table, table) == "the kernels take rows of an even number up to 8,192, not of 9"
    assert refusal(empty(7, 16), table, table) == "the kernels rotate 2 to 16 numbers of such rows, not 32"
