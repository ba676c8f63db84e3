"""Loading FP8 and FP4: as numbers or packed, and one line for what is labelled wrongly."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from tests.checkpoint.release import release_tensors, tiny, write_release
from undertow.checkpoint.directory import load_model, save_model
from undertow.checkpoint.names import is_scaled, native_places, scale_name
from undertow.checkpoint.reading import read_packed
from undertow.config.errors import InputError
from undertow.config.model import ModelConfig
from undertow.config.training import TrainConfig
from undertow.engine.llm import LLM
from undertow.engine.sampling import SamplingParams
from undertow.model.packed import packed_names
from undertow.model.transformer import Transformer
from undertow.optim.build import build_optimizer
from undertow.quant.blocks import grid_shape
from undertow.quant.quantised import Quantised
from undertow.quant.scheme import WEIGHTS
from undertow.quant.stored import from_stored

WQ = "layers.1.attn.wq_a.weight"
EXPERT = "layers.1.ffn.experts.2.w1.weight"
COMPRESSOR = "layers.2.attn.compressor.wkv.weight"


@pytest.mark.parametrize("experts", ["fp4", "fp8"])
@pytest.mark.parametrize("dialect", ["ocp", "fnuz"])
def test_a_release_loads_as_its_numbers(experts: str, dialect: str, target: Path) -> None:
    config = tiny()
    tensors = write_release(target, config, release_tensors(config, experts=experts, dialect=dialect))
    state = load_model(target, dtype=torch.bfloat16).state_dict()
    places = native_places(config, "released")
    for name, (native, piece) in places.items():
        wanted = tensors[name]
        if is_scaled(name):
            wanted = from_stored(name, wanted, tensors[scale_name(name)]).dequantise(torch.bfloat16)
        assert torch.equal(piece.view(state[native]), wanted), name


def test_a_release_generates(target: Path) -> None:
    write_release(target, tiny())
    [result] = LLM(str(target)).generate([[1, 2, 3]], SamplingParams(max_tokens=4, temperature=0.0))
    assert len(result.token_ids) == 4


def test_packed_tensors_keep_their_bytes(target: Path) -> None:
    config = tiny(moe_intermediate_size=256)
    tensors = write_release(target, config)
    state = read_packed(target)
    low = state["layers.1.attn.wq_a.weight"]
    assert isinstance(low, Quantised) and low.scheme.dialect == "ocp"
    assert torch.equal(low.payload.view(torch.uint8), tensors[WQ].view(torch.uint8))
    experts = state["layers.1.ffn.experts.w13"]
    assert isinstance(experts, Quantised) and experts.shape == (config.n_routed_experts, 512, 192)
    assert torch.equal(experts.payload[2, :256].view(torch.int8), tensors[EXPERT])
    plain = load_model(target).state_dict()
    for name, tensor in state.items():
        numbers = tensor.dequantise() if isinstance(tensor, Quantised) else tensor.to(plain[name].dtype)
        assert torch.equal(numbers, plain[name]), name


def test_fp8_experts_stack_where_blocks_fit(target: Path) -> None:
    config = tiny(hidden_size=192, moe_intermediate_size=128)
    write_release(target, config, release_tensors(config, experts="fp8"))
    packed, plain = read_packed(target), load_model(target).state_dict()
    for name in ("layers.1.ffn.experts.w13", "layers.1.ffn.experts.w2"):
        experts = packed[name]
        assert isinstance(experts, Quantised) and experts.scales.shape[:2] == (config.n_routed_experts, 2)
        assert torch.equal(experts.dequantise(), plain[name])


def test_fp8_experts_whose_blocks_would_span_two_are_named(target: Path) -> None:
    write_release(target, tiny(), release_tensors(tiny(), experts="fp8"))
    with pytest.raises(InputError) as caught:
        read_packed(target)
    assert str(caught.value) == (
        f"{target}: layers.0.ffn.experts.w13: moe_intermediate_size is 160, and FP8 experts in blocks of 128x128, w1 "
        "above w3, need a multiple of 128; use load_model without packed=True"
    )


def test_fp4_experts_stack_at_any_width(target: Path) -> None:
    tensors = write_release(target, tiny(moe_intermediate_size=160))
    experts = read_packed(target)["layers.1.ffn.experts.w13"]
    assert isinstance(experts, Quantised) and experts.shape[1] == 320
    assert torch.equal(experts.payload[2, :160].view(torch.int8), tensors[EXPERT])
    assert torch.equal(experts.dequantise(), load_model(target).state_dict()["layers.1.ffn.experts.w13"])


def test_a_file_and_an_absent_directory_are_told_apart(target: Path) -> None:
    write_release(target, tiny())
    file = target / "model-00001-of-00002.safetensors"
    for read in (read_packed, load_model):
        with pytest.raises(InputError) as caught:
            read(file)
        assert str(caught.value) == (f"{file}: is a file; a model is loaded from the directory that holds config.json")
        with pytest.raises(InputError, match="no such directory; models are read from disk, none are downloaded"):
            read(target / "absent")


def packed_release(target: Path, dtype: torch.dtype = torch.float32, **release: Any) -> tuple[Transformer, Transformer]:
    """A release with FP8 in a compressor too, as its numbers and with its codes."""
    config = tiny(moe_intermediate_size=128)
    tensors = release_tensors(config, **release)
    shape = tensors[COMPRESSOR].shape
    tensors[COMPRESSOR] = tensors[COMPRESSOR].to(torch.float8_e4m3fn)
    tensors[scale_name(COMPRESSOR)] = torch.ones(grid_shape(tuple(shape), WEIGHTS.block))
    write_release(target, config, tensors)
    return load_model(target, dtype), load_model(target, dtype, packed=True)


@pytest.mark.parametrize("release", [{}, {"experts": "fp8"}], ids=["fp4", "fp8"])
@torch.no_grad()
def test_a_packed_model_computes_as_the_plain_one(release: dict[str, Any], target: Path) -> None:
    plain, packed = packed_release(target, **release)
    names = set(packed_names(packed))
    assert {"layers.1.ffn.experts.w13", "layers.1.attn.wq_a.weight", "mtp.0.e_proj.weight"} <= names
    assert not names & {COMPRESSOR, "layers.1.attn.wo_a.weight"}
    for name, tensor in plain.state_dict().items():
        place, _, leaf = name.rpartition(".")
        held = getattr(packed.get_submodule(place), leaf)
        assert isinstance(held, Quantised) is (name in names)
        assert torch.equal(held.dequantise() if isinstance(held, Quantised) else held, tensor), name
    ids = torch.arange(40).view(2, 20)
    want, got = plain(ids, return_mtp=True), packed(ids, return_mtp=True)
    assert torch.equal(got.logits, want.logits) and torch.equal(got.mtp_logits, want.mtp_logits)


def test_a_packed_model_generates_and_does_no_more(target: Path, tmp_path: Path) -> None:
    plain, packed = packed_release(target, torch.bfloat16)
    params = SamplingParams(max_tokens=4, temperature=0.0)
    [want], [got] = (LLM(model).generate([[1, 2, 3]], params) for model in (plain, packed))
    assert got == want
    assert not any(parameter.requires_grad for parameter in packed.parameters())
    why = r"this model holds layers\.0\.attn\.wq_a\.weight.* as FP8 or FP4 codes, which serve forward alone; load it"
    with pytest.raises(InputError, match=f"^no optimizer: {why} without packed=True$"):
        build_optimizer(packed, TrainConfig())
    with pytest.raises(InputError, match=f"^the model is not saved: {why} without packed=True$"):
        save_model(packed, tmp_path / "copy")
    assert not (tmp_path / "copy").exists()


def test_what_cannot_be_packed_is_one_line(target: Path) -> None:
    write_release(target, tiny(), release_tensors(tiny(), experts="fp8"))
    with pytest.raises(InputError, match=r"need a multiple of 128; use load_model without packed=True$"):
        load_model(target, packed=True)
    with pytest.raises(InputError, match=r"^dtype torch\.float64 with packed=True: codes are read as torch\.float32 "):
        load_model(target, torch.float64, packed=True)


def mislabelled(config: ModelConfig, kind: str) -> tuple[dict[str, torch.Tensor], str, str]:
    """A release with one wrong tensor, the tensor, and what is said of it."""
    tensors = release_tensors(config)
    if kind == "fp4 as fp8":
        tensors[EXPERT] = (tensors[EXPERT].view(torch.uint8) & 0x77).view(torch.float8_e4m3fn)
        return tensors, EXPERT, "as packed FP4 has"
    if kind == "fp8 as bytes":
        tensors[WQ] = tensors[WQ].view(torch.int8)
        return tensors, WQ, "read only as float8_e4m3fn or float8_e4m3fnuz, which says its dialect"
    if kind == "dialect":
        tensors[WQ] = tensors[WQ].view(torch.float8_e4m3fnuz)
        tensors[WQ].view(torch.uint8)[0, 0] = 0x80
        return tensors, WQ, "so the label is likely wrong"
    if kind == "scale type":
        tensors[scale_name(WQ)] = tensors[scale_name(WQ)].view(torch.uint8)
        return tensors, WQ, "its scale is torch.uint8"
    if kind == "scale bfloat16":
        tensors[scale_name(WQ)] = tensors[scale_name(WQ)].float().bfloat16()
        return tensors, WQ, "its scale is torch.bfloat16"
    tensors[scale_name(WQ)] = torch.full_like(tensors[scale_name(WQ)].view(torch.uint8), 0xFF).view(
        torch.float8_e8m0fnu
    )
    return tensors, WQ, "a scale is nan"


@pytest.mark.parametrize("kind", ["fp4 as fp8", "fp8 as bytes", "dialect", "scale type", "scale bfloat16", "scale nan"])
def test_wrong_labels_are_one_line_with_file_and_tensor(kind: str, target: Path) -> None:
    tensors, name, message = mislabelled(tiny(), kind)
    write_release(target, tiny(), tensors)
    for packed in (False, True):
        with pytest.raises(InputError) as caught:
            load_model(target, packed=packed)
        said = str(caught.value)
        assert message in said and name in said and ".safetensors: " in said and "\n" not in said
