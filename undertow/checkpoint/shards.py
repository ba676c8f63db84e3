"""A directory of safetensors files: read lazily tensor by tensor, written shard by shard within bounded memory."""

from __future__ import annotations

import errno
import json
import os
import stat
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import ExitStack
from functools import partial
from itertools import pairwise
from pathlib import Path
from types import TracebackType
from typing import Any, NamedTuple

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file

from undertow.checkpoint.header import NO_PICKLES, open_regular, read_header
from undertow.config.errors import InputError
from undertow.config.spelling import shortened, some

INDEX = "model.safetensors.index.json"
SINGLE = "model.safetensors"
SHARD_BYTES = 5 * 10**9
"""Largest shard by default, in bytes: the usual size of published checkpoints."""

_PICKLES = (".bin", ".pt", ".pth", ".ckpt", ".pkl", ".pickle")
_LONGEST_NAME = 255  # bytes, on every usual file system
_SHOWN = 60


class Header(NamedTuple):
    """What a file says of a tensor without reading it: its safetensors dtype (`F32`, `BF16`, ...) and shape."""

    dtype: str
    shape: tuple[int, ...]


class Shards:
    """The tensors of a model directory. Use as a context manager: it holds the files open, and mapped, until it ends.

    `headers` has every tensor by name. Raises `InputError` for a directory without safetensors files, an index that
    names absent files or contradicts them, and a file that is truncated or no safetensors file.
    """

    def __init__(self, directory: Path):
        self.directory = directory
        self.headers: dict[str, Header] = {}
        self._holder: dict[str, Any] = {}
        self._open = ExitStack()
        try:
            listed = listed_files(directory)
            for file in listed:
                self._scan(file)
            agree_with_index(directory, listed, self._files())
        except BaseException:
            self._open.close()
            raise

    def __enter__(self) -> Shards:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._open.close()
        self._holder.clear()

    def read(self, name: str) -> torch.Tensor:
        """The tensor `name` on the CPU, backed by the mapped file: copy it before the context ends."""
        return self._holder[name][1].get_tensor(name)

    def read_rows(self, name: str, rows: slice) -> torch.Tensor:
        """Those rows of the tensor `name`, along its first axis, as `read` gives all of it; a scalar as it is."""
        handle = self._holder[name][1]
        return handle.get_slice(name)[rows] if self.headers[name].shape else handle.get_tensor(name)

    def file_of(self, name: str) -> Path:
        """The file that holds the tensor `name`."""
        return self.directory / self._holder[name][0]

    def _files(self) -> dict[str, str]:
        return {name: holder[0] for name, holder in self._holder.items()}

    def _scan(self, file: str) -> None:
        path = self.directory / file
        spans = read_header(path)
        try:
            handle = self._open.enter_context(safe_open(path, framework="pt", device="cpu"))
        except (SafetensorError, OSError) as error:
            raise InputError(f"{path}: truncated or no safetensors file ({error}); copy or download it again") from None
        for name, span in spans.items():
            if name in self.headers:
                raise InputError(
                    f"{self.directory}: tensor {shortened(name)} lies in both {self._holder[name][0]} and {file}"
                )
            self.headers[name] = Header(span.dtype, span.shape)
            self._holder[name] = (file, handle)


def listed_files(directory: Path, index_name: str = INDEX) -> dict[str, set[str] | None]:
    """Files to read, each with the tensors the index places in it (None without an index)."""
    index = directory / index_name
    if index.exists() or index.is_symlink():
        try:
            weight_map = json.loads(_text(index), object_pairs_hook=partial(_unique, index))["weight_map"]
            files: dict[str, set[str] | None] = {}
            for name, file in weight_map.items():
                placed = files.setdefault(file, set())
                assert placed is not None
                placed.add(name)
        except (ValueError, KeyError, TypeError, AttributeError, RecursionError):
            raise InputError(
                f"{index}: a JSON object is expected whose weight_map gives a file for each tensor"
            ) from None
        for file in files:
            if not _is_name(file):
                said = shortened(repr(file))
                raise InputError(f"{index}: names the file {said}; only files beside the index are read")
            if file.endswith(_PICKLES):
                raise InputError(f"{directory / file}: is a pickle that {index_name} lists; {NO_PICKLES}")
        absent = sorted(file for file in files if not _is_there(directory / file))
        if absent:
            raise InputError(
                f"{directory}: {len(absent)} of {len(files)} files of the index are absent ({some(absent)})"
            )
        return files
    if _is_there(directory / SINGLE):
        return {SINGLE: None}
    if any(directory.glob("*.safetensors")):
        raise InputError(f"{directory}: neither {SINGLE} nor {INDEX}; the index that lists the shards is needed")
    pickled = sorted(path.name for path in directory.iterdir() if path.name.endswith(_PICKLES))
    if pickled:
        raise InputError(f"{directory / pickled[0]}: is a pickle, and there are no safetensors files; {NO_PICKLES}")
    raise InputError(f"{directory}: no safetensors files ({SINGLE} or {INDEX})")


def why_no_directory(path: Path) -> str:
    """What is wrong with a path that is no directory, to follow it in a sentence."""
    try:
        os.stat(path)
    except OSError as error:
        if error.errno == errno.ELOOP:
            return "is a loop of symbolic links"
        if os.path.islink(path):
            return f"is a symbolic link to {os.readlink(path)}, which is absent"
        return "no such directory" if isinstance(error, FileNotFoundError) else f"cannot be read ({error.strerror})"
    return f"is a pickle; {NO_PICKLES}" if path.name.endswith(_PICKLES) else "is a file"


def _is_there(path: Path) -> bool:
    """Whether a file exists, or is what opening it tells more of, such as a loop of links."""
    try:
        os.stat(path)
    except OSError as error:
        return error.errno == errno.ELOOP
    return True


def _is_name(file: object) -> bool:
    """Whether a file beside the index may have this name."""
    if not isinstance(file, str) or file in ("", os.pardir) or "\0" in file or Path(file).name != file:
        return False
    try:
        return len(os.fsencode(file)) <= _LONGEST_NAME
    except UnicodeEncodeError:
        return False


def _text(file: Path) -> str:
    handle = open_regular(file)
    with os.fdopen(handle, encoding="utf-8") as stream:
        return stream.read()


def _unique(index: Path, pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    values = dict(pairs)
    if len(values) < len(pairs):
        seen: set[str] = set()
        twice = next(name for name, _ in pairs if name in seen or seen.add(name))
        raise InputError(f"{index}: names {twice[:_SHOWN]!r} twice; make the index again from the files")
    return values


def agree_with_index(directory: Path, listed: dict[str, set[str] | None], found: dict[str, str]) -> None:
    """Raise `InputError` where a file holds other tensors than the index of `listed_files` says."""
    names: dict[str, set[str]] = {file: set() for file in listed}
    for name, file in found.items():
        names[file].add(name)
    for file, placed in listed.items():
        held = names[file]
        if placed is not None and held != placed:
            odd = sorted(held ^ placed)
            raise InputError(
                f"{directory / file}: holds {len(held)} tensors, {INDEX} places {len(placed)} there; they "
                f"do not belong together (they differ in {some(odd)})"
            )


class Entry(NamedTuple):
    """A tensor to write: its name, its size in bytes, and how to get it (called when its shard is written)."""

    name: str
    size: int
    load: Callable[[], torch.Tensor]


def write_shards(directory: Path, entries: Iterable[Entry], shard_bytes: int = SHARD_BYTES) -> None:
    """Write `entries` into `directory`: `model.safetensors` if they fit `shard_bytes`, else numbered shards and index.

    Memory needed is that of the largest shard; a tensor above `shard_bytes` gets a shard of its own. Every file is
    synced to disk. Not atomic by itself: see `undertow.checkpoint.publish`.
    """
    entries = list(entries)
    shards = divide([entry.size for entry in entries], shard_bytes)
    names = shard_names("model", len(shards))
    for name, shard in zip(names, shards, strict=True):
        # Own storage for each: safetensors refuses tensors that share memory, as the slices of stacked experts do.
        held = entries[shard.start : shard.stop]
        tensors = {entry.name: entry.load().detach().cpu().contiguous().clone() for entry in held}
        write_tensors(directory / name, tensors)
        sync(directory / name)
    if len(shards) > 1:
        weight_map = {entries[i].name: name for name, shard in zip(names, shards, strict=True) for i in shard}
        (directory / INDEX).write_text(index_text(weight_map, sum(entry.size for entry in entries)), "utf-8")
        sync(directory / INDEX)


def divide(sizes: Sequence[int], shard_bytes: int) -> list[range]:
    """Which tensors of so many bytes go into each file of at most `shard_bytes`; one above that has its own."""
    if shard_bytes < 1:
        raise InputError(f"shard size {shard_bytes}: at least one byte is needed")
    starts, filled = [0], 0
    for i, size in enumerate(sizes):
        if i > starts[-1] and filled + size > shard_bytes:
            starts.append(i)
            filled = 0
        filled += size
    return [range(*ends) for ends in pairwise((*starts, len(sizes)))]


def shard_names(stem: str, count: int) -> list[str]:
    """Names of so many files: `stem.safetensors` for a single one, else numbered ones."""
    if count == 1:
        return [f"{stem}.safetensors"]
    return [f"{stem}-{i + 1:05}-of-{count:05}.safetensors" for i in range(count)]


def index_text(weight_map: Mapping[str, str], size: int) -> str:
    """The index of numbered files: the file of each tensor by name, and the bytes of all."""
    index = {"metadata": {"total_size": size}, "weight_map": dict(sorted(weight_map.items()))}
    return json.dumps(index, indent=2) + "\n"


def write_tensors(file: Path, tensors: dict[str, torch.Tensor]) -> None:
    """Write one safetensors file, with the permissions that any new file gets here (safetensors' own are 0600)."""
    file.touch()
    mode = stat.S_IMODE(file.stat().st_mode)
    save_file(tensors, file, metadata={"format": "pt"})
    file.chmod(mode)


def sync(path: Path) -> None:
    """Wait until a file, or a directory's list of names, is on disk."""
    handle = os.open(path, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)
