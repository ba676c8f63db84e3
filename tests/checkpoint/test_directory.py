"""Saving and loading model directories: bit for bit in each format, and one line for each bad input."""

from __future__ import annotations

import json
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import tokenizers
import torch
from safetensors.torch import load_file, save_file

from undertow.checkpoint import publish, shards
from undertow.checkpoint.directory import WRITE_FORMATS, load_model, save_model
from undertow.checkpoint.names import expected_tensors
from undertow.config.errors import ConfigError, InputError
from undertow.config.model import ModelConfig
from undertow.model.transformer import Transformer

WEIGHTS = "model.safetensors"


def assert_same(one: torch.nn.Module, other: torch.nn.Module) -> None:
    left, right = one.state_dict(), other.state_dict()
    assert list(left) == list(right)
    for name, tensor in left.items():
        assert tensor.dtype == right[name].dtype and torch.equal(tensor, right[name]), name


@pytest.mark.parametrize("device", ["pipe", "/dev/zero", "loop"])
@pytest.mark.parametrize("name", ["config.json", WEIGHTS])
def test_what_never_ends_is_not_waited_for(
    device: str, name: str, make_model: Callable, debug: ModelConfig, target: Path
) -> None:
    save_model(make_model(debug), target)
    (target / name).unlink()
    if device == "pipe":
        os.mkfifo(target / name)
    else:
        (target / name).symlink_to(name if device == "loop" else device)
    why = (
        "Too many levels of symbolic links" if device == "loop" else "it is no regular file|a pipe or a device, no file"
    )
    with pytest.raises(InputError, match=rf"{name}: cannot be read \(({why})\)"):
        load_model(target)


@pytest.mark.parametrize("format", WRITE_FORMATS)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("shard_bytes", [10**9, 100_000])
def test_round_trip_is_bit_exact(
    format: str, dtype: torch.dtype, shard_bytes: int, make_model: Callable, debug: ModelConfig, target: Path
) -> None:
    model = make_model(debug, dtype)
    save_model(model, target, format=format, shard_bytes=shard_bytes)
    loaded = load_model(target, dtype=dtype)
    assert loaded.config == debug
    assert_same(model, loaded)
    assert (len(list(target.glob("*.safetensors"))) > 1) is (shard_bytes < 10**9)


@pytest.mark.parametrize("format", ["undertow", "released"])
def test_own_rank_indexer_round_trips(format: str, make_model: Callable, target: Path) -> None:
    model = make_model(ModelConfig.from_preset("v4-debug", indexer="own_rank", index_hadamard=False))
    save_model(model, target, format=format)
    loaded = load_model(target)
    assert loaded.config == model.config
    assert_same(model, loaded)


def test_islands_stay_float32_whatever_the_dtype(model: Transformer, target: Path) -> None:
    save_model(model, target)
    kinds = {name: kind for name, (_, kind) in expected_tensors(model.config, "undertow").items()}
    wanted = {"weight": torch.bfloat16, "float32": torch.float32, "index": torch.int64}
    loaded = load_model(target, dtype=torch.bfloat16)
    for name, tensor in loaded.state_dict().items():
        assert tensor.dtype == wanted[kinds[name]], name
        assert torch.equal(tensor, model.state_dict()[name].to(tensor.dtype))
    assert all(parameter.requires_grad for parameter in loaded.parameters())


def test_a_loaded_model_computes_the_same_and_outlives_its_files(model: Transformer, target: Path) -> None:
    ids = torch.randint(0, 256, (2, 33), generator=torch.Generator().manual_seed(0))
    save_model(model, target)
    loaded = load_model(target)
    save_model(loaded, target, format="released")
    for file in target.iterdir():
        file.unlink()
    with torch.no_grad():
        assert torch.equal(model(ids), loaded(ids))


def test_hash_table_may_be_int32(model: Transformer, target: Path) -> None:
    save_model(model, target)
    change(target, lambda t: {**t, "layers.0.ffn.gate.tid2eid": t["layers.0.ffn.gate.tid2eid"].int()})
    assert_same(model, load_model(target))


def change(target: Path, edit: Callable[[dict], dict]) -> None:
    tensors = {name: tensor.clone() for name, tensor in load_file(target / WEIGHTS).items()}
    save_file(edit(tensors), target / WEIGHTS)


def test_bad_arguments(model: Transformer, target: Path) -> None:
    with pytest.raises(InputError, match=r"unknown format 'release'; did you mean 'released'\?"):
        save_model(model, target, format="release")
    with pytest.raises(InputError, match="tokenizer: a dict is neither a path nor has save_pretrained or save"):
        save_model(model, target, tokenizer={})
    with pytest.raises(InputError, match=r"a tokenizer\.json, or a directory that holds one, is expected"):
        save_model(model, target, tokenizer=target / "none")
    assert not target.exists()
    save_model(model, target)
    with pytest.raises(InputError, match=r"dtype torch\.float16: a model is loaded as"):
        load_model(target, dtype=torch.float16)


def test_a_broken_model_does_not_replace_a_good_one(model: Transformer, target: Path) -> None:
    save_model(model, target)
    kept = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    with torch.no_grad():
        model.layers[2].ffn.experts.w2[0, 0, 0] = float("nan")
    with pytest.raises(InputError, match=r"1 not finite \(layers\.2\.ffn\.experts\.w2\); the model is not saved"):
        save_model(model, target)
    loaded = load_model(target).state_dict()
    assert all(torch.equal(loaded[name], tensor) for name, tensor in kept.items())


def test_own_rank_is_refused_before_anything_is_written(make_model: Callable, target: Path) -> None:
    with pytest.raises(ConfigError, match="indexer own_rank"):
        save_model(make_model(ModelConfig.from_preset("v4-debug", indexer="own_rank")), target, format="transformers")
    assert not target.exists()


class Folder:
    def save(self, directory: Path) -> None:
        (directory / "tokenizer.json").write_text("own")


def test_tokenizer_files_are_written_and_kept(model: Transformer, target: Path, tmp_path: Path) -> None:
    source = tmp_path / "source"
    source.mkdir()
    (source / "tokenizer.json").write_text("given")
    (source / "tokenizer_config.json").write_text("{}")
    save_model(model, target, tokenizer=source)
    assert (target / "tokenizer.json").read_text() == "given" and (target / "tokenizer_config.json").read_text() == "{}"
    save_model(model, target)
    assert (target / "tokenizer.json").read_text() == "given"
    save_model(model, target, tokenizer=Folder())
    assert (target / "tokenizer.json").read_text() == "own"
    save_model(model, target, tokenizer=tokenizers.Tokenizer(tokenizers.models.BPE()))
    assert json.loads((target / "tokenizer.json").read_text())["model"]["type"] == "BPE"
    save_model(model, target, tokenizer=source / "tokenizer.json")
    assert (target / "tokenizer.json").read_text() == "given"


def _die_after(moment: int, target: Path, model: Transformer) -> None:
    """In a child process: save, but exit hard after that many steps (files written, synced, swapped, removed)."""
    steps = 0

    def counted(inner: Callable) -> Callable:
        def step(*given: Any, **named: Any) -> Any:
            nonlocal steps
            result = inner(*given, **named)
            steps += 1
            if steps == moment:
                os._exit(9)
            return result

        return step

    for module, name in ((shards, "save_file"), (shards, "sync"), (publish, "sync"), (publish, "swap")):
        setattr(module, name, counted(getattr(module, name)))
    try:
        save_model(model, target, format="released", shard_bytes=1_500_000)
    except BaseException:
        os._exit(1)
    os._exit(0)


def test_a_kill_at_any_moment_leaves_a_whole_model(make_model: Callable, debug: ModelConfig, target: Path) -> None:
    old, new = make_model(debug), make_model(debug, seed=1)
    outcomes = []
    for moment in range(1, 40):
        save_model(old, target)
        child = os.fork()
        if child == 0:
            _die_after(moment, target, new)
        code = os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
        assert code in (0, 9)
        loaded = load_model(target)
        replaced = torch.equal(loaded.embed.weight, new.embed.weight)
        assert_same(loaded, new if replaced else old)
        outcomes.append((code, replaced))
        if code == 0:
            break
    # Two shards and the index written and synced, config.json, directory: then the swap, then one sync.
    assert outcomes == [(9, False)] * (len(outcomes) - 3) + [(9, True)] * 2 + [(0, True)] and len(outcomes) > 9
    save_model(old, target)
    assert os.listdir(target.parent) == ["model"], "leftovers are swept by the next save"
