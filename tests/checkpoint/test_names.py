"""Name maps: complete, one to one, and equal to what is published, to what transformers has and to the model itself."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings

from tests.config.shapes import configs
from undertow.checkpoint.names import (
    FORMATS,
    Format,
    detect_spelling,
    expected_tensors,
    native_places,
    native_tensors,
    pieces,
    released_listing,
)
from undertow.config.model import ModelConfig
from undertow.config.presets import PRESETS
from undertow.model.transformer import Transformer


@pytest.mark.parametrize(("preset", "tensors", "mtp"), [("v4-flash", 69_187, 1_575), ("v4-pro", 145_116, 2_343)])
def test_the_quantised_release_has_the_published_count(preset: str, tensors: int, mtp: int) -> None:
    names = released_listing(ModelConfig.from_preset(preset))
    assert len(names) == len(set(names)) == tensors
    assert sum(name.startswith("mtp.0.") for name in names) == mtp
    scales = {name for name in names if name.endswith(".scale")}
    assert "layers.2.attn.indexer.wq_b.scale" in scales and "mtp.0.e_proj.scale" in scales
    assert not any("compressor" in name or "gate" in name or "norm" in name for name in scales)


@pytest.mark.parametrize("preset", PRESETS)
@pytest.mark.parametrize("indexer", ["shared", "own_rank"])
def test_native_list_is_the_models_state_dict(preset: str, indexer: str) -> None:
    config = ModelConfig.from_preset(preset, indexer=indexer)
    state = Transformer(config, device="meta", dtype=torch.bfloat16).state_dict()
    kinds = {torch.bfloat16: "weight", torch.float32: "float32", torch.int64: "index"}
    built = {name: (tuple(tensor.shape), kinds[tensor.dtype]) for name, tensor in state.items()}
    assert built == native_tensors(config)


def bijective(config: ModelConfig, spelling: Format) -> None:
    places = native_places(config, spelling)
    expected = expected_tensors(config, spelling)
    total = 0
    for native, (shape, kind) in native_tensors(config).items():
        covered = torch.zeros(shape, dtype=torch.int8)
        for piece in pieces(native, shape, spelling):
            view = piece.view(covered)
            assert tuple(view.shape) == piece.shape
            view += 1
            assert places[piece.name] == (native, piece) and expected[piece.name] == (piece.shape, kind)
            total += 1
        assert bool((covered == 1).all()), native
    assert total == len(places) == len(expected)
    assert detect_spelling(expected, config) == spelling


@given(config=configs())
@settings(max_examples=60, deadline=None)
def test_maps_are_one_to_one_and_cover_every_element(config: ModelConfig) -> None:
    for spelling in FORMATS:
        bijective(config, spelling)


@pytest.mark.parametrize("preset", ["v4-small", "v4-tiny", "v4-debug"])
@pytest.mark.parametrize("spelling", FORMATS)
def test_presets_are_one_to_one(preset: str, spelling: Format) -> None:
    bijective(ModelConfig.from_preset(preset), spelling)


@pytest.mark.parametrize("preset", ["v4-flash", "v4-pro", "v4-proxy"])
@pytest.mark.parametrize("spelling", FORMATS)
def test_large_presets_have_no_name_twice(preset: str, spelling: Format) -> None:
    config = ModelConfig.from_preset(preset)
    names = [piece.name for name, t in native_tensors(config).items() for piece in pieces(name, t.shape, spelling)]
    assert len(names) == len(set(names)) == len(expected_tensors(config, spelling))


def test_spellings_by_example(debug: ModelConfig) -> None:
    released = expected_tensors(debug, "released")
    assert released["layers.1.ffn.experts.7.w3.weight"] == ((32, 64), "weight")
    assert released["layers.0.ffn.gate.tid2eid"] == ((256, 2), "index")
    assert released["hc_head_scale"] == ((1,), "float32")
    stacked = expected_tensors(debug, "transformers")
    assert stacked["model.layers.1.mlp.experts.gate_up_proj"] == ((8, 64, 64), "weight")
    assert stacked["mtp.0.ffn.experts.7.w2.weight"] == ((64, 32), "weight")
    place = native_places(debug, "released")["layers.1.ffn.experts.7.w3.weight"]
    assert place[0] == "layers.1.ffn.experts.w13" and place[1].place == (7, slice(32, 64))


def test_detection_of_foreign_and_of_partial_files(debug: ModelConfig) -> None:
    foreign = [f"model.layers.{i}.self_attn.q_proj.weight" for i in range(9)]
    assert detect_spelling([*foreign, "lm_head.weight", "model.norm.weight"], debug) is None
    assert detect_spelling([], debug) is None
    assert detect_spelling(list(expected_tensors(debug, "transformers"))[:80], debug) == "transformers"
    flash = ModelConfig.from_preset("v4-flash")
    assert detect_spelling(released_listing(flash), flash) == "released"
