"""Converting a model directory: planned from headers, streamed file by file, published in one step."""

from __future__ import annotations

import os
import shutil
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from undertow.checkpoint.convert.digest import file_digest
from undertow.checkpoint.convert.documents import (
    RECORD,
    SUMS,
    check_blocks,
    config_text,
    left_behind,
    read_document,
    write_documents,
)
from undertow.checkpoint.convert.finished import Finished, finished_at, record_text, sizes_of
from undertow.checkpoint.convert.identity import identity_of
from undertow.checkpoint.convert.journal import Journal, drop_journal
from undertow.checkpoint.convert.layout import OutFile, index_of, lay_out
from undertow.checkpoint.convert.rounding import is_exact
from undertow.checkpoint.convert.source import SCALES, Source, model_directory
from undertow.checkpoint.convert.target import Unit, Wish, kept_scales, units_of
from undertow.checkpoint.convert.unchanged import State, changed, check_carried, check_unchanged, states_of
from undertow.checkpoint.convert.verify import check_numbers, check_sum, check_sums
from undertow.checkpoint.convert.writing import write_file
from undertow.checkpoint.names import Format
from undertow.checkpoint.shards import INDEX, SHARD_BYTES, sync
from undertow.config.errors import DoesNotFit, InputError, UndertowError

_SPARE = 1 << 24  # bytes for the small files
_LONGEST_NAME = 255  # bytes, on every usual file system

Progress = Callable[[str, int, int], None]
"""Called with what is going on, bytes done and bytes in all."""


@dataclass(frozen=True)
class Report:
    """What a conversion does or did. Sizes in bytes; `files` are the tensor files, `resumed` those found finished.

    `rounded` counts tensors in which a number was rounded, `drafts` names the tensors of draft modules that went
    through unchanged, `left` the files of the source that were not carried, `scales` counts scales that are kept for
    the way back. `done` is false for a conversion that was only planned: then `rounded` is the most that it may be, by
    the types. `already` is true where the target held this conversion, `scales_gone` where someone has since removed
    the scales that were kept.
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
    already: bool
    scales_gone: bool


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

    Raises `InputError` for a source that is damaged or changes meanwhile and a target that is taken, in or around the
    source, `DoesNotFit` where the disk is too small, `UndertowError` where writing fails or verification finds a
    difference.
    """
    origin, place = model_directory(Path(source)), Path(os.path.realpath(target))
    _refuse_nested(origin, place)
    before = states_of(origin)
    config, document = read_document(origin)
    with Source(origin, config) as held:
        check_blocks(held, document)
        check_carried(origin)
        units = units_of(held, wish)
        kept = kept_scales(held, units)
        files = lay_out(units, kept, shard_bytes)
        text = config_text(config, document, wish, units)  # what the format cannot express is told before all work
        identity, sizes = identity_of(held, wish, files), sizes_of(held, files, text)
        plan = _Plan(held, before, document, wish, units, files, identity, sizes)
        report = Report(
            str(origin), held.spelling, sum(len(unit.tensors) for unit in units), sum(file.size for file in files),
            len(files), 0, sum(not is_exact(held, unit) for unit in units), len(kept), tuple(held.drafts),
            tuple(left_behind(held)), verify, not dry_run, False, False,
        )  # fmt: skip
        finished = finished_at(place, identity, sizes)
        if finished is not None:
            gone = bool(kept) and not (place / SCALES).exists()
            report = replace(report, resumed=len(files), rounded=finished.rounded, already=True, scales_gone=gone)
        if finished is None:
            _check_place(place)
        if dry_run:
            _check_space(place, 0 if report.already else report.size)
            return report
        if finished is None:
            resumed, finished = _write(plan, place, progress)
            report = replace(report, resumed=resumed, rounded=finished.rounded)
        drop_journal(place)
        if verify:
            if finished.scales is not None and not report.scales_gone:
                check_sum(place / SCALES, finished.scales, RECORD)
            try:
                _verify(held, place, units, [*(sizes.keys() - {SCALES}), RECORD], progress)
            finally:
                check_unchanged(held, before)  # first of all: a source that changed says nothing of the target
    return report


@dataclass(frozen=True)
class _Plan:
    """All that is decided before a byte is written; `before` has the states of the source's files at the start."""

    source: Source
    before: dict[str, State]
    document: dict[str, Any]
    wish: Wish
    units: Sequence[Unit]
    files: Sequence[OutFile]
    identity: dict[str, Any]
    sizes: dict[str, int]


def _write(plan: _Plan, target: Path, progress: Progress) -> tuple[int, Finished]:
    """Write what is not yet finished and publish it; how many files were found finished, and what is known now."""
    source, files = plan.source, plan.files
    total = sum(file.size for file in files)
    try:
        with Journal(target, plan.identity) as journal:
            if (other := finished_at(target, plan.identity, plan.sizes)) is not None:
                journal.forget()  # another process has written it since the target was looked at
                return len(files), other
            found = [file for file in files if file.name in journal.written]
            done = sum(file.size for file in found)
            _check_space(target, total - done)
            for file in files:
                if file.name not in journal.written:
                    report = _Meter(progress, file.name, done, total)
                    journal.finished(file.name, write_file(source, file, journal.folder, report.add))
                    done += file.size
                    progress(file.name, done, total)
            (journal.folder / INDEX).write_text(index_of(files), "utf-8")
            write_documents(source, plan.document, plan.wish, plan.units, journal.folder)
            scales = journal.written.get(SCALES)
            finished = Finished(
                sum(written.rounded for written in journal.written.values()), scales.sha256 if scales else None
            )
            _write_record(journal, record_text(plan.identity, finished))
            check_unchanged(source, plan.before)
            if identity_of(source, plan.wish, files) != plan.identity:  # a copy may bring its times along
                raise changed(source.directory)
            journal.publish(target)
    except OSError as error:
        raise UndertowError(
            f"{target}: cannot be written ({error.strerror or error}); what is finished is kept, the same command "
            "goes on from there"
        ) from error
    return len(found), finished


class _Meter:
    """Adds up what is written of one file."""

    def __init__(self, progress: Progress, name: str, done: int, total: int):
        self._progress, self._name, self._done, self._total = progress, name, done, total

    def add(self, count: int) -> None:
        self._done += count
        self._progress(self._name, self._done, self._total)


def _write_record(journal: Journal, record: str) -> None:
    folder, written = journal.folder, journal.written
    (folder / RECORD).write_text(record, "utf-8")
    names = sorted(file.name for file in folder.iterdir() if file.name not in (SUMS, SCALES))
    totals = [written[name].sha256 if name in written else file_digest(folder / name) for name in names]
    sums = [f"{total}  {name}\n" for total, name in zip(totals, names, strict=True)]
    (folder / SUMS).write_text("".join(sums), "utf-8")
    sync(folder / SUMS)


def _verify(source: Source, target: Path, units: Sequence[Unit], names: Iterable[str], progress: Progress) -> None:
    check_sums(target, names)
    total = sum(unit.size for unit in units)
    meter = _Meter(progress, "verifying", 0, total)
    with Source(target, source.config) as written:
        check_numbers(source, written, units, meter.add)


def _refuse_nested(source: Path, target: Path) -> None:
    origin = Path(os.path.realpath(source))
    if target == origin:
        raise InputError(f"{target}: is the source; name a new directory")
    if origin in target.parents or target in origin.parents:
        kind = "lies in" if origin in target.parents else "contains"
        raise InputError(f"{target}: {kind} the source {origin}; name a directory apart from it")


def _check_place(target: Path) -> None:
    """Raise `InputError` where a new directory cannot be made, with the hidden ones beside it."""
    longest = _LONGEST_NAME - len("..converting")
    if len(os.fsencode(target.name)) > longest:
        raise InputError(f"{target}: its name has more than {longest} bytes, too long for hidden ones; shorten it")
    folder = _existing(target)
    if not os.access(folder, os.W_OK | os.X_OK, effective_ids=True):
        raise InputError(f"{target}: cannot be written, since {folder} is not writable; name another directory")


def _existing(target: Path) -> Path:
    return next(parent for parent in target.parents if os.path.exists(parent))


def _check_space(target: Path, needed: int) -> None:
    folder = _existing(target)
    free = shutil.disk_usage(folder).free
    if needed and needed + _SPARE > free:
        unit, size = ("GB", 1e9) if needed + _SPARE >= 1e9 else ("MB", 1e6)
        raise DoesNotFit(
            f"{target}: {(needed + _SPARE) / size:.1f} {unit} are needed, {free / size:.1f} {unit} are free; free "
            "some, or name a directory on another disk"
        )
