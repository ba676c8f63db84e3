"""Tensors of a model directory under their native names, checked as they are read."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple

import torch

from undertow.checkpoint.faults import Faults, check_values, compare, mtp_hint
from undertow.checkpoint.names import (
    Expected,
    Format,
    Piece,
    detect_spelling,
    expected_tensors,
    native_tensors,
    pieces,
)
from undertow.checkpoint.packed import is_low, read_low, stack, write_numbers
from undertow.checkpoint.publish import previous_of
from undertow.checkpoint.shards import Shards, why_no_directory
from undertow.config.errors import InputError
from undertow.config.model import ModelConfig
from undertow.config.model_json import read_config
from undertow.config.spelling import some
from undertow.quant.quantised import Quantised

if TYPE_CHECKING:  # it imports torch.distributed, which takes a while
    from undertow.checkpoint.shares import Share

_DTYPES = {"float32": torch.float32, "index": torch.int64}


def read_tensors(
    directory: Path, config: ModelConfig, dtypes: Mapping[str, torch.dtype], device: torch.device | str = "cpu"
) -> dict[str, torch.Tensor]:
    """The native tensors of `config` from a directory in any format, cast to `dtypes` (by native name), on `device`.

    FP8 and FP4 are dequantised slice by slice. Each tensor is copied out of the files on its own, so the files may
    change afterwards and nothing is held twice. Raises one `InputError` for all faults together.
    """
    wanted = {name: Wanted(dtype, torch.device(device)) for name, dtype in dtypes.items()}
    return _read(directory, config, wanted)


def read_shares(directory: Path, config: ModelConfig, shares: Mapping[str, Share]) -> dict[str, torch.Tensor]:
    """Of the tensors that `read_tensors` reads those that a rank holds, and of these its rows alone, of the type and on
    the device of the shares. Raises `InputError` for faults of headers anywhere, of numbers in what is read.
    """
    wanted = {name: Wanted(share.tensor.dtype, share.tensor.device, share.rows) for name, share in shares.items()}
    return _read(directory, config, wanted)


class Wanted(NamedTuple):
    """A native tensor to read: its type, its device, and which rows of it, None for all."""

    dtype: torch.dtype
    device: torch.device
    rows: slice | None = None


def _read(directory: Path, config: ModelConfig, wanted: Mapping[str, Wanted]) -> dict[str, torch.Tensor]:
    with Shards(directory) as shards:
        spelling = spelling_of(directory, shards, config)
        expected = expected_tensors(config, spelling)
        faults = Faults(directory)
        fitting = compare(shards.headers, expected, faults)
        state = {}
        for native, tensor in native_tensors(config).items():
            if native not in wanted:
                continue
            dtype, device, rows = wanted[native]
            held = [(part, part, None) for part in pieces(native, tensor.shape, spelling) if part.name in fitting]
            shape = tensor.shape
            if rows is not None and shape:
                held = [found for part, _, _ in held if (found := _part_in(part, rows))]
                shape = (rows.stop - rows.start, *shape[1:])
            if not faults:
                state[native] = torch.empty(shape, dtype=dtype, device=device)
            for part, place, inside in held:
                target = None if faults else place.view(state[native])
                _read_piece(shards, part, tensor, target, config.n_routed_experts, faults, inside)
            if faults:
                state.clear()
        faults.raise_if_any(mtp_hint(shards.headers, expected, config.num_nextn_predict_layers))
    return state


def _part_in(part: Piece, rows: slice) -> tuple[Piece, Piece, slice | None] | None:
    """A piece of a tensor, where it lies in those rows alone, and which of its own rows they are (None for all).

    None for the matrix of an expert that is not among them.
    """
    if not part.place:
        return part, part, rows
    expert, inner = part.place
    assert isinstance(expert, int)
    if not rows.start <= expert < rows.stop:
        return None
    return part, replace(part, place=(expert - rows.start, inner)), None


def read_packed(directory: str | Path, dtype: torch.dtype = torch.bfloat16) -> dict[str, torch.Tensor | Quantised]:
    """The native tensors of a model directory on the CPU, FP8 and FP4 as the `Quantised` that they are stored as.

    All else is as `load_model` has it: weights in `dtype`, the islands in float32. Experts are stacked as there.
    Raises `InputError` as `load_model` does, and for experts that are quantised in ways that do not stack.
    """
    directory = existing_directory(Path(directory))
    config = read_config(directory)
    state: dict[str, torch.Tensor | Quantised] = {}
    with Shards(directory) as shards:
        spelling = spelling_of(directory, shards, config)
        expected = expected_tensors(config, spelling)
        faults = Faults(directory)
        compare(shards.headers, expected, faults)
        faults.raise_if_any(mtp_hint(shards.headers, expected, config.num_nextn_predict_layers))
        for native, tensor in native_tensors(config).items():
            parts = pieces(native, tensor.shape, spelling)
            low = [part for part in parts if _is_packed(shards, part, tensor)]
            if low and len(low) == len(parts):
                read = [(part, read_low(shards, part.name, part.shape)) for part in parts]
                packed = stack(f"{directory}: {native}", read, tensor.shape)
                state[native] = Quantised(packed.payload.clone(), packed.scales.clone(), packed.scheme.block)
                continue
            target = torch.empty(tensor.shape, dtype=_DTYPES.get(tensor.kind, dtype))
            for part in parts:
                _read_piece(shards, part, tensor, part.view(target), config.n_routed_experts, faults)
            state[native] = target
        faults.raise_if_any()
    return state


def existing_directory(directory: Path) -> Path:
    """`directory`, if it is one. Raises `InputError` that says what else is there."""
    if directory.is_dir():
        return directory
    if directory.exists():
        said = why_no_directory(directory)
        raise InputError(f"{directory}: {said}; a model is loaded from the directory that holds config.json")
    previous = previous_of(directory)
    if previous.is_dir():
        raise InputError(f"{directory}: an interrupted save left the model at {previous}; rename it back")
    raise InputError(f"{directory}: {why_no_directory(directory)}; models are read from disk, none are downloaded")


def spelling_of(directory: Path, shards: Shards, config: ModelConfig) -> Format:
    """Which format the tensors of a directory are named in. Raises `InputError` where it is none."""
    spelling = detect_spelling((name for name in shards.headers if not name.endswith(".scale")), config)
    if spelling is None:
        held = some(list(shards.headers))
        raise InputError(f"{directory}: the tensors ({held}) follow no naming of a DeepSeek-V4 model")
    return spelling


def _is_packed(shards: Shards, part: Piece, tensor: Expected) -> bool:
    return tensor.kind == "weight" and is_low(shards.headers[part.name])


def _read_piece(
    shards: Shards,
    part: Piece,
    tensor: Expected,
    target: torch.Tensor | None,
    experts: int,
    faults: Faults,
    rows: slice | None = None,
) -> None:
    """Copy one tensor of the files, or `rows` of it, into `target`, or only look for faults where that is None."""
    if _is_packed(shards, part, tensor):
        packed = read_low(shards, part.name, part.shape)
        if target is not None:
            whole = target if rows is None else torch.empty(part.shape, dtype=target.dtype)
            write_numbers(packed, whole, f"{shards.file_of(part.name)}: {part.name}")
            if rows is not None:
                target.copy_(whole[rows])
        return
    source = shards.read(part.name) if rows is None else shards.read_rows(part.name, rows)
    check_values(part.name, source, tensor.kind, experts, faults)
    # After the first fault the rest is still checked, to tell all at once, but no longer kept.
    if target is not None and not faults:
        target.copy_(source)
