"""Checkpoints written beside the training: a step waits for the copy of its state, not for the disk."""

from __future__ import annotations

import threading
from collections.abc import Callable
from pathlib import Path
from types import TracebackType

import torch

from undertow.checkpoint.agreement import PATIENCE
from undertow.checkpoint.folder import checkpoint_path, prune, publish
from undertow.checkpoint.joint import Joint, Portion
from undertow.checkpoint.progress import Progress
from undertow.checkpoint.snapshot import Snapshot, take_snapshot
from undertow.data.tokenizer import Tokenizer
from undertow.model.transformer import Transformer
from undertow.parallel.mesh import Mesh


class CheckpointWriter:
    """Writes checkpoints into `folder`, one at a time, on a thread of its own. Use as a context manager.

    Host memory needed is that of one snapshot; of several ranks each holds what it writes. `keep` is how many of the
    newest stay, None for all. `done` is called with the path of each published checkpoint, once and in order, by
    `save`, `poll`, `wait` or the end of the context, in the thread of the caller.

    With `mesh` every rank makes a writer at the same place and saves at the same steps. A rank that cannot write, ends,
    or is silent for `patience` seconds makes all of them raise, and nothing is published.
    """

    def __init__(
        self,
        folder: Path,
        tokenizer: Tokenizer | None,
        keep: int | None,
        done: Callable[[Path], None],
        mesh: Mesh | None = None,
        patience: float = PATIENCE,
    ):
        self._folder, self._tokenizer, self._keep, self._done = folder, tokenizer, keep, done
        self._joint = Joint(mesh, patience) if mesh is not None else None
        self._thread: threading.Thread | None = None
        self._published: Path | None = None
        self._error: BaseException | None = None

    def __enter__(self) -> CheckpointWriter:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        """Finish the write that is under way. Its error is raised unless the block itself ends with one."""
        try:
            if kind is None:
                self.wait()
            else:
                self._finish()
        finally:
            if self._joint is not None:
                self._joint.close()

    def save(self, model: Transformer, optimizer: torch.optim.Optimizer, progress: Progress) -> None:
        """Take the state as it is now and have it written; return as soon as it is copied.

        The model and the optimizer may change at once. Waits for the checkpoint before, and raises what that met, an
        `UndertowError`; then nothing new is taken. Raises `UndertowError` for a number that is not finite.
        """
        self.wait()
        if self._joint is not None:
            taken = self._joint.take(model, optimizer, progress, self._folder)
        else:
            taken = take_snapshot(model, optimizer, progress, checkpoint_path(self._folder, progress.step))
        # A daemon: an interpreter told to end at once does not wait, and what it leaves bears no checkpoint's name.
        self._thread = threading.Thread(target=self._write, args=(taken,), name="checkpoint", daemon=True)
        self._thread.start()

    def poll(self) -> None:
        """`wait`, if nothing is being written any more; otherwise return at once."""
        if self._thread is None or not self._thread.is_alive():
            self.wait()

    def wait(self) -> None:
        """Return when everything saved is published. Raises the `UndertowError` that writing met, once."""
        self._finish()
        error, self._error = self._error, None
        if error is not None:
            raise error

    def _finish(self) -> None:
        if self._thread is not None:
            self._thread.join()
            self._thread = None
        published, self._published = self._published, None
        if published is not None:
            self._done(published)

    def _write(self, taken: Snapshot | Portion) -> None:
        try:
            if isinstance(taken, Snapshot):
                self._published = publish(self._folder, taken, self._tokenizer)
                self._prune()
            elif self._joint is not None:
                self._published = self._joint.publish(self._folder, taken, self._tokenizer)
                self._joint.on_first(self._prune)
        except BaseException as error:  # raised again in the thread of the caller
            self._error = error

    def _prune(self) -> None:
        if self._keep is not None:
            prune(self._folder, self._keep)
