"""Checkpoints that all ranks write together: each its rows into the files of one process, published by rank 0.

No rank holds more than its own part. A tensor's rows are one run of bytes in its file, so ranks write side by side into
files whose size and first bytes are known before.
"""

from __future__ import annotations

import hashlib
import os
import secrets
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor

from undertow.checkpoint.agreement import PATIENCE, Agreement
from undertow.checkpoint.arrangement import STEMS, Arrangement, Holding, Task, arrange
from undertow.checkpoint.folder import begin, checkpoint_path, finish, sweep_unfinished
from undertow.checkpoint.generators import generator_tensors
from undertow.checkpoint.header import DTYPES
from undertow.checkpoint.names import native_tensors
from undertow.checkpoint.progress import Progress
from undertow.checkpoint.shards import SHARD_BYTES, sync
from undertow.checkpoint.shares import Share, optimizer_shares, weight_shares
from undertow.checkpoint.snapshot import compute_dtype, copied, refuse_not_finite, write_documents
from undertow.config.errors import UndertowError
from undertow.config.model import ModelConfig
from undertow.data.tokenizer import Tokenizer
from undertow.model.transformer import Transformer
from undertow.parallel.mesh import Mesh

_SPELLED = {dtype: name for name, dtype in DTYPES.items()}
_EDGE = 4096  # bytes: a page


@dataclass(frozen=True)
class Portion:
    """What this rank writes of a checkpoint, in host memory of its own: `tensors` by kind of file and name."""

    config: ModelConfig
    dtype: str
    progress: Progress
    arrangement: Arrangement
    tensors: dict[tuple[str, str], Tensor]


class Joint:
    """Writes checkpoints of all ranks. Every rank makes it at the same place, and makes the same calls.

    Tensor files have at most `shard_bytes`, but for one tensor above that.
    """

    def __init__(self, mesh: Mesh, patience: float = PATIENCE, shard_bytes: int = SHARD_BYTES):
        self._mesh, self._shard_bytes = mesh, shard_bytes
        self._agreement = Agreement(patience)
        self._known: tuple[list[str], Arrangement] | None = None  # digests of what every rank held, and what followed

    def take(self, model: Transformer, optimizer: torch.optim.Optimizer, progress: Progress, folder: Path) -> Portion:
        """Copy what this rank is to write into host memory.

        Raises `UndertowError` on every rank, naming the checkpoint in `folder`, where a number on any of them is not
        finite.
        """
        target = checkpoint_path(folder, progress.step)
        shares: dict[tuple[str, str], Share] = {}
        holdings: list[Holding] = []

        def look() -> str:
            weights = weight_shares(model, self._mesh)
            moments = optimizer_shares(model, optimizer, weights) | self._generators()
            for stem, found in zip(STEMS, (weights, moments), strict=True):
                shares.update({(stem, name): share for name, share in found.items()})
            refuse_not_finite(((name, share.tensor) for (_, name), share in shares.items()), target)
            holdings.extend(_holding(*key, share) for key, share in shares.items())
            return hashlib.sha256(repr(holdings).encode()).hexdigest()

        arrangement = self._arrangement(self._agreement.together(look), holdings, model.config)
        mine = arrangement.tasks[self._mesh.rank]
        tensors = copied({(task.stem, task.name): shares[task.stem, task.name].tensor for task in mine})
        return Portion(model.config, compute_dtype(model), progress, arrangement, tensors)

    def publish(self, folder: Path, portion: Portion, tokenizer: Tokenizer | None) -> Path:
        """Write what every rank took, make it the latest and return its path.

        Raises `UndertowError` on every rank where one of them cannot write or has ended; nothing bears the
        checkpoint's name then, and what was there is untouched.
        """
        target = checkpoint_path(folder, portion.progress.step)
        first = self._mesh.rank == 0
        tasks, files = portion.arrangement.tasks[self._mesh.rank], portion.arrangement.files

        def prepare() -> str | None:
            if not first:
                return None
            # Its like was never there: a rank of an earlier run that wakes up late writes nowhere.
            fresh = begin(folder, target, secrets.token_hex(4))
            for file, (head, size) in files.items():
                with open(fresh / file, "wb") as stream:
                    stream.write(head)
                    stream.truncate(size)
            return fresh.name

        def documents() -> None:
            if first:
                for name, text in portion.arrangement.indices.items():
                    (fresh / name).write_text(text, "utf-8")
                write_documents(
                    fresh, portion.config, portion.dtype, portion.arrangement.optimizer, portion.progress, tokenizer
                )
                finish(folder, fresh, target)

        try:
            fresh = folder / self._together(target, prepare)[0]
            self._together(target, lambda: _write(fresh, tasks, portion.tensors))
            self._together(target, lambda: _check_edges(fresh, tasks, portion.tensors))
            self._together(target, documents)
        except UndertowError:
            if first:
                with suppress(OSError):  # the next one tries again, and tells
                    sweep_unfinished(folder)
            raise
        return target

    def on_first(self, work: Callable[[], None]) -> None:
        """Do `work` on rank 0 alone; what it raises there is raised on every rank."""
        self._agreement.together(work if self._mesh.rank == 0 else lambda: None)

    def close(self) -> None:
        """End it; a rank that waits for this one is told."""
        self._agreement.close()

    def _together(self, target: Path, work: Callable[[], str | None]) -> list:
        def told() -> str | None:
            with _telling(target, self._mesh.rank):
                return work()

        return self._agreement.together(told)

    def _arrangement(self, digests: list[str], holdings: list[Holding], config: ModelConfig) -> Arrangement:
        if self._known is None or self._known[0] != digests:
            held = [[Holding.of(each) for each in rank] for rank in self._agreement.exchange(holdings)]
            self._known = digests, arrange(held, native_tensors(config), self._shard_bytes)
        return self._known[1]

    def _generators(self) -> dict[str, Share]:
        states = generator_tensors(self._mesh)
        return {name: Share(state, 0, tuple(state.shape)) for name, state in states.items()}


def _holding(stem: str, name: str, share: Share) -> Holding:
    rows = share.rows
    return Holding(stem, name, _SPELLED[share.tensor.dtype], rows.start, rows.stop - rows.start, share.whole)


@contextmanager
def _telling(target: Path, rank: int) -> Iterator[None]:
    try:
        yield
    except OSError as error:
        raise UndertowError(
            f"{target}: rank {rank} cannot write the checkpoint ({error}); earlier ones are intact"
        ) from error


def _bytes(tensor: Tensor) -> memoryview:
    return tensor.reshape(-1).view(torch.uint8).numpy().data


def _write(directory: Path, tasks: list[Task], tensors: dict[tuple[str, str], Tensor]) -> None:
    """Put the tensors at their places in the files, and the files on disk."""
    for file in sorted({task.file for task in tasks}):
        # Not for reading: a network file system may then write whole pages back, with a neighbour's old bytes in them.
        handle = os.open(directory / file, os.O_WRONLY)
        try:
            for task in (task for task in tasks if task.file == file):
                data, at = _bytes(tensors[task.stem, task.name]), task.offset
                while data:
                    count = os.pwrite(handle, data, at)
                    data, at = data[count:], at + count
            os.fsync(handle)
        finally:
            os.close(handle)
    sync(directory)


def _check_edges(directory: Path, tasks: list[Task], tensors: dict[tuple[str, str], Tensor]) -> None:
    """Read the ends of what was written, where other ranks wrote beside it."""
    for file in sorted({task.file for task in tasks}):
        handle = os.open(directory / file, os.O_RDONLY)
        try:
            for task in (task for task in tasks if task.file == file):
                data = _bytes(tensors[task.stem, task.name])
                for at in (0, max(len(data) - _EDGE, 0)):
                    wanted = data[at : at + _EDGE]
                    if os.pread(handle, len(wanted), task.offset + at) != wanted:
                        raise OSError(
                            f"{file} does not hold what was written into it; its file system must let "
                            "several nodes write into one file"
                        )
        finally:
            os.close(handle)
