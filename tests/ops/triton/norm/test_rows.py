"""RMSNorm of rows against the definition in float64, every buffer poisoned."""

import pytest
import torch

from tests.ops.compare import Draw, island
from tests.ops.triton.norm.calls import DTYPES, EPS, check, run
from undertow.ops.reference.norm import rms_norm as reference
from undertow.ops.triton.norm import rows as module
from undertow.ops.triton.norm.rows import refusal, rms_norm
from undertow.ops.triton.norm.tiles import DEFAULT, shaped

SHAPES = [(3, 3), (9, 24), (1, 100), (7, 3, 30), (33,), (2, 3, 4, 6), (5, 512), (2, 1536), (300, 7)]


def normed(x, w=None):
    return rms_norm(x, w, EPS)


def definition(x, w=None):
    return reference(x, w, EPS)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("weight", ["own type", "float32", "none"])
def test_values_and_gradients(shape, weight, dtype, device):
    draw = Draw(shape, weight)
    inputs = [draw.normal(*shape, dtype=dtype, scale=3.0)]
    if weight != "none":
        kind = dtype if weight == "own type" else island(dtype)
        inputs.append((1.0 + 0.3 * draw.normal(shape[-1])).to(kind))
    check(normed, definition, [x.to(device) for x in inputs])


@pytest.mark.parametrize("seed", range(8))
def test_drawn_shapes(seed, device):
    draw = Draw("shapes", seed)
    rows, width = int(draw.integers(70, 1)) + 1, int(draw.integers(1300, 1)) + 3
    x = draw.normal(rows, width, dtype=DTYPES[seed % 2], scale=10.0 ** (seed % 5 - 2))
    w = draw.normal(width, dtype=DTYPES[seed // 2 % 2])
    check(normed, definition, [x.to(device), w.to(device)])


@pytest.mark.parametrize("dtype", DTYPES)
def test_programs_go_from_tile_to_tile(dtype, device, monkeypatch):
    given = {"NUMBERS": 256, "WARP": 64, "PROGRAMS": 3, "STAGES": 1}
    monkeypatch.setattr(module, "tile", lambda device, kernel, rows, width: shaped(given, rows, width))
    for rows in (1, 5, 6, 25):
        draw = Draw("tiles", rows)
        check(normed, definition, [draw.normal(rows, 100, dtype=dtype).to(device), draw.normal(100).to(device)])


@pytest.mark.parametrize("shape", [(0, 8), (0, 3, 8), (3, 0, 8)])
def test_no_rows(shape, device):
    x, w = torch.zeros(shape, device=device), torch.ones(8, device=device)
    out, dx, dw = run(normed, [x, w], torch.zeros(shape, device=device))
    assert out.shape == dx.shape == shape
    assert torch.equal(dw, torch.zeros_like(w))


def test_only_what_learns_gets_a_gradient(device):
    draw = Draw("learns")
    x, w = draw.normal(5, 40).to(device), draw.normal(40).to(device)
    both = run(normed, [x, w], torch.ones_like(x))
    (dx,) = run(lambda x: normed(x, w), [x], torch.ones_like(x))[1:]
    (dw,) = run(lambda w: normed(x, w), [w], torch.ones_like(x))[1:]
    assert torch.equal(dx, both[1]) and torch.equal(dw, both[2])


def test_rows_of_one_number_have_next_to_no_gradient(device):
    x = torch.tensor([[-5.0], [4.0], [300.0]], device=device)
    out, dx = run(normed, [x], torch.ones_like(x))
    torch.testing.assert_close(out, x.sign())
    assert (dx * x).abs().max() < 1e-6


def test_zero_rows_stay_zero_with_a_finite_gradient(device):
    x = torch.zeros(2, 8, device=device)
    out, dx = run(normed, [x], torch.ones_like(x))
    assert (out == 0).all()
    torch.testing.assert_close(dx, torch.full_like(x, 1e3))


def test_large_bfloat16_inputs_are_squared_in_float32(device):
    x = torch.full((3, 64), 1e18, dtype=torch.bfloat16, device=device)
    assert torch.equal(normed(x), torch.ones_like(x))


def test_strides_of_inputs_and_gradients(device):
    draw = Draw("strides")
    x, w = draw.normal(24, 9).to(device).t(), draw.normal(48).to(device)[::2]
    grad = draw.normal(1, 24).to(device).expand(9, 24)
    got = run(normed, [x, w], grad)
    want = run(normed, [x.contiguous(), w.contiguous()], grad.contiguous())
    assert all(torch.equal(a, b) for a, b in zip(got, want, strict=True))


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("width", [24, 520])
def test_a_row_has_its_bits_among_any_others(width, dtype, device):
    draw = Draw("bits", width)
    x, grad = (draw.normal(23, width, dtype=dtype).to(device) for _ in range(2))
    w = draw.normal(width).to(device)
    out, dx, dw = run(normed, [x, w], grad)
    assert torch.equal(dw, run(normed, [x, w], grad)[2])
    for first, last in ((0, 1), (7, 12), (22, 23), (1, 23)):
        part = run(normed, [x[first:last], w], grad[first:last])
        assert torch.equal(part[0], out[first:last]) and torch.equal(part[1], dx[first:last])


def test_a_row_has_its_bits_at_any_address(device):
    room = Draw("address").normal(5 * 64 + 1, dtype=torch.bfloat16).to(device)
    odd = room[1:].view(5, 64)
    assert odd.data_ptr() % 16
    assert torch.equal(normed(odd), normed(odd.clone()))


def test_what_is_kept_for_backward(device):
    x = torch.ones(6, 4, 32, dtype=torch.bfloat16, device=device, requires_grad=True)
    w = torch.ones(32, dtype=torch.bfloat16, device=device, requires_grad=True)
    kept = []
    with torch.autograd.graph.saved_tensors_hooks(lambda x: kept.append(x) or x, lambda x: x):
        normed(x, w)
    assert [(k.numel(), k.dtype) for k in kept] == [(768, x.dtype), (32, w.dtype), (24, torch.float32)]
    assert kept[0].data_ptr() == x.data_ptr()


def test_refusals():
    def empty(*shape, dtype=torch.bfloat16):
        return torch.empty(*shape, dtype=dtype, device="meta")

    assert refusal(empty(3, 8192), None) is None
    assert refusal(empty(0, 5), empty(5, dtype=torch.float32)) is None
    assert refusal(empty(3, 8, dtype=torch.float64), None) == (
        "the kernels take rows in bfloat16 or float32, not float64"
    )
    assert refusal(empty(3, 8), empty(8, dtype=torch.float16)) == (
        "the kernels take weights in bfloat16 or float32, not float16"
    )
    assert refusal(empty(3, 8193), None) == "the kernels take rows of 1 to 8,192 numbers, not 8,193"
    assert refusal(empty(3, 0), None) == "the kernels take rows of 1 to 8,192 numbers, not 0"


def test_a_tile_depends_on_the_width_alone():
    given = DEFAULT["norm"]
    assert shaped(given, 1, 512).sizes == shaped(given, 999, 512).sizes
    assert shaped(given, 999, 512) == (125, {"D": 512, "BLOCK": 512, "ROWS": 8, "STAGES": 1, "num_warps": 4})
    assert shaped(given, 9, 7168) == (9, {"D": 7168, "BLOCK": 8192, "ROWS": 1, "STAGES": 1, "num_warps": 8})
    assert shaped(given, 9, 1).sizes == {"D": 1, "BLOCK": 2, "ROWS": 2048, "STAGES": 1, "num_warps": 4}
