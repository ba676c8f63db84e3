"""What the head reads of the streams, and its gradients, against the definition in float64 on the same inputs."""

import pytest
import torch

from tests.ops.compare import Draw, relative, same_bits
from undertow.ops.reference.hyper import hyper_head as definition
from undertow.ops.triton.hyper import tiles
from undertow.ops.triton.hyper.head import hyper_head, refusal

NARROW, WIDE = 3e-3, 1e-5
NUMBERS = (1e-6, 1e-6)
NAMES = ("x", "streams", "fn", "scale", "base", "weight")


def operands(tokens, n, width, device, size=1.0):
    """Operands, and the upstream gradient; `size` is that of the coefficients."""
    draw = Draw("head", tokens, n, width)
    given = [
        draw.normal(tokens, n, width, dtype=torch.bfloat16),
        draw.normal(n, n * width, scale=(n * width) ** -0.5),
        draw.normal(1, scale=size),
        draw.normal(n, scale=size),
        (1 + draw.normal(width, scale=0.1)).bfloat16(),
    ]
    return [x.to(device) for x in given], draw.normal(tokens, width, dtype=torch.bfloat16).to(device)


def run(op, given, grad, dtype=None):
    """The result, and gradients of all operands."""
    leaves = [x.to(dtype or x.dtype).detach().requires_grad_() for x in given]
    out = op(*leaves, *NUMBERS)
    return out, *torch.autograd.grad(out, leaves, grad.to(out.dtype))


def check(given, grad, wide=WIDE):
    found, wanted = run(hyper_head, given, grad), run(definition, given, grad, torch.float64)
    for name, a, b in zip(NAMES, found, wanted, strict=True):
        assert relative(a, b) <= (NARROW if a.dtype == torch.bfloat16 else wide), (name, relative(a, b))
    assert [x.dtype for x in found[1:]] == [x.dtype for x in given]


@pytest.mark.parametrize(("tokens", "n", "width"), [(5, 4, 72), (37, 2, 40), (1, 4, 64), (3, 4, 264), (2, 2, 33)])
def test_values_and_gradients(tokens, n, width, device):
    check(*operands(tokens, n, width, device))


def test_several_slabs_and_chunks(device, monkeypatch):
    monkeypatch.setitem(tiles.DEFAULT, "read", {**tiles.DEFAULT["read"], "SLAB": 32})
    check(*operands(70, 4, 16, device))


@pytest.mark.filterwarnings("ignore:overflow encountered in exp")
@pytest.mark.parametrize("size", [30.0, 1e4])
def test_saturated_coefficients_and_large_gradients(size, device):
    given, grad = operands(6, 4, 32, device, size)
    grad = grad * 1e6
    assert all(torch.isfinite(x).all() for x in run(hyper_head, given, grad))
    if size < 100:
        check(given, grad, wide=2e-4)


def test_streams_of_any_layout(device):
    given, grad = operands(5, 4, 32, device)
    one = given[0][:1].expand(5, -1, -1)
    turned, apart = (given[0].transpose(*axes).contiguous().transpose(*axes) for axes in ((0, 1), (1, 2)))
    for streams in (one, turned, apart):
        check([streams, *given[1:]], grad)


def test_gradients_of_any_layout(device):
    given, grad = operands(5, 4, 32, device)
    assert same_bits(run(hyper_head, given, grad.t().contiguous().t()), run(hyper_head, given, grad))
    check(given, grad[:1].expand(5, -1))


def test_little_is_saved(device):
    given, saved = operands(5, 4, 64, device)[0], {}

    def pack(x):
        saved[x.data_ptr()] = x.numel() * x.element_size()
        return x

    leaves = [x.clone().requires_grad_() for x in given]
    with torch.autograd.graph.saved_tensors_hooks(pack, lambda x: x):
        hyper_head(*leaves, *NUMBERS)
    mine = {x.data_ptr() for x in leaves}
    assert sum(size for place, size in saved.items() if place not in mine) == 5 * 4 * (4 + 1 + 1)


def test_same_bits_in_any_order_of_programs(device, backwards):
    given, grad = operands(35, 2, 16, device)
    first = run(hyper_head, given, grad)
    backwards()
    assert same_bits(run(hyper_head, given, grad), first)


def test_no_tokens(device):
    given, grad = operands(0, 4, 32, device)
    found = run(hyper_head, given, grad)
    assert found[0].shape == (0, 32)
    assert [x.abs().sum().item() for x in found] == [0.0] * 6
    assert [x.shape for x in found[1:]] == [x.shape for x in given]


def test_refusals():
    given = operands(1, 4, 16, "cpu")[0][:4]
    streams, fn, scale, base = given
    assert refusal(*given) is None
    assert refusal(streams.float(), *given[1:]) == "the kernels take streams of bfloat16, not float32"
    assert refusal(streams, fn.bfloat16(), scale, base) == "the kernels take fn of float32, not bfloat16"
    assert refusal(streams[:, :3], fn, scale, base) == "the kernels take 2 or 4 streams, not 3"
    assert "batch_invariant" in str(refusal(*given, invariant=True))
