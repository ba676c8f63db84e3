"""Scales that are kept: the bytes of the way back, where numbers alone would not give them."""

from __future__ import annotations

import tracemalloc
from pathlib import Path

import pytest
import torch
from safetensors import safe_open

from tests.checkpoint.release import release_tensors, tiny, write_release
from undertow.checkpoint.convert.conversion import convert
from undertow.checkpoint.convert.kept import quantise_under
from undertow.checkpoint.convert.rounding import is_exact
from undertow.checkpoint.convert.source import Place, Source
from undertow.checkpoint.convert.target import Part, Tensor, Unit, Wish
from undertow.checkpoint.header import Span
from undertow.checkpoint.packed import describe
from undertow.quant.blocks import Block
from undertow.quant.formats import E2M1, E4M3
from undertow.quant.packing import pack
from undertow.quant.quantise import quantise
from undertow.quant.quantised import Quantised
from undertow.quant.scheme import MXFP4, WEIGHTS, Scheme


def random_fp4(rows: int = 64, columns: int = 96) -> Quantised:
    generator = torch.Generator().manual_seed(0)
    codes = torch.randint(0, 16, (rows, columns), dtype=torch.uint8, generator=generator)
    codes[:, :32] &= 0xB  # no number above 1.5: twice too large a scale
    scales = torch.randint(110, 130, (rows, columns // 32), dtype=torch.uint8, generator=generator)
    return Quantised(pack(codes).view(E2M1.dtype), scales.view(torch.float8_e8m0fnu), Block(1, 32))


def same(one: Quantised, other: Quantised) -> bool:
    return torch.equal(one.payload.view(torch.uint8), other.payload.view(torch.uint8)) and torch.equal(
        one.scales.view(torch.uint8), other.scales.view(torch.uint8)
    )


def test_loose_scales_come_back() -> None:
    held = random_fp4()
    numbers = held.dequantise(torch.bfloat16)
    assert not same(quantise(numbers, MXFP4), held)
    assert torch.equal(quantise(numbers, MXFP4).dequantise(), held.dequantise())
    assert same(quantise_under(numbers, MXFP4, held.scales), held)


def test_a_block_that_changed_gets_a_scale_of_its_own() -> None:
    held = random_fp4()
    numbers = held.dequantise()
    numbers[5, 40] = 1000.0
    made = quantise_under(numbers, MXFP4, held.scales)
    fresh = quantise(numbers, MXFP4)
    changed = made.scales.view(torch.uint8) != held.scales.view(torch.uint8)
    assert changed.nonzero().tolist() == [[5, 1]]
    assert torch.equal(made.scales[5, 1].view(torch.uint8), fresh.scales[5, 1].view(torch.uint8))
    assert torch.equal(made.dequantise()[5, 32:64], fresh.dequantise()[5, 32:64])


def test_fnuz_has_twice_the_scale_and_no_negative_zero() -> None:
    codes = torch.arange(256, dtype=torch.uint8).repeat(128, 1)
    codes[(codes & 0x7F) == 0x7F] = 0x30
    scales = torch.full((1, 2), 120, dtype=torch.uint8)
    held = Quantised(codes.view(E4M3.dtype), scales.view(torch.float8_e8m0fnu), Block(128, 128))
    numbers = held.dequantise(torch.bfloat16)
    assert same(quantise_under(numbers, WEIGHTS, held.scales), held)
    made = quantise_under(numbers, WEIGHTS.in_dialect("fnuz"), held.scales)
    assert torch.equal(made.payload.view(torch.uint8), codes.masked_fill(codes == 0x80, 0))
    assert made.scales.view(torch.uint8).tolist() == [[121, 121]]
    assert torch.equal(made.dequantise(), held.dequantise())


@pytest.mark.parametrize("code", [float("nan"), float("inf"), 0.0, -1.0])
def test_kept_scales_that_are_none_are_made_anew(code: float) -> None:
    values = random_fp4().dequantise()
    for scheme in (MXFP4, WEIGHTS, Scheme(E4M3, Block(128, 128), "float32")):
        fresh = quantise(values, scheme)
        if scheme.scale == "float32":
            kept = torch.full(fresh.scales.shape, code)
        else:
            kept = torch.full(fresh.scales.shape, 255, dtype=torch.uint8).view(torch.float8_e8m0fnu)
        assert same(quantise_under(values, scheme, kept), fresh)


def one_scale(folder: Path, name: str = "layers.0.attn.wq_a") -> torch.Tensor:
    """A release with one float32 scale of no dimension for a matrix; returns the numbers."""
    tensors = release_tensors(tiny())
    tensors[f"{name}.scale"] = torch.tensor(0.75)
    write_release(folder, tiny(), tensors)
    return tensors[f"{name}.weight"].float() * 0.75


def read(folder: Path, name: str) -> torch.Tensor:
    with safe_open(next(file for file in folder.glob("model-*.safetensors")), "pt") as file:
        return file.get_tensor(name)


def test_one_scale_of_no_dimension_for_a_whole_tensor(tmp_path: Path) -> None:
    numbers, name = one_scale(tmp_path / "source"), "layers.0.attn.wq_a"
    for wish in (Wish(), Wish(precision="fp4"), Wish(dialect="fnuz")):
        made = tmp_path / f"{wish.precision}-{wish.dialect}"
        convert(tmp_path / "source", made, wish, verify=True)
        scale, codes = read(made, f"{name}.scale"), read(made, f"{name}.weight")
        assert scale.shape == () and scale.item() == (1.5 if wish.dialect else 0.75)
        assert torch.equal(codes.float() * scale, numbers)


def test_the_way_back_from_one_scale_goes_to_blocks(tmp_path: Path) -> None:
    numbers, name = one_scale(tmp_path / "source"), "layers.0.attn.wq_a"
    convert(tmp_path / "source", tmp_path / "plain", Wish(precision="fp32"), verify=True)
    assert torch.equal(read(tmp_path / "plain", f"{name}.weight"), numbers)
    convert(tmp_path / "plain", tmp_path / "back", Wish(precision="fp4"), verify=True)
    scale = read(tmp_path / "back", f"{name}.scale")
    assert scale.shape == (1, 2) and scale.dtype is torch.float8_e8m0fnu


@pytest.mark.parametrize(("last", "fits"), [(0.5, True), (0.3, False), (2.0**-125, False)])
def test_scales_are_looked_at_in_slices(last: float, fits: bool, tmp_path: Path) -> None:
    """Whether BF16 holds FP8 with 3 million float32 scales is told by the last of them, in 4 MB at a time."""
    rows, columns = 3 << 10, 1 << 16
    weight, scales = rows * columns, rows * columns // 64 * 4
    spans = {
        "w.weight": Span("F8_E4M3", (rows, columns), 0, weight),
        "w.scale": Span("F32", (rows, columns // 64), weight, weight + scales),
    }
    file = tmp_path / "file"
    with open(file, "wb") as stream:  # a sparse file
        stream.seek(weight)
        stream.write(torch.ones(scales // 4 - 1).numpy().tobytes() + torch.tensor([last]).numpy().tobytes())
    write_release(tmp_path / "source", tiny())
    with Source(tmp_path / "source", tiny()) as source:
        source.tensors |= {name: Place(file, span) for name, span in spans.items()}
        source.low["w.weight"] = describe("w", spans["w.weight"], spans["w.scale"], (rows, columns))
        parts = (Part("w.weight", 0, rows, 0),)
        unit = Unit(Tensor("w.weight", "BF16", (rows, columns)), (rows, columns), parts, copied=False)
        assert is_exact(source, unit) is fits
        tracemalloc.start()
        assert is_exact(source, unit) is fits
        assert tracemalloc.get_traced_memory()[1] < 9 << 20  # one part as it is read, and the one before it
        tracemalloc.stop()
