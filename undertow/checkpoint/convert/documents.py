"""`config.json` and the files beside the weights: read with the refreshes of the family, written for the target."""

from __future__ import annotations

import json
import re
import shutil
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from undertow.checkpoint.convert.source import Source
from undertow.checkpoint.convert.target import Unit, Wish
from undertow.checkpoint.header import open_regular
from undertow.checkpoint.names import is_routed
from undertow.checkpoint.publish import TOKENIZER_FILES
from undertow.checkpoint.shards import INDEX
from undertow.config.errors import ConfigError, InputError
from undertow.config.model import ModelConfig
from undertow.config.model_json import MODEL_TYPE, config_of, released_config, transformers_config, undertow_config
from undertow.config.scalars import told
from undertow.quant.formats import E2M1

RECORD = "conversion.json"
SUMS = "SHA256SUMS"

_CARRIED = re.compile(r"README\.md|LICENSE.*|.*\.jinja|tokenizer.*\.(json|model|txt)|vocab\.json|merges\.txt")
_OWN = re.compile(rf"config\.json|{re.escape(INDEX)}|.*\.safetensors|{re.escape(RECORD)}|{SUMS}")
_NUMBERS = ("torch_dtype", "dtype", "quantization_config", "expert_dtype")
_LENGTHS = ("compress_ratios", "layer_types", "mlp_layer_types")
_SPELLED = {"F32": "float32", "BF16": "bfloat16", "F64": "float64", "F16": "float16"}


def read_document(directory: Path) -> tuple[ModelConfig, dict[str, Any]]:
    """The model of a directory, and its `config.json` as it stands.

    A refresh with draft modules that Undertow does not build is read as the same model without any.
    """
    file = directory / "config.json"
    if not (file.exists() or file.is_symlink()):
        raise InputError(f"{file}: no such file; a model directory holds config.json and safetensors files")
    with open(open_regular(file), "rb") as stream:
        values = _parsed(file, stream.read())
    try:
        return config_of(values, str(file)), values
    except ConfigError:
        if not _is_refresh(values):
            raise
    return config_of(_without_drafts(values), str(file)), values


def check_blocks(source: Source, document: dict[str, Any]) -> None:
    """Raise `InputError` where the files hold fewer MTP blocks than a `config.json` without draft modules says."""
    wanted = document.get("num_nextn_predict_layers")
    held = len({name.split(".")[1] for name in source.tensors if name.startswith("mtp.")})
    other = any(key.startswith("dspark_") for key in document)  # whose blocks may be counted otherwise
    if type(wanted) is int and wanted > max(held, 1) and not other:
        raise InputError(
            f"{source.directory / 'config.json'}: num_nextn_predict_layers is {told(wanted)}, the files hold {held} "
            f"MTP block{'' if held == 1 else 's'}; set it to {held}"
        )


def write_documents(source: Source, document: dict[str, Any], wish: Wish, units: Sequence[Unit], target: Path) -> None:
    """`config.json` for what `units` hold, and copies of the tokenizer's and other small files."""
    (target / "config.json").write_text(config_text(source.config, document, wish, units), "utf-8")
    for file in carried_files(source.directory):
        shutil.copyfile(file, target / file.name)


def carried_files(directory: Path) -> list[Path]:
    """Files that a conversion copies: tokenizer, generation defaults, licence, card."""
    files = sorted(directory.iterdir())
    return [f for f in files if (f.name in TOKENIZER_FILES or _CARRIED.fullmatch(f.name)) and f.is_file()]


def left_behind(source: Source) -> list[str]:
    """Names in the directory that a conversion neither reads nor copies, a run's `optimizer.safetensors` among them."""
    taken = {file.name for file in (*carried_files(source.directory), *source.files())}
    names = sorted(path.name for path in source.directory.iterdir() if not path.name.startswith("."))
    return [name for name in names if name not in taken and (not _OWN.fullmatch(name) or name.endswith(".safetensors"))]


def config_text(config: ModelConfig, document: dict[str, Any], wish: Wish, units: Sequence[Unit]) -> str:
    """The text of the target's `config.json`. Raises `ConfigError` for what its format cannot express."""
    return json.dumps(target_document(config, document, wish, units), indent=2) + "\n"


def target_document(config: ModelConfig, document: dict[str, Any], wish: Wish, units: Sequence[Unit]) -> dict[str, Any]:
    """`config.json` of the target. One with released names that had released names keeps all its other keys."""
    dtype = _dtype(units)
    if wish.spelling == "undertow":
        return undertow_config(config)
    if wish.spelling == "transformers":
        return transformers_config(config, dtype)
    foreign = document.get("model_type") != MODEL_TYPE and "rope_parameters" not in document
    values = document if foreign else released_config(config, dtype)
    values = {key: value for key, value in values.items() if key not in _NUMBERS} | {"torch_dtype": dtype}
    return values | _quantisation(units)


def _dtype(units: Sequence[Unit]) -> str:
    """Of the embedding, whatever its name: the first tensor of a forward pass."""
    return _SPELLED.get(units[0].tensor.dtype, "bfloat16")


def _quantisation(units: Sequence[Unit]) -> dict[str, Any]:
    quantised = [unit for unit in units if unit.scheme is not None]
    if not quantised:
        return {}
    routed = next((unit.scheme for unit in quantised if is_routed(unit.tensor.name)), None)
    fp8 = next((unit.scheme for unit in quantised if unit.scheme and unit.scheme.format is not E2M1), None)
    values: dict[str, Any] = {}
    if routed is not None:
        values["expert_dtype"] = "fp4" if routed.format is E2M1 else "fp8"
    if fp8 is not None and fp8.block.rows is not None:
        values["quantization_config"] = {
            "activation_scheme": "dynamic",
            "fmt": fp8.format.name,
            "quant_method": "fp8",
            "scale_fmt": "ue8m0" if fp8.scale == "ue8m0" else "float",
            "weight_block_size": list(fp8.block),
        }
    return values


def _is_refresh(values: dict[str, Any]) -> bool:
    blocks = values.get("num_nextn_predict_layers")
    return any(key.startswith("dspark_") for key in values) or (type(blocks) is int and blocks > 1)


def _without_drafts(values: dict[str, Any]) -> dict[str, Any]:
    kept = {key: value for key, value in values.items() if not key.startswith("dspark_")}
    layers = kept.get("num_hidden_layers")
    for key in _LENGTHS:
        if isinstance(kept.get(key), list) and type(layers) is int:
            kept[key] = kept[key][:layers]
    return kept | {"num_nextn_predict_layers": 0}


def _parsed(file: Path, text: bytes) -> dict[str, Any]:
    try:
        values = json.loads(text)
    except (ValueError, RecursionError) as error:
        raise ConfigError(f"{file}: not valid JSON ({str(error)[:80]})") from None
    if not isinstance(values, dict):
        raise ConfigError(f"{file}: a JSON object is expected, it holds a {type(values).__name__}")
    return values
