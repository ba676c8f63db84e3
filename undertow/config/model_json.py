"""Reading and writing `config.json`: Undertow's own, the released one and transformers' `deepseek_v4`."""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

from pydantic import ValidationError

from undertow.config.dialects import EXTRA, EXTRA_FIELDS, HEAVY, SHARED, SLIDING, SPARSE, translate
from undertow.config.errors import ConfigError
from undertow.config.model import ModelConfig
from undertow.config.presets import nearest
from undertow.config.reading import read_regular

MODEL_TYPE = "undertow"
"""`model_type` of Undertow's own file; the other two say `deepseek_v4`."""

FORMAT_VERSION = 1

_LARGEST_FILE = 1 << 20

_FOREIGN = {"model_type": "deepseek_v4", "architectures": ["DeepseekV4ForCausalLM"]}
_SETTINGS = {
    **{"attention_bias": False, "attention_dropout": 0.0, "hidden_act": "silu", "norm_topk_prob": True},
    **{"num_key_value_heads": 1, "scoring_func": "sqrtsoftplus", "tie_word_embeddings": False, "use_cache": True},
}


_INSTEAD = "use the format 'released' or 'undertow'"


def read_config(path: Path) -> ModelConfig:
    """The model a `config.json` describes, or the one in the directory `path`.

    Raises `ConfigError` for a file that is missing or no JSON, a foreign architecture, and keys that are unknown,
    missing, contradictory or ask for something Undertow does not build.
    """
    file = path / "config.json" if path.is_dir() else path
    return config_of(_read_json(file), str(file))


def config_of(values: dict[str, Any], where: str) -> ModelConfig:
    """The model that the object of a `config.json` describes; `where` names it in errors. Raises as `read_config`."""
    model_type = values.get("model_type")
    if model_type is None and values.get("architectures") == _FOREIGN["architectures"]:
        model_type = _FOREIGN["model_type"]
    if model_type == MODEL_TYPE:
        return _validated(_own_fields(values, where), where)
    if model_type != _FOREIGN["model_type"]:
        said = "names no model_type" if model_type is None else f"describes a {model_type!r} model"
        raise ConfigError(f"{where}: {said}; Undertow reads {_FOREIGN['model_type']!r} and its own {MODEL_TYPE!r}")
    try:
        fields = translate(values)
    except ConfigError as error:
        raise ConfigError(f"{where}: {error}") from None
    return _validated(fields, where)


def released_config(config: ModelConfig, dtype: str = "bfloat16") -> dict[str, Any]:
    """`config.json` of the released checkpoints, without their quantisation; `dtype` is that of the weights.

    A ratio other than 4 (CSA) and 128 (HCA) is spelled a second time the way transformers needs it.
    """
    values: dict[str, Any] = {**_FOREIGN, **_SETTINGS, **_fields(config, SHARED), "topk_method": "noaux_tc"}
    values |= _fields(config, ("qk_rope_head_dim", "num_hash_layers", "compress_ratios"))
    values |= {"rope_scaling": {"type": "yarn", **config.rope_scaling.model_dump()}, "torch_dtype": dtype}
    heavy = _heavy_ratios(config)
    if (config.csa_ratio != 4 or heavy - {128}) and len(heavy) < 2:
        values |= _layer_types(config)
    return values | _extra(config)


def transformers_config(config: ModelConfig, dtype: str = "float32") -> dict[str, Any]:
    """`config.json` of transformers' `deepseek_v4`; `dtype` is that of the weights.

    Raises `ConfigError` for what transformers cannot express: an indexer with a query rank of its own, or HCA layers
    of several ratios.
    """
    if config.indexer == "own_rank":
        raise ConfigError(f"indexer own_rank: transformers has the released query path alone; {_INSTEAD}")
    if len(heavy := _heavy_ratios(config)) > 1:
        raise ConfigError(
            f"compress_ratios: transformers has one HCA ratio a model, here are {sorted(heavy)}; {_INSTEAD}"
        )
    factor = config.qk_rope_head_dim / config.head_dim
    if int(config.head_dim * factor) != config.qk_rope_head_dim:
        factor = math.nextafter(factor, 1.0)
    main = {"rope_type": "default", "rope_theta": config.rope_theta, "partial_rotary_factor": factor}
    yarn = {"rope_type": "yarn", **config.rope_scaling.model_dump(), "attention_factor": 1.0}
    compress = {**yarn, "rope_theta": config.compress_rope_theta, "partial_rotary_factor": factor}
    values: dict[str, Any] = {**_FOREIGN, **_SETTINGS, **_fields(config, SHARED), **_layer_types(config)}
    values["dtype"] = dtype
    values["mlp_layer_types"] = ["hash_moe" if config.is_hash(i) else "moe" for i in range(config.num_hidden_layers)]
    values |= {"partial_rotary_factor": factor, "rope_parameters": {"main": main, "compress": compress}}
    return values | _extra(config, without=("csa_ratio",))


def undertow_config(config: ModelConfig) -> dict[str, Any]:
    """Undertow's own `config.json`: every field under its `ModelConfig` name."""
    return {"model_type": MODEL_TYPE, "format_version": FORMAT_VERSION, **config.model_dump(mode="json")}


def _fields(config: ModelConfig, names: tuple[str, ...]) -> dict[str, Any]:
    dumped = config.model_dump(mode="json")
    return {name: dumped[name] for name in names}


def _extra(config: ModelConfig, without: tuple[str, ...] = ()) -> dict[str, Any]:
    """Undertow's own fields where they differ from what a foreign reader assumes."""
    odd = {
        name: getattr(config, name)
        for name in EXTRA_FIELDS
        if name not in without and getattr(config, name) != ModelConfig.model_fields[name].default
    }
    return {EXTRA: odd} if odd else {}


def _heavy_ratios(config: ModelConfig) -> set[int]:
    return {ratio for ratio in config.compress_ratios if ratio not in (0, config.csa_ratio)}


def _layer_types(config: ModelConfig) -> dict[str, Any]:
    names = {"swa": SLIDING, "csa": SPARSE, "hca": HEAVY}
    heavy = next(iter(_heavy_ratios(config)), 128)
    return {
        "layer_types": [names[config.kind(layer)] for layer in range(config.num_hidden_layers)],
        "compress_rates": {SPARSE: config.csa_ratio, HEAVY: heavy},
    }


def _own_fields(values: dict[str, Any], where: str) -> dict[str, Any]:
    fields = {key: value for key, value in values.items() if key not in ("model_type", "format_version")}
    version = values.get("format_version", FORMAT_VERSION)
    if version != FORMAT_VERSION:
        raise ConfigError(f"{where}: format_version {version!r}, this release reads {FORMAT_VERSION}; update undertow")
    for key in fields:
        if key not in ModelConfig.model_fields:
            raise ConfigError(f"{where}: unknown key {key!r}{nearest(key, list(ModelConfig.model_fields))}")
    return fields


def _validated(fields: dict[str, Any], where: str) -> ModelConfig:
    # Strict, so that "4" and true are no numbers; through JSON, where strict mode takes a list for a tuple.
    try:
        return ModelConfig.model_validate_json(json.dumps(fields), strict=True)
    except ValidationError as error:
        said = []
        for item in error.errors():
            name = ".".join(str(part) for part in item["loc"])
            given = f" (given {item['input']!r})" if name and item["type"] != "missing" else ""
            said.append(f"{name}{': ' if name else ''}{item['msg'].removeprefix('Value error, ')}{given}")
        raise ConfigError(f"{where}: {'; '.join(said)}") from None


def _read_json(file: Path) -> dict[str, Any]:
    try:
        values = json.loads(
            read_regular(file, _LARGEST_FILE).decode("utf-8"), object_pairs_hook=_unique, parse_constant=_no_constant
        )
    except FileNotFoundError:
        raise ConfigError(f"{file}: no such file; a model directory holds config.json and safetensors files") from None
    except OSError as error:
        raise ConfigError(f"{file}: cannot be read ({error.strerror})") from None
    except UnicodeDecodeError:
        raise ConfigError(f"{file}: not a UTF-8 text") from None
    except json.JSONDecodeError as error:
        raise ConfigError(f"{file}, line {error.lineno}: not valid JSON ({error.msg})") from None
    except RecursionError:
        raise ConfigError(f"{file}: brackets are nested too deep; a flat JSON object is expected") from None
    except ValueError as error:
        raise ConfigError(f"{file}: {error}") from None
    if not isinstance(values, dict):
        raise ConfigError(f"{file}: a JSON object is expected, it holds a {type(values).__name__}")
    return values


def _unique(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    values = dict(pairs)
    if len(values) < len(pairs):
        names = [name for name, _ in pairs]
        raise ValueError(f"key {next(name for name in names if names.count(name) > 1)!r} is given twice")
    return values


def _no_constant(name: str) -> Any:
    raise ValueError(f"{name} is no number that JSON or a model knows")
