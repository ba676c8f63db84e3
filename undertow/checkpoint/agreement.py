"""Ranks that do something together and end alike: what one of them meets, all of them raise."""

from __future__ import annotations

import json
from collections.abc import Callable
from contextlib import suppress
from datetime import timedelta
from types import TracebackType
from typing import Any, cast

import torch
import torch.distributed as dist

from undertow.config.errors import InputError, UndertowError

PATIENCE = 1800.0
"""Seconds that a rank waits for the others: longer than the slowest of them writes."""


class Agreement:
    """Short messages among all ranks, over a group of its own that no other collective gets into. A context manager.

    Every rank makes it at the same place and makes the same calls, all from one thread at a time.
    """

    def __init__(self, patience: float = PATIENCE):
        self._patience = patience
        self._ranks = dist.get_world_size()
        group = dist.new_group(backend="gloo", timeout=timedelta(seconds=patience))
        self._group = cast(dist.ProcessGroup | None, group)

    def __enter__(self) -> Agreement:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def exchange(self, value: Any) -> list[Any]:
        """What every rank gave, in their order; anything that JSON can say.

        Raises `UndertowError` where a rank ended or was silent for longer than `patience`; the agreement is then over.
        """
        if self._group is None:
            raise UndertowError("checkpoints: a rank was lost before, so that all ranks cannot work on one; resume")
        said = torch.frombuffer(bytearray(json.dumps(value).encode()), dtype=torch.uint8)
        try:
            lengths = [int(length) for length in self._gather(torch.tensor([len(said)]))]
            padded = said.new_zeros(max(lengths))
            padded[: len(said)] = said
            texts = self._gather(padded)
        except RuntimeError as error:
            self.close()  # those who wait for this rank notice at once
            raise UndertowError(
                f"checkpoints: a rank ended, or was silent for {self._patience:g} s, while all ranks work on one; see "
                "what it said, then resume"
            ) from error
        return [json.loads(bytes(text[:length].numpy())) for text, length in zip(texts, lengths, strict=True)]

    def together(self, work: Callable[[], Any]) -> list[Any]:
        """Do `work` on every rank and return what each of them got from it, anything that JSON can say.

        Where it raises on any rank it raises on all: the error of the first of them, in its words.
        """
        error, result = None, None
        try:
            result = work()
        except Exception as met:  # the others must hear of it
            error = met
        said = self.exchange([_kind(error), _told(error), result])
        if error is not None and not isinstance(error, UndertowError):
            raise error
        for rank, (kind, text, _) in enumerate(said):
            if kind is not None:
                text = text if kind != "other" else f"rank {rank}: {text}"
                raise (InputError if kind == "input" else UndertowError)(text) from error
        return [each for _, _, each in said]

    def _gather(self, tensor: torch.Tensor) -> list[torch.Tensor]:
        parts = [torch.empty_like(tensor) for _ in range(self._ranks)]
        dist.all_gather(parts, tensor, group=self._group)
        return parts

    def close(self) -> None:
        """End it on this rank; whoever waits for this rank is told."""
        group, self._group = self._group, None
        if group is not None and dist.is_initialized():
            with suppress(RuntimeError, ValueError):  # of a group that is broken or gone
                dist.destroy_process_group(group)


def _kind(error: Exception | None) -> str | None:
    if error is None:
        return None
    return "input" if isinstance(error, InputError) else "run" if isinstance(error, UndertowError) else "other"


def _told(error: Exception | None) -> str:
    return str(error) if isinstance(error, UndertowError) else f"{type(error).__name__}: {error}"
