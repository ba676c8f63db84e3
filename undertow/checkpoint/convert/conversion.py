"""Converting a model directory: planned from headers, streamed file by file, published in one step."""

from __future__ import annotations

import hashlib
import os
import shutil
from collections.abc import Callable, Iterable, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from undertow.checkpoint.convert.digest import file_digest
from undertow.checkpoint.convert.documents import (
    RECORD,
    SUMS,
    carried_files,
    config_text,
    left_behind,
    read_document,
    write_documents,
)
from undertow.checkpoint.convert.finished import is_complete, record_text, sizes_of
from undertow.checkpoint.convert.journal import Journal
from undertow.checkpoint.convert.layout import OutFile, index_of, lay_out
from undertow.checkpoint.convert.source import Source, model_directory
from undertow.checkpoint.convert.target import Unit, Wish, kept_scales, units_of
from undertow.checkpoint.convert.verify import check_numbers, check_sums, is_exact
from undertow.checkpoint.convert.writing import write_file
from undertow.checkpoint.names import Format
from undertow.checkpoint.shards import INDEX, SHARD_BYTES, sync
from undertow.config.errors import DoesNotFit, InputError, UndertowError

_VERSION = 1
_SPARE = 1 << 24  # bytes for the small files

Progress = Callable[[str, int, int], None]
"""Called with what is going on, bytes done and bytes in all."""


@dataclass(frozen=True)
class Report:
    """What a conversion does or did. Sizes in bytes; `files` are the tensor files, `resumed` those found finished.

    `rounded` counts tensors whose type cannot hold the source's numbers, `drafts` names the tensors of draft modules
    that went through unchanged, `left` the files of the source that were not carried, `scales` counts scales that are
    kept for the way back. `done` is false for a conversion that was only planned.
    """

    source: str
    spelling: Format
    tensors: int
    size: int
    files: int
    resumed: int
    rounded: int
    scales: int
    drafts: tuple[str, ...]
    left: tuple[str, ...]
    verified: bool
    done: bool


def convert(
    source: str | Path,
    target: str | Path,
    wish: Wish,
    shard_bytes: int = SHARD_BYTES,
    verify: bool = False,
    dry_run: bool = False,
    progress: Progress = lambda what, done, of: None,
) -> Report:
    """Write the model at `source` to the new directory `target` as `wish` says.

    `source` is a model directory in any format, a run or its checkpoints. Memory is bounded whatever the size of a
    tensor. Killed at any moment, the same call goes on after the last finished file; `target` appears when it is
    complete. A `target` that holds this very conversion is left as it is. `verify` reads everything again.

    Raises `InputError` for a source that is damaged and a target that is taken, in or around the source, `DoesNotFit`
    where the disk is too small, `UndertowError` where writing fails or verification finds a difference.
    """
    origin, place = model_directory(Path(source)), Path(os.path.realpath(target))
    _refuse_nested(origin, place)
    config, document = read_document(origin)
    with Source(origin, config) as held:
        units = units_of(held, wish)
        kept = kept_scales(held, units)
        files = lay_out(units, kept, shard_bytes)
        text = config_text(config, document, wish, units)  # what the format cannot express is told before all work
        identity = _identity(held, wish, files)
        report = Report(
            str(origin), held.spelling, sum(len(unit.tensors) for unit in units), sum(file.size for file in files),
            len(files), 0, sum(not is_exact(held, unit) for unit in units), len(kept), tuple(held.drafts),
            tuple(left_behind(held)), verify, not dry_run,
        )  # fmt: skip
        sizes = sizes_of(held, files, text, identity)
        complete = is_complete(place, identity, sizes)
        if dry_run:
            _check_space(place, 0 if complete else report.size)
            return report
        resumed = len(files)
        if not complete:
            resumed = _write(held, document, wish, units, files, identity, place, progress)
        place.with_name(f".{place.name}.journal").unlink(missing_ok=True)
        if verify:
            _verify(held, place, units, sizes, progress)
    return Report(**{**asdict(report), "resumed": resumed})


def _write(
    source: Source,
    document: dict[str, Any],
    wish: Wish,
    units: Sequence[Unit],
    files: Sequence[OutFile],
    identity: dict[str, Any],
    target: Path,
    progress: Progress,
) -> int:
    """Write what is not yet finished and publish it; return how many files were found finished."""
    total = sum(file.size for file in files)
    try:
        with Journal(target, identity) as journal:
            found = [file for file in files if file.name in journal.sums]
            done = sum(file.size for file in found)
            _check_space(target, total - done)
            for file in files:
                if file.name not in journal.sums:
                    report = _Meter(progress, file.name, done, total)
                    journal.finished(file.name, write_file(source, file, journal.folder, report.add))
                    done += file.size
                    progress(file.name, done, total)
            (journal.folder / INDEX).write_text(index_of(files), "utf-8")
            write_documents(source, document, wish, units, journal.folder)
            _write_record(journal, identity)
            journal.publish(target)
    except OSError as error:
        raise UndertowError(
            f"{target}: cannot be written ({error.strerror or error}); what is finished is kept, the same command "
            "goes on from there"
        ) from error
    return len(found)


class _Meter:
    """Adds up what is written of one file."""

    def __init__(self, progress: Progress, name: str, done: int, total: int):
        self._progress, self._name, self._done, self._total = progress, name, done, total

    def add(self, count: int) -> None:
        self._done += count
        self._progress(self._name, self._done, self._total)


def _write_record(journal: Journal, identity: dict[str, Any]) -> None:
    folder = journal.folder
    (folder / RECORD).write_text(record_text(identity), "utf-8")
    names = sorted(file.name for file in folder.iterdir() if file.name != SUMS)
    sums = [f"{journal.sums.get(name) or file_digest(folder / name)}  {name}\n" for name in names]
    (folder / SUMS).write_text("".join(sums), "utf-8")
    sync(folder / SUMS)


def _verify(source: Source, target: Path, units: Sequence[Unit], names: Iterable[str], progress: Progress) -> None:
    check_sums(target, names)
    total = sum(unit.size for unit in units)
    meter = _Meter(progress, "verifying", 0, total)
    with Source(target, source.config) as written:
        check_numbers(source, written, units, meter.add)


def _identity(source: Source, wish: Wish, files: Sequence[OutFile]) -> dict[str, Any]:
    """What makes two conversions the same: the source's files as they are now, and every byte of the layout."""
    layout = hashlib.sha256()
    for file in files:
        layout.update(file.name.encode() + file.head)
    states = [(file.name, file.stat()) for file in (*source.files(), *carried_files(source.directory))]
    config = source.directory / "config.json"
    return {
        "conversion": _VERSION,
        "wish": asdict(wish),
        "config": file_digest(config),
        "source": [[name, state.st_size, state.st_mtime_ns] for name, state in states],
        "layout": layout.hexdigest(),
    }


def _refuse_nested(source: Path, target: Path) -> None:
    origin = Path(os.path.realpath(source))
    if target == origin:
        raise InputError(f"{target}: is the source; name a new directory")
    if origin in target.parents or target in origin.parents:
        kind = "lies in" if origin in target.parents else "contains"
        raise InputError(f"{target}: {kind} the source {origin}; name a directory apart from it")


def _check_space(target: Path, needed: int) -> None:
    folder = next(parent for parent in target.parents if parent.exists())
    free = shutil.disk_usage(folder).free
    if needed and needed + _SPARE > free:
        unit, size = ("GB", 1e9) if needed + _SPARE >= 1e9 else ("MB", 1e6)
        raise DoesNotFit(
            f"{target}: {(needed + _SPARE) / size:.1f} {unit} are needed, {free / size:.1f} {unit} are free; free "
            "some, or name a directory on another disk"
        )
