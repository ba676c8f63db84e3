"""Model directories: safetensors, `config.json` and tokenizer files, in any of the three formats, in and out."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, Literal

import tokenizers
import torch

from undertow.checkpoint.faults import Faults, check_values
from undertow.checkpoint.names import Format, native_tensors, pieces
from undertow.checkpoint.packed import write_numbers
from undertow.checkpoint.publish import TOKENIZER_FILES, replacing
from undertow.checkpoint.reading import existing_directory, read_packed, read_tensors
from undertow.checkpoint.shards import SHARD_BYTES, Entry, write_shards
from undertow.config.errors import InputError
from undertow.config.model import ModelConfig
from undertow.config.model_json import read_config, released_config, transformers_config, undertow_config
from undertow.config.presets import nearest
from undertow.model.packed import can_hold, hold, refuse_packed
from undertow.model.transformer import Transformer
from undertow.ops import Ops
from undertow.quant.quantised import Quantised

WriteFormat = Literal["undertow", "transformers", "released"]
WRITE_FORMATS: tuple[WriteFormat, ...] = ("undertow", "transformers", "released")
DTYPES = (torch.float32, torch.bfloat16, torch.float64)


def load_model(
    path: str | Path,
    dtype: torch.dtype = torch.float32,
    device: torch.device | str = "cpu",
    ops: Ops | None = None,
    packed: bool = False,
) -> Transformer:
    """The model in the directory `path`: released, transformers or Undertow names, told apart by the names themselves.

    Weights are cast to `dtype`, FP8 and FP4 dequantised, the float32 islands stay float32. Tensors go one by one to
    `device`; nothing is held twice. Raises `ConfigError` for the configuration and one `InputError` for everything that
    is wrong with the tensors: missing, surplus, misshapen, not finite, an unfilled hash table, a truncated file, FP8 or
    FP4 under a wrong label.

    With `packed`, matrices that are stored as FP8 or FP4 stay so where `undertow.model.packed.can_hold` says that they
    may, and the model runs forward alone: no parameter asks for a gradient. What is read is held once more until it is
    on `device`. Raises `InputError` for float64, and as `undertow.checkpoint.reading.read_packed` does.
    """
    directory = existing_directory(Path(path))
    if dtype not in DTYPES:
        raise InputError(f"dtype {dtype}: a model is loaded as {', '.join(map(str, DTYPES))}")
    if packed and dtype is torch.float64:
        raise InputError("dtype torch.float64 with packed=True: codes are read as torch.float32 or torch.bfloat16")
    config = read_config(directory)
    model = Transformer(config, ops=ops or Ops(device=device), device="meta", dtype=dtype)
    if packed:
        _fill_packed(model, directory, dtype, device)
        return model
    dtypes = {name: tensor.dtype for name, tensor in model.state_dict().items()}
    model.load_state_dict(read_tensors(directory, config, dtypes, device), strict=True, assign=True)
    return model


def _fill_packed(model: Transformer, directory: Path, dtype: torch.dtype, device: torch.device | str) -> None:
    state, numbers = read_packed(directory, dtype), {}
    for name in list(state):
        tensor = state.pop(name)
        if isinstance(tensor, Quantised) and can_hold(model, name):
            hold(model, name, tensor.to(device))
            continue
        if isinstance(tensor, Quantised):
            packed, tensor = tensor, torch.empty(tensor.shape, dtype=dtype)
            write_numbers(packed, tensor, f"{directory}: {name}")
        numbers[name] = tensor.to(device)
    model.load_state_dict(numbers, strict=True, assign=True)
    model.requires_grad_(False)


def save_model(
    model: Transformer,
    path: str | Path,
    format: str = "undertow",
    tokenizer: Any = None,
    shard_bytes: int = SHARD_BYTES,
) -> None:
    """Write `model` as a directory that Undertow, and in two of the formats transformers, loads bit for bit.

    `format` is `undertow`, `transformers` or `released`; the dtypes are the model's. `tokenizer` is a directory, a
    `tokenizer.json`, or an object with `save(directory)` or `save_pretrained(directory)`; without one, tokenizer files
    already in `path` stay. An existing model at `path` is replaced in one step, and kept if anything fails.
    Raises `ConfigError` for what the format cannot express, `InputError` for values that are not finite or a `path`
    that holds something else.
    """
    if format not in WRITE_FORMATS:
        hint = nearest(format, list(WRITE_FORMATS))
        raise InputError(f"unknown format '{format}'{hint} (formats: {', '.join(WRITE_FORMATS)})")
    refuse_packed(model, "the model is not saved")
    state = model.state_dict()
    document = _document(model.config, format, state["embed.weight"].dtype)
    write_directory(Path(path), model.config, state, document, format, tokenizer, shard_bytes)


def write_directory(
    path: Path,
    config: ModelConfig,
    state: dict[str, torch.Tensor],
    document: dict[str, Any],
    spelling: Format,
    tokenizer: Any = None,
    shard_bytes: int = SHARD_BYTES,
) -> None:
    """Write native tensors `state` under the names of `spelling`, with `document` as `config.json`, in one step."""
    faults, wanted = Faults(path), native_tensors(config)
    for name in [*wanted, *state]:
        if (name in wanted) is not (name in state):
            faults.add("missing" if name in wanted else "surplus", name)
    faults.raise_if_any()
    for name, tensor in state.items():
        check_values(name, tensor, wanted[name].kind, config.n_routed_experts, faults)
    faults.raise_if_any("; the model is not saved")
    with replacing(path) as fresh:
        write_shards(fresh, _entries(state, spelling), shard_bytes)
        (fresh / "config.json").write_text(json.dumps(document, indent=2) + "\n", "utf-8")
        if tokenizer is not None:
            _save_tokenizer(tokenizer, fresh)


def _document(config: ModelConfig, format: WriteFormat, dtype: torch.dtype) -> dict[str, Any]:
    spelled = str(dtype).removeprefix("torch.")
    if format == "undertow":
        return undertow_config(config)
    return transformers_config(config, spelled) if format == "transformers" else released_config(config, spelled)


def _entries(state: dict[str, torch.Tensor], spelling: Format) -> Iterator[Entry]:
    for native, tensor in state.items():
        for piece in pieces(native, tuple(tensor.shape), spelling):
            view = piece.view(tensor)
            yield Entry(piece.name, view.numel() * view.element_size(), _giver(view))


def _giver(view: torch.Tensor) -> Callable[[], torch.Tensor]:
    return lambda: view


def _save_tokenizer(tokenizer: Any, directory: Path) -> None:
    if isinstance(tokenizer, (str, Path)):
        source = Path(tokenizer)
        files = [source / name for name in TOKENIZER_FILES] if source.is_dir() else [source]
        present = [file for file in files if file.is_file()]
        if not any(file.name == "tokenizer.json" for file in present):
            raise InputError(f"tokenizer {source}: a tokenizer.json, or a directory that holds one, is expected")
        for file in present:
            shutil.copyfile(file, directory / file.name)
    elif isinstance(tokenizer, tokenizers.Tokenizer):
        tokenizer.save(str(directory / "tokenizer.json"))
    elif hasattr(tokenizer, "save_pretrained"):
        tokenizer.save_pretrained(str(directory))
    elif hasattr(tokenizer, "save"):
        tokenizer.save(directory)
    else:
        raise InputError(f"tokenizer: a {type(tokenizer).__name__} is neither a path nor has save_pretrained or save")
