"""The header of a safetensors file, read and checked without trust: where each tensor lies, and of what type it is."""

from __future__ import annotations

import errno
import json
import math
import os
import re
import stat
import struct
from collections.abc import Iterable
from pathlib import Path
from typing import Any, NamedTuple

import torch

from undertow.config.errors import InputError
from undertow.config.spelling import shortened

DTYPES: dict[str, torch.dtype] = {
    **{"F64": torch.float64, "F32": torch.float32, "F16": torch.float16, "BF16": torch.bfloat16},
    **{"I64": torch.int64, "I32": torch.int32, "I16": torch.int16, "I8": torch.int8, "U8": torch.uint8},
    **{"F8_E4M3": torch.float8_e4m3fn, "F8_E4M3FNUZ": torch.float8_e4m3fnuz, "F8_E8M0": torch.float8_e8m0fnu},
    "F4": torch.float4_e2m1fn_x2,
}
"""Types of a header that weights are read from, and torch's."""

BITS = {
    **{"F64": 64, "I64": 64, "U64": 64, "C64": 64, "F32": 32, "I32": 32, "U32": 32, "F16": 16, "BF16": 16, "I16": 16},
    **{"U16": 16, "I8": 8, "U8": 8, "BOOL": 8, "F8_E4M3": 8, "F8_E4M3FNUZ": 8, "F8_E5M2": 8, "F8_E5M2FNUZ": 8},
    **{"F8_E8M0": 8, "F6_E2M3": 6, "F6_E3M2": 6, "F4": 4},
}
"""Bits of an element of each type that the format knows."""

NO_PICKLES = "pickles are never read, since they can run programs; load it with what wrote it and save safetensors"
"""Why a pickle is refused, and the mend."""

LONGEST = 100_000_000
"""Bytes of the longest header that the format allows."""

_RAW = 8
_ALIGNMENT = 8
_SIDES = 64  # more than torch computes with
_PICKLED = re.compile(rb"PK\x03\x04|\x80[\x02-\x05]")  # PyTorch's files: a zip archive with one, or one alone


class Outline(NamedTuple):
    """A safetensors file before it is filled: its first bytes, its size, and where each tensor begins, by name."""

    head: bytes
    size: int
    offsets: dict[str, int]


class Span(NamedTuple):
    """A tensor in a file: type (`BF16`, ...), shape in elements, first byte and the one after the last."""

    dtype: str
    shape: tuple[int, ...]
    begin: int
    end: int


def open_regular(path: Path) -> int:
    """A file handle for reading. Raises `InputError` for what is missing, a loop of links, a pipe or a directory."""
    try:
        handle = os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC)
    except OSError as error:
        raise InputError(f"{path}: cannot be read ({error.strerror})") from None
    mode = os.fstat(handle).st_mode
    if not stat.S_ISREG(mode):
        os.close(handle)
        why = os.strerror(errno.EISDIR) if stat.S_ISDIR(mode) else "a pipe or a device, no file"
        raise InputError(f"{path}: cannot be read ({why})")
    return handle


def read_header(path: Path) -> dict[str, Span]:
    """Every tensor of the safetensors file at `path`, in the order of the bytes.

    Raises `InputError` for a file that is truncated, no safetensors file, or whose header contradicts itself or the
    file's size: the tensors must cover it without gap or overlap.
    """
    handle = open_regular(path)
    try:
        size = os.fstat(handle).st_size
        first = os.pread(handle, _RAW, 0)
        length = struct.unpack("<Q", first)[0] if size >= _RAW else 0
        if _PICKLED.match(first) and length > size:
            raise InputError(f"{path}: is a pickle under another name; {NO_PICKLES}")
        if not 2 <= length <= min(size - _RAW, LONGEST):
            raise _bad(path, f"its header would take {length} of {size} bytes")
        text = b""
        while len(text) < length and (more := os.pread(handle, length - len(text), _RAW + len(text))):
            text += more
    finally:
        os.close(handle)
    return _spans(path, _parsed(path, text), _RAW + length, size)


def outline(tensors: Iterable[tuple[str, str, tuple[int, ...]]]) -> Outline:
    """The file that holds `tensors`, each its name, type as in a header (`BF16`, ...) and shape in elements."""
    # Wide types first: every tensor then begins at a multiple of its element's size, which readers rely on.
    ordered = sorted(tensors, key=lambda tensor: -BITS[tensor[1]])
    header: dict[str, object] = {"__metadata__": {"format": "pt"}}
    relative, at = {}, 0
    for name, dtype, shape in ordered:
        end = at + size_of(dtype, shape)
        header[name] = {"dtype": dtype, "shape": list(shape), "data_offsets": [at, end]}
        relative[name] = at
        at = end
    text = json.dumps(header, separators=(",", ":")).encode()
    text += b" " * (-len(text) % _ALIGNMENT)
    head = len(text).to_bytes(_RAW, "little") + text
    return Outline(head, len(head) + at, {name: len(head) + begin for name, begin in relative.items()})


def size_of(dtype: str, shape: tuple[int, ...]) -> int:
    """Bytes of a tensor; an odd number of half bytes is rounded up."""
    elements = 1
    for side in shape:
        elements *= side
    return -(-elements * BITS[dtype] // _RAW)


def _bad(path: Path, why: str) -> InputError:
    return InputError(f"{path}: truncated or no safetensors file ({why}); copy or download it again")


def _parsed(path: Path, text: bytes) -> dict[str, Any]:
    def unique(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
        values = dict(pairs)
        if len(values) < len(pairs):
            seen: set[str] = set()
            twice = next(name for name, _ in pairs if name in seen or seen.add(name))
            raise _bad(path, f"its header names {twice[:60]!r} twice")
        return values

    try:
        values = json.loads(text.decode("utf-8"), object_pairs_hook=unique)
    except (ValueError, RecursionError):
        raise _bad(path, "its header is no JSON") from None
    if not isinstance(values, dict):
        raise _bad(path, "its header is no JSON object")
    values.pop("__metadata__", None)
    return values


def _spans(path: Path, values: dict[str, Any], start: int, size: int) -> dict[str, Span]:
    spans = {name: _span(path, name, entry, start) for name, entry in values.items()}
    ordered = sorted(spans.items(), key=lambda item: (item[1].begin, item[1].end))
    at = start
    for name, span in ordered:
        if span.begin != at:
            kind = "overlaps the tensor before it" if span.begin < at else "leaves a gap before it"
            raise _bad(path, f"{name[:60]} {kind}: it begins at byte {span.begin}, {at} is expected")
        at = span.end
    if at != size:
        raise _bad(path, f"its tensors end at byte {at}, the file at {size}")
    return dict(ordered)


def _span(path: Path, name: str, entry: Any, start: int) -> Span:
    try:
        dtype, sides, (begin, end) = entry["dtype"], entry["shape"], entry["data_offsets"]
        name.encode()  # half a pair of surrogates is no text
        if not isinstance(dtype, str) or not isinstance(sides, list):
            raise ValueError
        if len(sides) > _SIDES:
            raise _bad(path, f"{name[:60]} has {len(sides)} dimensions, {_SIDES} at most are read")
        shape = tuple(sides)
        if any(type(n) is not int or not 0 <= n < 2**63 for n in (*shape, begin, end)):
            raise ValueError
    except (KeyError, TypeError, ValueError):
        raise _bad(path, f"the entry of {name[:60]} has no dtype, shape and data_offsets") from None
    if dtype not in BITS:
        raise _bad(path, f"{name[:60]} has the unknown type {str(dtype)[:20]!r}")
    told = f"{name[:60]} is {dtype} {shortened(str(list(shape)))}"
    if math.prod(side or 1 for side in shape) >= 2**63:  # beyond what torch counts, even where a side is 0
        raise _bad(path, f"{told}, whose sides are too long")
    if end - begin != size_of(dtype, shape):
        raise _bad(path, f"{told}, which takes {size_of(dtype, shape)} bytes, not {end - begin}")
    return Span(dtype, shape, start + begin, start + end)
