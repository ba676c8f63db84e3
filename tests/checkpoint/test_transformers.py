"""Exchange with transformers' own DeepseekV4ForCausalLM: it loads what is written here, its saves are read here."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

import pytest
import torch

from undertow.checkpoint.directory import load_model, save_model
from undertow.checkpoint.names import detect_spelling, expected_tensors, native_places
from undertow.checkpoint.shards import Shards
from undertow.config.errors import InputError
from undertow.config.model import ModelConfig
from undertow.config.model_json import read_config, transformers_config

transformers = pytest.importorskip("transformers")


def hugging(path: Path, dtype: torch.dtype = torch.float32) -> torch.nn.Module:
    """transformers' model of the directory, loaded without a missing, surplus or misshapen tensor."""
    model, report = transformers.DeepseekV4ForCausalLM.from_pretrained(
        path, dtype=dtype, attn_implementation="eager", output_loading_info=True
    )
    assert not any(report.values()), report
    return model


def config(blocks: int, **changes: object) -> ModelConfig:
    ratios = (0, 0, 4, 8, 4, *[0] * blocks)
    return ModelConfig.from_preset(
        "v4-debug", **{"num_nextn_predict_layers": blocks, "compress_ratios": ratios, **changes}
    )


def assert_holds(theirs: torch.nn.Module, ours: torch.nn.Module, shape: ModelConfig) -> None:
    """Every tensor of theirs is ours, to the bit, and none of the main stack is left out."""
    state, native = theirs.state_dict(), ours.state_dict()
    places = native_places(shape, "transformers")
    assert set(state) == {name for name in places if not name.startswith("mtp.")}
    for name, tensor in state.items():
        home, piece = places[name]
        assert torch.equal(tensor, piece.view(native[home]).to(tensor.dtype)), name


def test_names_shapes_and_types_are_theirs() -> None:
    shape = config(0)
    values = transformers_config(shape)
    with torch.device("meta"):
        state = transformers.DeepseekV4ForCausalLM(transformers.DeepseekV4Config(**values)).state_dict()
    expected = expected_tensors(shape, "transformers")
    assert {name: tuple(tensor.shape) for name, tensor in state.items()} == {n: e.shape for n, e in expected.items()}
    assert {n for n, t in state.items() if t.dtype == torch.int64} == {
        n for n, e in expected.items() if e.kind == "index"
    }


@pytest.mark.parametrize("format", ["transformers", "released"])
@pytest.mark.parametrize("blocks", [0, 1])
@pytest.mark.parametrize("shard_bytes", [10**9, 300_000])
def test_it_loads_what_we_write(format: str, blocks: int, shard_bytes: int, make_model: Callable, target: Path) -> None:
    shape = config(blocks)
    ours = make_model(shape)
    save_model(ours, target, format=format, shard_bytes=shard_bytes)
    theirs = hugging(target)
    assert_holds(theirs, ours, shape)
    assert theirs.config.layer_types[2:4] == ["compressed_sparse_attention", "heavily_compressed_attention"]
    assert theirs.config.compress_rates["heavily_compressed_attention"] == 8
    assert theirs.config.mlp_layer_types == ["hash_moe", "moe", "moe", "moe", "moe"]
    assert theirs.config.rope_parameters["compress"]["attention_factor"] == 1.0


@pytest.mark.parametrize("format", ["transformers", "released"])
def test_bfloat16_and_own_fields_do_not_disturb_it(format: str, make_model: Callable, target: Path) -> None:
    shape = config(1, index_hadamard=False)
    ours = make_model(shape, torch.bfloat16)
    save_model(ours, target, format=format)
    theirs = hugging(target, torch.bfloat16)
    assert_holds(theirs, ours, shape)
    assert theirs.state_dict()["model.layers.2.self_attn.sinks"].dtype == torch.float32
    assert read_config(target) == shape


def test_released_ratios_need_no_second_spelling(make_model: Callable, target: Path) -> None:
    shape = config(0, compress_ratios=(0, 0, 4, 128, 4))
    ours = make_model(shape)
    save_model(ours, target, format="released")
    assert "layer_types" not in (target / "config.json").read_text()
    assert_holds(hugging(target), ours, shape)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize(
    ("format", "original", "spelling"),
    [("transformers", True, "resaved"), ("transformers", False, "transformers"), ("released", True, "exported")],
)
def test_we_read_what_it_saves(
    format: str, original: bool, spelling: str, dtype: torch.dtype, make_model: Callable, target: Path, tmp_path: Path
) -> None:
    shape = config(0)
    ours = make_model(shape, dtype)
    save_model(ours, target, format=format)
    theirs = hugging(target, dtype)
    theirs.save_pretrained(tmp_path / "again", max_shard_size="300KB", save_original_format=original)
    with Shards(tmp_path / "again") as shards:
        assert detect_spelling(shards.headers, shape) == spelling
    assert len(list((tmp_path / "again").glob("*.safetensors"))) > 1
    assert read_config(tmp_path / "again") == shape
    loaded = load_model(tmp_path / "again", dtype=dtype)
    for name, tensor in ours.state_dict().items():
        assert torch.equal(tensor, loaded.state_dict()[name]), name


def test_its_fresh_model_has_an_unfilled_hash_table(make_model: Callable, target: Path, tmp_path: Path) -> None:
    save_model(make_model(config(0)), target, format="transformers")
    fresh = transformers.DeepseekV4ForCausalLM(transformers.DeepseekV4Config.from_pretrained(target))
    fresh.save_pretrained(tmp_path / "fresh")
    with pytest.raises(InputError, match=r"hash table \(model\.layers\.0\.ffn\.gate\.tid2eid is unfilled"):
        load_model(tmp_path / "fresh")


def test_it_drops_mtp_blocks_and_we_say_so(make_model: Callable, target: Path, tmp_path: Path) -> None:
    save_model(make_model(config(1)), target, format="transformers")
    hugging(target).save_pretrained(tmp_path / "again")
    with pytest.raises(InputError, match="transformers drops them when it saves: set num_nextn_predict_layers to 0"):
        load_model(tmp_path / "again")


@pytest.mark.parametrize(("format", "spelling"), [("transformers", "blended"), ("released", "exported")])
def test_without_the_mtp_blocks_it_dropped_the_trunk_is_ours(
    format: str, spelling: str, make_model: Callable, target: Path, tmp_path: Path
) -> None:
    ours = make_model(config(1))
    save_model(ours, target, format=format)
    hugging(target).save_pretrained(tmp_path / "again")
    file = tmp_path / "again" / "config.json"
    file.write_text(json.dumps({**json.loads(file.read_text()), "num_nextn_predict_layers": 0}))
    with Shards(tmp_path / "again") as shards:
        assert detect_spelling(shards.headers, config(0)) == spelling
    loaded = load_model(tmp_path / "again")
    assert {name for name in ours.state_dict() if not name.startswith("mtp.")} == set(loaded.state_dict())
    ids = torch.randint(0, 256, (2, 24), generator=torch.Generator().manual_seed(3))
    with torch.no_grad():
        assert torch.equal(loaded(ids), ours(ids))
