"""The directory that is converted: every tensor where it lies, read part by part."""

from __future__ import annotations

import os
from pathlib import Path
from types import TracebackType
from typing import NamedTuple

import torch
from torch import Tensor

from undertow.checkpoint.convert.kept import grid_part
from undertow.checkpoint.faults import Faults, compare, mtp_hint
from undertow.checkpoint.folder import latest_checkpoint
from undertow.checkpoint.header import DTYPES, Span, open_regular, read_header
from undertow.checkpoint.names import Format, detect_spelling, expected_tensors, native_tensors, pieces, scale_name
from undertow.checkpoint.packed import describe, is_low
from undertow.checkpoint.shards import Header, agree_with_index, listed_files, why_no_directory
from undertow.config.errors import InputError, UndertowError
from undertow.config.model import ModelConfig
from undertow.config.spelling import shortened, some
from undertow.quant.formats import E2M1
from undertow.quant.quantised import Quantised
from undertow.quant.stored import from_stored

SCALES = "scales.safetensors"
"""Scales of the quantised tensors that a directory was converted from; no index names it, so that no one loads it."""


_OPEN = 16
"""Files that are open at most: a directory may have more of them than a process may open."""


class Place(NamedTuple):
    """A tensor: its file, and where in it."""

    file: Path
    span: Span


def matrix_of(shape: tuple[int, ...]) -> tuple[int, int]:
    """Rows and columns of a tensor as one matrix: a vector is a row."""
    rows = 1
    for side in shape[:-1]:
        rows *= side
    return rows, shape[-1] if shape else 1


def bytes_before(place: Place, row: int) -> int:
    """Bytes of a tensor as a matrix before a row. Rows of half bytes may end within one; the whole never does."""
    return (place.span.end - place.span.begin) * row // max(matrix_of(place.span.shape)[0], 1)


class Source:
    """A model directory, checked as far as headers tell. Use as a context manager: it keeps some files open.

    `tensors` has all that the index or the one file names, `low` the quantised weights among them (on the meta device),
    `drafts` the tensors of draft modules that `config` does not describe, `kept` the scales beside the index.
    """

    def __init__(self, directory: Path, config: ModelConfig):
        self.directory, self.config = directory, config
        self._open: dict[Path, int] = {}
        listed = listed_files(directory)
        self.tensors: dict[str, Place] = {}
        for file in listed:
            self._scan(directory / file)
        agree_with_index(directory, listed, {name: place.file.name for name, place in self.tensors.items()})
        extra = directory / SCALES
        spans = read_header(extra) if extra.exists() or extra.is_symlink() else {}
        self.kept = {name: Place(extra, span) for name, span in spans.items()}
        self.spelling: Format = self._spelling()
        self.drafts, self.low = self._checked()

    def __enter__(self) -> Source:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        for handle in self._open.values():
            os.close(handle)
        self._open.clear()

    def files(self) -> list[Path]:
        """The tensor files, in order."""
        return sorted({place.file for place in (*self.tensors.values(), *self.kept.values())})

    def label(self, name: str) -> str:
        """A tensor as errors name it."""
        return f"{self.tensors[name].file}: {shortened(name, 200)}"

    def handle(self, file: Path) -> int:
        """The open file, until `_OPEN` others were asked for."""
        held = self._open.pop(file, None)
        if held is None:
            if len(self._open) >= _OPEN:
                os.close(self._open.pop(next(iter(self._open))))
            held = open_regular(file)
        self._open[file] = held  # the last is the one used last
        return held

    def read(self, name: str, rows: slice, columns: slice) -> Tensor | Quantised:
        """A part of a tensor as a matrix; of a quantised one from whole blocks, with its scales."""
        low, place = self.low.get(name), self.tensors[name]
        if low is None:
            return self.region(place, rows, columns)
        shape = (rows.stop - rows.start, columns.stop - columns.start)
        if low.scheme.format is E2M1:
            columns_held = slice(columns.start // 2, columns.stop // 2)
        else:
            columns_held = columns
        payload = self.region(place, rows, columns_held)
        scale = self.tensors[scale_name(name)]
        scales = self.region(scale, *grid_part(rows, columns, low.scheme.block))
        return from_stored(self.label(name), payload, scales, shape)

    def region(self, place: Place, rows: slice, columns: slice) -> Tensor:
        """A part of a tensor in memory of its own; the columns of F4 count bytes."""
        dtype = DTYPES[place.span.dtype]
        size = dtype.itemsize
        _, width = matrix_of(place.span.shape)
        width = width // 2 if place.span.dtype == "F4" else width
        high, wide = rows.stop - rows.start, columns.stop - columns.start
        held = bytearray(high * wide * size)
        view, handle = memoryview(held), self.handle(place.file)
        if wide == width:
            self.fill(handle, view, place.span.begin + rows.start * width * size, place.file)
        else:
            for row in range(high):
                at = place.span.begin + ((rows.start + row) * width + columns.start) * size
                self.fill(handle, view[row * wide * size : (row + 1) * wide * size], at, place.file)
        if not held:
            return torch.empty((high, wide), dtype=dtype)
        return torch.frombuffer(held, dtype=torch.uint8).view(dtype).view(high, wide)

    def fill(self, handle: int, view: memoryview, offset: int, file: Path) -> None:
        """Read exactly `view`."""
        done = 0
        while done < len(view):
            count = os.preadv(handle, [view[done:]], offset + done)
            if count == 0:
                raise UndertowError(f"{file}: became shorter while it was read; start again once it is whole")
            done += count

    def _scan(self, file: Path) -> None:
        for name, span in read_header(file).items():
            if name in self.tensors:
                raise InputError(
                    f"{self.directory}: tensor {shortened(name)} lies in both {self.tensors[name].file.name} and "
                    f"{file.name}"
                )
            self.tensors[name] = Place(file, span)

    def _spelling(self) -> Format:
        names = [name for name in self.tensors if not name.endswith(".scale")]
        if not names:
            raise InputError(f"{self.directory}: its files hold no weights; copy or download them again")
        self._check_experts()
        spelling = detect_spelling(names, self.config)
        if spelling is None:
            raise InputError(f"{self.directory}: the tensors ({some(names)}) follow no naming of a DeepSeek-V4 model")
        return spelling

    def _check_experts(self) -> None:
        """Names are made for each expert; a number that no header bears out would make them for hours."""
        gates = [place.span for name, place in self.tensors.items() if name.endswith(".gate.weight")]
        held = max((span.shape[0] for span in gates if span.shape and span.begin < span.end), default=0)
        if (wanted := self.config.n_routed_experts) > max(held, len(self.tensors)):
            raise InputError(
                f"{self.directory / 'config.json'}: n_routed_experts is {wanted}, the routers of the tensor files have "
                f"{held}; the files do not belong together"
            )

    def _checked(self) -> tuple[list[str], dict[str, Quantised]]:
        expected = expected_tensors(self.config, self.spelling)
        headers = {name: Header(place.span.dtype, place.span.shape) for name, place in self.tensors.items()}
        known = expected.keys() | {scale_name(name) for name in expected}
        drafts = {name: None for name in headers if name.startswith("mtp.") and name not in known}
        faults = Faults(self.directory)
        fitting = compare({name: span for name, span in headers.items() if name not in drafts}, expected, faults)
        faults.raise_if_any(mtp_hint(headers, expected, self.config.num_nextn_predict_layers))
        low = {}
        for name, (shape, kind) in expected.items():
            if name in fitting and kind == "weight" and is_low(headers[name]):
                if len(shape) != 2:
                    raise InputError(f"{self.label(name)}: FP8 and FP4 are read as matrices, one for each expert")
                low[name] = describe(self.label(name), headers[name], headers[scale_name(name)], shape)
        return list(drafts), low

    def released_names(self) -> dict[str, str]:
        """Tensor of this directory -> its released name, for those that have one of the same extent."""
        found = {}
        for native, tensor in native_tensors(self.config).items():
            mine = pieces(native, tensor.shape, self.spelling)
            theirs = pieces(native, tensor.shape, "released")
            if len(mine) == len(theirs):
                found |= {one.name: other.name for one, other in zip(mine, theirs, strict=True)}
        return found


def model_directory(path: Path) -> Path:
    """The directory of tensors that `path` means: itself, or the latest checkpoint of a run or of its checkpoints."""
    if not os.path.isdir(path):
        raise InputError(f"{path}: {why_no_directory(path)}; a model directory, or a run with checkpoints, is expected")
    try:
        os.listdir(path)
        os.stat(os.path.join(path, os.curdir))
    except OSError as error:
        raise InputError(f"{path}: cannot be read ({error.strerror}); give yourself the right to list it") from None
    for folder in (path, path / "checkpoints"):
        if folder.is_dir() and not (path / "config.json").exists() and (latest := latest_checkpoint(folder)):
            return latest
    return path
