"""FP8 and FP4 weights of a model directory: told by their types, read packed or as numbers."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

import torch
from torch import Tensor

from undertow.checkpoint.header import DTYPES
from undertow.checkpoint.names import Piece, scale_name
from undertow.checkpoint.shards import Shards
from undertow.config.errors import InputError
from undertow.quant.blocks import WHOLE
from undertow.quant.quantised import Quantised
from undertow.quant.stored import from_stored

_LOW = ("F8_E4M3", "F8_E4M3FNUZ", "F4", "I8", "U8")
_SLICE = 1 << 22  # elements


def is_low(header: Any) -> bool:
    """Whether a tensor holds FP8 numbers or packed FP4; hash tables, which may be integers, are not asked about."""
    return header.dtype in _LOW


def describe(label: str, weight: Any, scale: Any, shape: tuple[int, ...]) -> Quantised:
    """What a stored weight of `shape` is, from the headers of it and its scale: a `Quantised` on the meta device.

    `label` names file and tensor in the `InputError` of `undertow.quant.stored.from_stored`.
    """
    if scale.dtype not in DTYPES:
        raise InputError(f"{label}: its scale is {scale.dtype}; F8_E8M0 or F32 is expected")
    return from_stored(label, meta_tensor(weight), meta_tensor(scale), shape)


def meta_tensor(header: Any) -> Tensor:
    """A tensor without data of the header's type and shape; the shape of F4 is in numbers, torch's in bytes."""
    shape = header.shape
    if header.dtype == "F4" and shape:
        shape = (*shape[:-1], shape[-1] // 2)
    return torch.empty(shape, dtype=DTYPES[header.dtype], device="meta")


def read_low(shards: Shards, name: str, shape: tuple[int, ...]) -> Quantised:
    """The weight `name` of `shape` as it lies in the mapped file, with its scales."""
    label = f"{shards.file_of(name)}: {name}"
    describe(label, shards.headers[name], shards.headers[scale_name(name)], shape)
    return from_stored(label, shards.read(name), shards.read(scale_name(name)), shape)


def slices(tensor: Quantised) -> Iterator[tuple[slice, Quantised]]:
    """A quantised matrix in ranges of whole block rows, each small; one with three dimensions comes whole."""
    rows, columns = tensor.shape[-2:]
    if len(tensor.shape) != 2 or tensor.scheme.block == WHOLE:
        yield slice(0, tensor.shape[0]), tensor
        return
    high = tensor.scheme.block.rows or 1
    step = max(_SLICE // max(columns, 1) // high, 1) * high
    for begin in range(0, rows, step):
        part = slice(begin, min(begin + step, rows))
        grid = slice(begin // high, -(-part.stop // high))
        yield part, Quantised(tensor.payload[part], tensor.scales[grid], tensor.scheme.block)


def write_numbers(tensor: Quantised, target: Tensor, label: str) -> None:
    """The numbers of `tensor` into `target` of its shape. Raises `InputError` where one is beyond its type."""
    dtype = target.dtype if target.dtype in (torch.float32, torch.bfloat16) else torch.float32
    for rows, part in slices(tensor):
        numbers = part.dequantise(dtype)
        if not bool(numbers.isfinite().all()):
            raise InputError(f"{label}: numbers beyond {dtype}, its scales are too large; check that the file is whole")
        target[rows].copy_(numbers)


def stack(name: str, parts: Sequence[tuple[Piece, Quantised]], shape: tuple[int, ...]) -> Quantised:
    """The packed pieces of the native tensor `name` of `shape`, each at its place, as one.

    Raises `InputError` where they are of several schemes, or where a block of scales would span two pieces.
    """
    first = parts[0][1]
    if not parts[0][0].place:
        return first
    schemes = {part.scheme for _, part in parts}
    if len(schemes) > 1:
        raise InputError(f"{name}: its matrices are quantised in several ways; convert the directory to one")
    scheme = first.scheme
    high = scheme.block.rows
    if high is None:
        raise InputError(
            f"{name}: has one scale for each matrix, and matrices that are stacked need blocks; use load_model "
            "without packed=True"
        )
    payload = torch.empty((*shape[:-1], first.payload.shape[-1]), dtype=torch.uint8)
    scales = torch.empty((shape[0], -(-shape[1] // high), first.scales.shape[-1]), dtype=first.scales.dtype)
    for piece, part in parts:
        expert, rows = piece.place
        assert isinstance(rows, slice)
        if rows.start % high:
            raise InputError(
                f"{name}: moe_intermediate_size is {rows.start}, and FP8 experts in blocks of {scheme.block}, w1 above "
                f"w3, need a multiple of {high}; use load_model without packed=True"
            )
        payload[expert, rows] = part.payload.view(torch.uint8)
        scales[expert, rows.start // high : -(-rows.stop // high)] = part.scales
    return Quantised(payload.view(first.payload.dtype), scales, scheme.block)
