"""Every bad model directory gets one line that tells everything wrong with it."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from undertow.checkpoint.directory import WRITE_FORMATS, load_model, save_model
from undertow.checkpoint.publish import previous_of
from undertow.config.errors import ConfigError, InputError
from undertow.model.transformer import Transformer

WEIGHTS = "model.safetensors"


def change(target: Path, edit: Callable[[dict], dict]) -> None:
    tensors = {name: tensor.clone() for name, tensor in load_file(target / WEIGHTS).items()}
    save_file(edit(tensors), target / WEIGHTS)


def configure(target: Path, **changes: object) -> None:
    values = json.loads((target / "config.json").read_text())
    (target / "config.json").write_text(json.dumps({**values, **changes}))


def refused(target: Path, error: type[InputError] = InputError) -> str:
    with pytest.raises(error) as caught:
        load_model(target)
    message = str(caught.value)
    assert "\n" not in message and str(target) in message and caught.value.exit_code == 2
    return message


def test_every_fault_is_told_at_once(model: Transformer, target: Path) -> None:
    def spoil(tensors: dict) -> dict:
        del tensors["layers.1.attn.wq_a.weight"], tensors["layers.4.ffn.experts.3.w1.weight"]
        tensors["layers.9.attn.wq_a.weight"] = torch.ones(1)
        tensors["norm.weight"] = torch.ones(65)
        tensors["head.weight"][3, 3] = float("nan")
        tensors["layers.2.hc_attn_fn"][0, 0] = float("inf")
        tensors["layers.0.ffn.gate.tid2eid"][7, 1] = 8
        tensors["embed.weight"] = tensors["embed.weight"].int()
        return tensors

    save_model(model, target, format="released")
    change(target, spoil)
    message = refused(target)
    for part in (
        "2 missing (layers.1.attn.wq_a.weight, layers.4.ffn.experts.3.w1.weight)",
        "1 surplus (layers.9.attn.wq_a.weight)",
        "1 misshapen (norm.weight is [65], [64] is expected)",
        "1 of a wrong type (embed.weight is I32, one of F64, F32, BF16, F16 is expected)",
        "2 not finite (layers.2.hc_attn_fn, head.weight)",
        "1 with experts out of range (layers.0.ffn.gate.tid2eid holds 8, 0 to 7 are allowed)",
    ):
        assert part in message


def test_many_faults_are_counted(model: Transformer, target: Path) -> None:
    save_model(model, target)
    change(target, lambda t: {name: tensor for name, tensor in t.items() if ".hc_" not in name})
    assert "39 missing (layers.0.hc_attn.fn, layers.0.hc_attn.base, layers.0.hc_attn.scale, ...)" in refused(target)


@pytest.mark.parametrize(
    ("row", "message"),
    [
        (
            None,
            "hash table (layers.0.ffn.gate.tid2eid is unfilled, all zeros as transformers initialises it",
        ),
        ([3, 3], "layers.0.ffn.gate.tid2eid names an expert twice in a row; fill it before saving"),
        ([-1, 3], "layers.0.ffn.gate.tid2eid holds -1, 0 to 7 are allowed"),
    ],
)
def test_unusable_hash_tables(row: list[int] | None, message: str, model: Transformer, target: Path) -> None:
    def spoil(tensors: dict) -> dict:
        table = tensors["layers.0.ffn.gate.tid2eid"]
        table[:] = 0 if row is None else table
        table[5] = torch.tensor(row or [0, 0])
        return tensors

    save_model(model, target)
    change(target, spoil)
    assert message in refused(target)


@pytest.mark.parametrize("format", WRITE_FORMATS)
def test_mtp_blocks_that_differ(format: str, model: Transformer, target: Path) -> None:
    save_model(model, target, format=format)
    ratios = {"compress_ratios": [0, 0, 4, 8, 4]} if format != "transformers" else {}
    configure(target, num_nextn_predict_layers=0, **ratios)
    message = refused(target)
    assert "surplus (mtp.0." in message
    assert message.endswith("; the files hold 1 MTP blocks, config.json says 0: set num_nextn_predict_layers to 1")

    configure(target, num_nextn_predict_layers=1, **{key: [*value, 0] for key, value in ratios.items()})
    change(target, lambda t: {name: tensor for name, tensor in t.items() if not name.startswith("mtp.")})
    message = refused(target)
    assert "missing (mtp.0." in message
    assert message.endswith(": set num_nextn_predict_layers to 0") and "transformers drops them" in message


def test_a_quantised_weight_needs_its_scale(model: Transformer, target: Path) -> None:
    def quantise(tensors: dict) -> dict:
        return {**tensors, "layers.1.attn.wq_a.weight": torch.ones(24, 32, dtype=torch.int8)}

    save_model(model, target, format="released")
    change(target, quantise)
    message = refused(target)
    assert "1 without a scale (layers.1.attn.wq_a.weight is I8, which needs layers.1.attn.wq_a.scale)" in message


def test_truncated_shard_is_named(model: Transformer, target: Path) -> None:
    save_model(model, target, shard_bytes=500_000)
    shard = target / "model-00002-of-00005.safetensors"
    shard.write_bytes(shard.read_bytes()[:-100])
    assert f"{shard}: truncated" in refused(target)


def test_foreign_directories(model: Transformer, target: Path) -> None:
    assert "no such directory; models are read from disk, none are downloaded" in refused(target)
    save_model(model, target)
    change(target, lambda t: {f"model.layers.{i}.self_attn.q_proj.weight": torch.ones(2) for i in range(8)})
    assert "(model.layers.0.self_attn.q_proj.weight, " in (message := refused(target))
    assert "follow no naming of a DeepSeek-V4 model" in message
    configure(target, model_type="llama")
    assert "describes a 'llama' model" in refused(target, ConfigError)
    (target / "config.json").unlink()
    assert "config.json: no such file" in refused(target, ConfigError)
    assert "is a file; a model is loaded from the directory" in refused(target / WEIGHTS)


def test_an_interrupted_swap_is_told(model: Transformer, target: Path) -> None:
    save_model(model, target)
    target.rename(previous_of(target))
    assert "an interrupted save left the model at" in refused(target)


def test_float64_is_no_quantised_type(model: Transformer, target: Path) -> None:
    save_model(model, target)
    change(target, lambda tensors: {n: t.double() if t.is_floating_point() else t for n, t in tensors.items()})
    for dtype in (torch.float64, torch.float32):
        loaded = load_model(target, dtype=dtype)
        assert loaded.embed.weight.dtype == dtype
        assert torch.equal(loaded.embed.weight, model.embed.weight.to(dtype))


def test_a_config_of_brackets_is_one_line(model: Transformer, target: Path) -> None:
    save_model(model, target)
    (target / "config.json").write_text("[" * 100_000)
    assert "config.json: brackets are nested too deep" in refused(target, ConfigError)
