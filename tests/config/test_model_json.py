"""config.json in three dialects: what is read, what is written, and every way to be refused."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from tests.config.shapes import configs
from undertow.config.errors import ConfigError
from undertow.config.model import ModelConfig
from undertow.config.model_json import read_config, released_config, transformers_config, undertow_config
from undertow.config.presets import PRESETS

# The published file of DeepSeek-V4-Flash, every key of it.
FLASH: dict[str, Any] = {
    "architectures": ["DeepseekV4ForCausalLM"], "attention_bias": False, "attention_dropout": 0.0, "bos_token_id": 0,
    "eos_token_id": 1, "expert_dtype": "fp4", "hc_eps": 1e-06, "hc_mult": 4, "hc_sinkhorn_iters": 20, "head_dim": 512,
    "hidden_act": "silu", "hidden_size": 4096, "index_head_dim": 128, "index_n_heads": 64, "index_topk": 512,
    "initializer_range": 0.02, "max_position_embeddings": 1048576, "model_type": "deepseek_v4",
    "moe_intermediate_size": 2048, "n_routed_experts": 256, "n_shared_experts": 1, "norm_topk_prob": True,
    "num_attention_heads": 64, "num_experts_per_tok": 6, "num_hidden_layers": 43, "num_hash_layers": 3,
    "num_key_value_heads": 1, "num_nextn_predict_layers": 1, "o_groups": 8, "o_lora_rank": 1024, "q_lora_rank": 1024,
    "qk_rope_head_dim": 64, "rms_norm_eps": 1e-06, "rope_theta": 10000, "routed_scaling_factor": 1.5,
    "quantization_config": {
        "activation_scheme": "dynamic", "fmt": "e4m3", "quant_method": "fp8", "scale_fmt": "ue8m0",
        "weight_block_size": [128, 128],
    },
    "rope_scaling": {
        "beta_fast": 32, "beta_slow": 1, "factor": 16, "original_max_position_embeddings": 65536, "type": "yarn",
    },
    "scoring_func": "sqrtsoftplus", "sliding_window": 128, "swiglu_limit": 10.0, "tie_word_embeddings": False,
    "topk_method": "noaux_tc", "torch_dtype": "bfloat16", "transformers_version": "4.57.1", "use_cache": True,
    "vocab_size": 129280, "compress_rope_theta": 160000, "compress_ratios": [0, 0, *[4, 128] * 20, 4, 0],
}  # fmt: skip


def write(folder: Path, values: object) -> Path:
    (folder / "config.json").write_text(values if isinstance(values, str) else json.dumps(values))
    return folder


def debug(**changes: Any) -> dict[str, Any]:
    """The released spelling of v4-debug with ratios 4 and 128, and changes; None removes a key."""
    config = ModelConfig.from_preset("v4-debug", compress_ratios=(0, 0, 4, 128, 4, 0))
    values = {**released_config(config), **changes}
    return {key: value for key, value in values.items() if value is not None}


def hugging(**changes: Any) -> dict[str, Any]:
    """The same for the transformers spelling of v4-debug."""
    values = {**transformers_config(ModelConfig.from_preset("v4-debug")), **changes}
    return {key: value for key, value in values.items() if value is not None}


def test_published_flash_is_the_preset(tmp_path: Path) -> None:
    assert read_config(write(tmp_path, FLASH)) == ModelConfig.from_preset("v4-flash")
    assert ModelConfig.from_json(tmp_path / "config.json").compress_ratios[:6] == (0, 0, 4, 128, 4, 128)


def test_released_writer_gives_the_published_keys_and_values() -> None:
    unquantised = {
        key: value
        for key, value in FLASH.items()
        if key not in ("expert_dtype", "quantization_config", "transformers_version")
    }
    assert released_config(ModelConfig.from_preset("v4-flash")) == unquantised


@pytest.mark.parametrize("name", PRESETS)
def test_presets_survive_every_dialect(name: str, tmp_path: Path) -> None:
    config = ModelConfig.from_preset(name)
    for values in (undertow_config(config), released_config(config), transformers_config(config, "bfloat16")):
        assert read_config(write(tmp_path, values)) == config


@given(config=configs())
@settings(max_examples=80, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
def test_any_shape_survives_own_and_released(config: ModelConfig, tmp_path: Path) -> None:
    assert read_config(write(tmp_path, undertow_config(config))) == config
    assert read_config(write(tmp_path, released_config(config))) == config


@given(config=configs(heavy_ratios=1, indexers=("shared",)))
@settings(max_examples=80, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
def test_any_expressible_shape_survives_transformers(config: ModelConfig, tmp_path: Path) -> None:
    assert read_config(write(tmp_path, transformers_config(config))) == config


def test_own_fields_travel_in_one_extra_key_only_when_not_default() -> None:
    assert "undertow" not in released_config(ModelConfig.from_preset("v4-debug"))
    odd = ModelConfig.from_preset("v4-debug", index_hadamard=False, indexer="own_rank")
    assert released_config(odd)["undertow"] == {"indexer": "own_rank", "index_hadamard": False}
    plain = ModelConfig.from_preset("v4-debug", index_hadamard=False)
    assert transformers_config(plain)["undertow"] == {"index_hadamard": False}


def test_transformers_cannot_express_everything() -> None:
    with pytest.raises(ConfigError, match="indexer own_rank: transformers has the released query path alone; use the"):
        transformers_config(ModelConfig.from_preset("v4-debug", indexer="own_rank"))
    two = ModelConfig.from_preset("v4-debug", compress_ratios=(0, 16, 4, 8, 4, 0))
    with pytest.raises(ConfigError, match=r"one HCA ratio a model, here are \[8, 16\]; use the format 'released'"):
        transformers_config(two)


@pytest.mark.parametrize("ratios", [[0, 0, 4, 128, 4], [0, 0, 4, 128, 4, 0]])
def test_ratios_with_and_without_the_mtp_entry(ratios: list[int], tmp_path: Path) -> None:
    for blocks in (0, 1):
        config = read_config(write(tmp_path, debug(compress_ratios=ratios, num_nextn_predict_layers=blocks)))
        assert config.compress_ratios == (0, 0, 4, 128, 4, *[0] * blocks)


def test_no_yarn_is_factor_one(tmp_path: Path) -> None:
    values = debug()
    values["rope_scaling"] = None
    assert read_config(write(tmp_path, values)).rope_scaling.factor == 1.0


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"model_type": "llama"}, "describes a 'llama' model; Undertow reads 'deepseek_v4' and its own 'undertow'"),
        ({"model_type": None, "architectures": None}, "names no model_type"),
        ({"hidden_sise": 3}, "unknown key 'hidden_sise'; did you mean 'hidden_size'?"),
        ({"dspark_block_size": 5}, "DSpark refresh of V4"),
        ({"scoring_func": "sigmoid"}, "scoring_func is 'sigmoid', the V4 architecture has 'sqrtsoftplus'"),
        ({"topk_method": "greedy"}, "topk_method is 'greedy', the V4 architecture has 'noaux_tc'"),
        ({"norm_topk_prob": False}, "norm_topk_prob is False"),
        ({"norm_topk_prob": 1}, "norm_topk_prob is 1, the V4 architecture has True"),
        ({"hidden_act": "gelu"}, "hidden_act is 'gelu'"),
        ({"tie_word_embeddings": True}, "tie_word_embeddings is True"),
        ({"attention_bias": True}, "attention_bias is True"),
        ({"num_key_value_heads": 8}, "num_key_value_heads is 8, the V4 architecture has 1"),
        ({"n_shared_experts": 2}, "n_shared_experts: Input should be less than or equal to 1 (given 2)"),
        ({"hidden_size": None, "o_groups": None}, "missing hidden_size, o_groups; a V4 configuration"),
        ({"num_hash_layers": None}, "missing num_hash_layers"),
        ({"rope_scaling": None}, "missing rope_scaling"),
        ({"compress_ratios": None}, "missing the layer schedule"),
        ({"compress_ratios": [0, 4]}, "compress_ratios has 2 entries; 5 (num_hidden_layers) or 6 (with MTP)"),
        ({"compress_ratios": [0, 0, 4, 128, 4, 4]}, "compress_ratios ends in [4]; an MTP block is sliding-window"),
        ({"compress_ratios": "0,4"}, "compress_ratios is '0,4', a list with one int a layer is expected"),
        ({"compress_rates": {"heavily_compressed_attention": 8}}, "compress_ratios [0, 0, 4, 128, 4] contradict"),
        ({"hidden_size": "64"}, "hidden_size: Input should be a valid integer (given '64')"),
        ({"hidden_size": -1, "hc_mult": 0}, "hidden_size: Input should be greater than 0 (given -1); hc_mult: "),
        (
            {"num_nextn_predict_layers": 3},
            "num_nextn_predict_layers is 3, the V4 architecture has at most one MTP block",
        ),
        ({"a\nb": 1}, "unknown key 'a\\nb'"),
        ({"num_hidden_layers": True}, "num_hidden_layers is True, a whole number is expected"),
        ({"rope_scaling": {"type": "linear", "factor": 2}}, "rope_scaling has type 'linear'"),
        ({"rope_scaling": {"type": "yarn", "factor": 2}}, "rope_scaling lacks original_max_position_embeddings"),
        ({"undertow": {"csa": 4}}, "unknown key 'undertow.csa'; did you mean 'csa_ratio'?"),
    ],
)
def test_refusals_are_one_line_that_names_the_key(changes: dict[str, Any], message: str, tmp_path: Path) -> None:
    with pytest.raises(ConfigError) as caught:
        read_config(write(tmp_path, debug(**changes)))
    assert message in str(caught.value)
    assert str(caught.value).startswith(str(tmp_path / "config.json")) and "\n" not in str(caught.value)


def _nested(part: str, **changes: Any) -> dict[str, Any]:
    parameters = hugging()["rope_parameters"]
    merged = {**parameters[part], **changes}
    return {**parameters, part: {key: value for key, value in merged.items() if value is not None}}


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"mlp_layer_types": ["moe", "hash_moe", "moe", "moe", "moe"]}, "must be leading 'hash_moe' layers"),
        ({"num_hash_layers": 2}, "contradiction, num_hash_layers gives 2, mlp_layer_types gives 1"),
        ({"layer_types": ["sliding_atention"] * 5}, "'sliding_atention'; did you mean 'sliding_attention'?"),
        ({"compress_rates": {}}, "layer_types names compressed_sparse_attention, compress_rates does not"),
        ({"compress_ratios": [0, 0, 4, 128, 4]}, "contradict layer_types and compress_rates, which give [0, 0, 4, 8"),
        ({"partial_rotary_factor": 0.5}, "contradiction, qk_rope_head_dim gives 8, partial_rotary_factor gives 16"),
        ({"rope_theta": 5.0}, "contradiction, rope_theta gives 5.0, rope_parameters.main.rope_theta gives 10000.0"),
        ({"rope_parameters": {"rope_type": "yarn"}}, "mappings 'main' and 'compress' are expected"),
        ({"rope_parameters": _nested("main", factor=2)}, "sliding-window layers have a plain rotary table"),
        ({"rope_parameters": _nested("compress", attention_factor=None)}, "lacks attention_factor: V4 has 1.0"),
        ({"rope_parameters": _nested("compress", attention_factor=1.3)}, "attention_factor is 1.3; V4 does not scale"),
        ({"rope_parameters": _nested("compress", betafast=1)}, "unknown key 'rope_parameters.compress.betafast'"),
    ],
)
def test_refusals_of_the_transformers_spelling(changes: dict[str, Any], message: str, tmp_path: Path) -> None:
    # transformers writes this key beside the factor, as a file saved by it has it.
    with pytest.raises(ConfigError) as caught:
        read_config(write(tmp_path, hugging(qk_rope_head_dim=8, **changes)))
    assert message in str(caught.value) and "\n" not in str(caught.value)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("{", "config.json, line 1: not valid JSON"),
        ("[1]", "a JSON object is expected, it holds a list"),
        ('{"a": 1, "a": 2}', "key 'a' is given twice"),
        ('{"hc_eps": NaN}', "NaN is no number"),
        ('{"model_type": "undertow", "format_version": 2}', "format_version 2, this release reads 1"),
        ('{"model_type": "undertow", "compress_ratio": []}', "unknown key 'compress_ratio'; did you mean"),
        ('{"model_type": "undertow"}', "compress_ratios: Field required"),
    ],
)
def test_refused_files(text: str, message: str, tmp_path: Path) -> None:
    with pytest.raises(ConfigError) as caught:
        read_config(write(tmp_path, text))
    assert message in str(caught.value) and "\n" not in str(caught.value)


def test_missing_file_and_binary_file(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"no such file; a model directory holds config\.json"):
        read_config(tmp_path)
    (tmp_path / "config.json").write_bytes(b"\xff\xfe{")
    with pytest.raises(ConfigError, match="not a UTF-8 text"):
        read_config(tmp_path)


@given(key=st.text(min_size=1, max_size=12))
@settings(max_examples=50, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
def test_no_stray_key_passes(key: str, tmp_path: Path) -> None:
    with pytest.raises(ConfigError):
        read_config(write(tmp_path, debug(**{key + "?": 1})))


def test_reading_needs_no_torch() -> None:
    code = "import sys, undertow.config.model_json; sys.exit('torch' in sys.modules or 'numpy' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0


JUNK = st.recursive(
    st.none()
    | st.booleans()
    | st.integers(-3, 300)
    | st.floats(allow_nan=False, allow_infinity=False)
    | st.text(max_size=4),
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(st.text(max_size=6), inner, max_size=3),
    max_leaves=5,
)


@given(data=st.data(), junk=JUNK)
@settings(max_examples=300, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
def test_junk_values_are_refused_in_one_line_or_read(data: st.DataObject, junk: Any, tmp_path: Path) -> None:
    spelled = data.draw(st.sampled_from((debug(), hugging(), undertow_config(ModelConfig.from_preset("v4-debug")))))
    holder, keys = spelled, list(spelled)
    key = data.draw(st.sampled_from(keys))
    if isinstance(holder[key], dict) and data.draw(st.booleans()):
        holder = holder[key] = dict(holder[key])
        key = data.draw(st.sampled_from(list(holder)))
    holder[key] = junk
    try:
        assert isinstance(read_config(write(tmp_path, spelled)), ModelConfig)
    except ConfigError as error:
        assert "\n" not in str(error)
