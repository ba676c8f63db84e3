"""Which file each tensor goes to, and where in it, decided before a byte is written."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass

from undertow.checkpoint.convert.source import SCALES
from undertow.checkpoint.convert.target import KeptScale, Unit
from undertow.checkpoint.header import outline
from undertow.config.errors import InputError


@dataclass(frozen=True)
class OutFile:
    """A safetensors file to write: its first bytes, its size, and the offset of each tensor by name."""

    name: str
    head: bytes
    size: int
    offsets: dict[str, int]
    units: tuple[Unit | KeptScale, ...]


def lay_out(units: Sequence[Unit], kept: Sequence[KeptScale], shard_bytes: int) -> list[OutFile]:
    """The files: numbered shards of at most `shard_bytes` of tensors, and the kept scales in one of their own.

    A tensor above `shard_bytes` has a shard of its own; scales are in the file of their weight.
    """
    if shard_bytes < 1:
        raise InputError(f"shard size {shard_bytes}: at least one byte is needed")
    shards: list[list[Unit]] = [[]]
    filled = 0
    for unit in units:
        if shards[-1] and filled + unit.size > shard_bytes:
            shards.append([])
            filled = 0
        shards[-1].append(unit)
        filled += unit.size
    files = [_file(f"model-{i + 1:05}-of-{len(shards):05}.safetensors", shard) for i, shard in enumerate(shards)]
    return [*files, _file(SCALES, list(kept))] if kept else files


def index_of(files: Sequence[OutFile]) -> str:
    """The text of the index of the shards."""
    shards = [file for file in files if file.name != SCALES]
    weight_map = {name: file.name for file in shards for name in file.offsets}
    total = sum(file.size - len(file.head) for file in shards)
    index = {"metadata": {"total_size": total}, "weight_map": dict(sorted(weight_map.items()))}
    return json.dumps(index, indent=2) + "\n"


def _file(name: str, units: Sequence[Unit | KeptScale]) -> OutFile:
    tensors = [tensor for unit in units for tensor in (unit.tensors if isinstance(unit, Unit) else (unit.tensor,))]
    head, size, offsets = outline((tensor.name, tensor.dtype, tuple(tensor.shape)) for tensor in tensors)
    ordered = sorted(units, key=lambda unit: offsets[unit.tensor.name])
    return OutFile(name, head, size, offsets, tuple(ordered))
