"""A sub-layer's output written back to the streams, and its gradients, against the definition in float64."""

import pytest
import torch

from tests.ops.compare import Draw, relative, same_bits
from undertow.ops.reference.hyper import hyper_expand as definition
from undertow.ops.triton.hyper.expand import hyper_expand, refusal

TOLERANCE = {torch.bfloat16: 3e-3, torch.float32: 1e-5}


def operands(tokens, n, width, device, dtype=torch.bfloat16):
    draw = Draw("expand", tokens, n, width)
    y, streams = draw.normal(tokens, width, dtype=dtype), draw.normal(tokens, n, width, dtype=dtype)
    given = [y, draw.normal(tokens, n), draw.normal(tokens, n, n), streams]
    return [x.to(device) for x in given], draw.normal(tokens, n, width, dtype=dtype).to(device)


def run(op, given, grad, dtype=None):
    leaves = [x.to(dtype or x.dtype).detach().requires_grad_() for x in given]
    out = op(*leaves)
    return out, *torch.autograd.grad(out, leaves, grad.to(out.dtype))


def check(given, grad):
    found, wanted = run(hyper_expand, given, grad), run(definition, given, grad, torch.float64)
    for name, a, b in zip(("out", "y", "post", "mix", "streams"), found, wanted, strict=True):
        assert relative(a, b) <= TOLERANCE[a.dtype], (name, relative(a, b))


@pytest.mark.parametrize("dtype", TOLERANCE)
@pytest.mark.parametrize(("tokens", "n", "width"), [(5, 4, 72), (9, 2, 33), (1, 4, 1100), (2, 2, 1)])
def test_values_and_gradients(tokens, n, width, dtype, device):
    check(*operands(tokens, n, width, device, dtype))


def test_streams_that_repeat_one(device):
    given, grad = operands(4, 4, 40, device)
    one = given[3][:, :1].expand(-1, 4, -1)
    apart = given[3].transpose(1, 2).contiguous().transpose(1, 2)
    for streams in (one, apart):
        check([*given[:3], streams], grad)


def test_gradients_of_any_layout(device):
    given, grad = operands(4, 4, 40, device)
    turned = grad.transpose(0, 1).contiguous().transpose(0, 1)
    assert same_bits(run(hyper_expand, given, turned), run(hyper_expand, given, grad))


def test_a_row_does_not_depend_on_the_others(device):
    given, grad = operands(7, 4, 40, device)
    whole = run(hyper_expand, given, grad)
    part = run(hyper_expand, [x[2:5] for x in given], grad[2:5])
    assert same_bits(part, tuple(x[2:5] for x in whole))


def test_streams_are_mixed_in_float32(device):
    streams = torch.tensor([[[256.0], [-256.0], [1.0], [0.0]]], dtype=torch.bfloat16, device=device)
    y = torch.zeros(1, 1, dtype=torch.bfloat16, device=device)
    out = hyper_expand(y, torch.ones(1, 4, device=device), torch.ones(1, 4, 4, device=device), streams)
    assert out.flatten().tolist() == [1.0] * 4


def test_no_tokens(device):
    given, grad = operands(0, 4, 16, device)
    assert [tuple(x.shape) for x in run(hyper_expand, given, grad)] == [
        (0, 4, 16), (0, 16), (0, 4), (0, 4, 4), (0, 4, 16),
    ]  # fmt: skip


def test_refusals():
    given, _ = operands(1, 4, 8, "cpu")
    y, post, mix, streams = given
    assert refusal(*given) is None
    assert refusal(y, post, mix, streams.float()) == (
        "the kernels take an output and streams of bfloat16 or both of float32, not bfloat16 and float32"
    )
    assert refusal(y, post.bfloat16(), mix, streams) == (
        "the kernels take coefficients of float32, not bfloat16 and float32"
    )
    assert refusal(y, post, mix, streams[:, :3]) == "the kernels take 2 or 4 streams, not 3"
