"""The folder of a run's checkpoints: `step-N`, each complete from the moment it bears its name, and `latest`."""

from __future__ import annotations

import os
import shutil
from contextlib import suppress
from pathlib import Path

from safetensors import SafetensorError

from undertow.checkpoint.progress import NAME
from undertow.checkpoint.publish import previous_of, swap
from undertow.checkpoint.shards import sync
from undertow.checkpoint.snapshot import Snapshot, write_files
from undertow.config.errors import InputError, UndertowError
from undertow.config.reading import read_regular
from undertow.data.tokenizer import Tokenizer

LATEST = "latest"
_LONGEST = 1 << 12  # bytes of `latest`
_WRITING, _REMOVING, _PREVIOUS = ".writing", ".removing", ".previous"


def publish(folder: Path, snapshot: Snapshot, tokenizer: Tokenizer | None) -> Path:
    """Write `folder/step-N` and make it the latest; return its path.

    Files are written to a hidden directory, synced and renamed, then `latest` is replaced: killed at any moment,
    `latest` names a complete checkpoint. A checkpoint of the same step is exchanged for the new one in one system call
    where the file system has it. Raises `UndertowError` if writing fails; what was there is then untouched.
    """
    target = checkpoint_path(folder, snapshot.progress.step)
    try:
        fresh = begin(folder, target)
        write_files(snapshot, fresh, tokenizer)
        finish(folder, fresh, target)
    except (OSError, SafetensorError) as error:
        with suppress(OSError):
            sweep_unfinished(folder)
        raise UndertowError(f"{target}: the checkpoint cannot be written ({error}); earlier ones are intact") from error
    return target


def begin(folder: Path, target: Path, mark: str = "") -> Path:
    """The empty hidden directory whose files will be `target`'s, with `mark` in its name; raises `OSError`."""
    fresh = folder / f".{target.name}{mark and '.'}{mark}{_WRITING}"
    folder.mkdir(parents=True, exist_ok=True)
    _sweep(folder, _WRITING, _REMOVING)
    fresh.mkdir()
    return fresh


def finish(folder: Path, fresh: Path, target: Path) -> None:
    """Give the synced directory `fresh` its name and make it the latest; raises `OSError`."""
    swap(fresh, target)
    sync(folder)
    _point_latest(folder, target.name)
    with suppress(OSError):  # what it took the place of; the next one tries again, and tells
        _sweep(folder, _WRITING, _PREVIOUS)


def sweep_unfinished(folder: Path) -> None:
    """Remove what a checkpoint that was not finished has left; raises `OSError`."""
    _sweep(folder, _WRITING)


def prune(folder: Path, keep: int) -> None:
    """Remove the checkpoints older than the `keep` newest up to the latest, never the latest.

    Those of a higher step than the latest, left when a run was taken back to an earlier one, do not count and stay. One
    is renamed to a hidden name before its files go. Raises `UndertowError` for one that cannot be removed.
    """
    latest = latest_checkpoint(folder)
    if latest is None:
        return
    newest = step_of(latest)
    for step in [step for step in steps_in(folder) if step <= newest][:-keep]:
        path = checkpoint_path(folder, step)
        hidden = folder / f".{path.name}{_REMOVING}"
        try:
            os.rename(path, hidden)
            _remove(hidden)
        except OSError as error:
            raise UndertowError(
                f"{path}: an old checkpoint that cannot be removed ({error}); {latest.name} is complete; see to the "
                "permissions, or keep all with train.checkpoint_keep=null"
            ) from error


def latest_checkpoint(folder: Path) -> Path | None:
    """The checkpoint that `latest` names, or None where none was completed.

    Without `latest` it is the one of the highest step: a checkpoint bears its name only once it is complete, and a run
    killed just before its first `latest` goes on from there. Raises `InputError` for a `latest` that names none.
    """
    pointer = folder / LATEST
    steps = steps_in(folder)
    held = ", ".join(f"step-{step}" for step in steps) or "none"
    if not pointer.exists():
        return checkpoint_path(folder, steps[-1]) if steps else None
    try:
        name = read_regular(pointer, _LONGEST).decode("utf-8", errors="replace").strip()
    except OSError as error:
        raise InputError(
            f"{pointer}: cannot be read ({error.strerror}); make it a file with the name of a checkpoint "
            f"(there are {held})"
        ) from None
    if NAME.fullmatch(name):
        for path in (folder / name, previous_of(folder / name)):  # the second: killed where nothing exchanges two names
            if path.is_dir():
                return path
    raise InputError(
        f"{pointer}: names {name[:40]!r}, which is no checkpoint here; write the name of one into it (there are {held})"
    )


def checkpoint_path(folder: Path, step: int) -> Path:
    """Where the checkpoint of a step lies."""
    return folder / f"step-{step}"


def steps_in(folder: Path) -> list[int]:
    """The steps of the complete checkpoints, ascending."""
    return sorted(int(found[1]) for p in folder.glob("step-*") if (found := NAME.fullmatch(p.name)) and p.is_dir())


def step_of(path: Path) -> int:
    """The step of a checkpoint's path."""
    found = NAME.search(path.name)
    assert found is not None
    return int(found[1])


def _sweep(folder: Path, *endings: str) -> None:
    """Remove the hidden names with these endings: of a process that was killed, for a run has one writer."""
    for ending in endings:
        for left in folder.glob(f".*{ending}"):
            _remove(left)


def _remove(path: Path) -> None:
    shutil.rmtree(path) if path.is_dir() and not path.is_symlink() else path.unlink()


def _point_latest(folder: Path, name: str) -> None:
    fresh = folder / f".{LATEST}{_WRITING}"
    fresh.write_text(f"{name}\n", "utf-8")
    sync(fresh)
    os.replace(fresh, folder / LATEST)
    sync(folder)
