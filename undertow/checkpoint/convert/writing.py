"""One file of the target: its tensors written where the layout has them, hashed on the way, named once complete."""

from __future__ import annotations

import errno
import os
from collections.abc import Callable
from pathlib import Path
from typing import NamedTuple

from undertow.checkpoint.convert.digest import Digest
from undertow.checkpoint.convert.layout import OutFile
from undertow.checkpoint.convert.slices import Slice, kept_slices, weight_and_scales
from undertow.checkpoint.convert.source import Place, Source, bytes_before
from undertow.checkpoint.convert.target import KeptScale, Unit
from undertow.checkpoint.shards import sync

_CHUNK = 1 << 24
_PART = ".part"

Progress = Callable[[int], None]
"""Called with bytes that were written since the last call."""


class Written(NamedTuple):
    """A file that is complete: its SHA-256, and how many of its tensors hold rounded numbers."""

    sha256: str
    rounded: int


def write_file(source: Source, file: OutFile, directory: Path, progress: Progress) -> Written:
    """Write `file` into `directory`; it is complete and on disk when it bears its name. Where that fails it is gone."""
    part = directory / f"{file.name}{_PART}"
    handle = os.open(part, os.O_RDWR | os.O_CREAT | os.O_TRUNC | os.O_CLOEXEC, 0o666)
    try:
        with Digest(handle) as digest:
            _write_all(handle, memoryview(file.head), 0)
            out = _Out(handle, file, digest, progress)
            rounded = sum([_write_unit(source, unit, out) for unit in file.units])
            digest.advance(file.size)
            os.fsync(handle)  # while the last bytes are hashed
            found = digest.hexdigest()
    except OSError:
        part.unlink(missing_ok=True)  # on a full disk its room is needed
        raise
    finally:
        os.close(handle)
    os.rename(part, directory / file.name)
    sync(directory)
    return Written(found, rounded)


class _Out:
    """The open file, and how much of it from the start is final."""

    def __init__(self, handle: int, file: OutFile, digest: Digest, progress: Progress):
        self.handle, self.offsets, self.digest, self.progress = handle, file.offsets, digest, progress
        self._order = sorted(file.offsets, key=lambda name: file.offsets[name])
        self._done: set[str] = set()
        self._next = 0

    def write(self, name: str, piece: Slice) -> None:
        """A slice of a tensor."""
        data, base = piece.data, self.offsets[name] + piece.row * piece.width + piece.column
        high, wide = data.shape
        if wide == piece.width:
            _write_all(self.handle, data.numpy().data.cast("B"), base)
        else:
            for row in range(high):
                _write_all(self.handle, data[row].numpy().data, base + row * piece.width)
        self.progress(high * wide)

    def grown(self, name: str, size: int) -> None:
        """The first `size` bytes of a tensor that is being written are final."""
        if self._order[self._next] == name:
            self.digest.advance(self.offsets[name] + size)

    def done(self, *names: str) -> None:
        """Tensors are complete."""
        self._done.update(names)
        while self._next < len(self._order) and self._order[self._next] in self._done:
            self._next += 1
        if self._next < len(self._order):
            self.digest.advance(self.offsets[self._order[self._next]])


def _write_unit(source: Source, unit: Unit | KeptScale, out: _Out) -> bool:
    """Write one tensor with its scales; return whether any number of it was rounded."""
    rounded = False
    if isinstance(unit, KeptScale) and not unit.halved:
        _copy(source, unit.place, 0, unit.tensor.size, unit.tensor.name, 0, out)
    elif isinstance(unit, KeptScale):
        for piece in kept_slices(source, unit):
            out.write(unit.tensor.name, piece)
    elif unit.copied and unit.scheme is None:
        for part in unit.parts:
            place = source.tensors[part.source]
            begin, at = bytes_before(place, part.start), bytes_before(place, part.target)
            size = bytes_before(place, part.start + part.rows) - begin
            _copy(source, place, begin, size, unit.tensor.name, at, out)
    else:
        for weight, scales, changed in weight_and_scales(source, unit):
            rounded |= changed
            out.write(unit.tensor.name, weight)
            if scales is not None and unit.scale is not None:
                out.write(unit.scale.name, scales)
            if weight.column + weight.data.shape[1] == weight.width:
                out.grown(unit.tensor.name, (weight.row + weight.data.shape[0]) * weight.width)
    out.done(*(tensor.name for tensor in (unit.tensors if isinstance(unit, Unit) else (unit.tensor,))))
    return rounded


def _copy(source: Source, place: Place, begin: int, size: int, name: str, at: int, out: _Out) -> None:
    """Bytes of a source tensor, unchanged: within the kernel where it can, which is several times quicker."""
    start = 0
    while start < size:
        count = min(size - start, _CHUNK)
        count = _moved(source, place, begin + start, count, out.handle, out.offsets[name] + at + start)
        start += count
        out.grown(name, at + start)
        out.progress(count)


def _moved(source: Source, place: Place, begin: int, count: int, target: int, offset: int) -> int:
    """Move up to `count` bytes; return how many were."""
    handle, start = source.handle(place.file), place.span.begin + begin
    os.lseek(target, offset, os.SEEK_SET)
    try:
        done = os.sendfile(target, handle, start, count)
    except OSError as error:
        if error.errno not in (errno.EINVAL, errno.ENOSYS, errno.EOPNOTSUPP):
            raise
        done = 0
    if done:
        return done
    view = memoryview(bytearray(count))
    source.fill(handle, view, start, place.file)  # tells where the file has become shorter
    _write_all(target, view, offset)
    return count


def _write_all(handle: int, view: memoryview, offset: int) -> None:
    done = 0
    while done < len(view):
        done += os.pwrite(handle, view[done:], offset + done)
