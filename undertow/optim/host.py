"""Where optimizer state lies: beside its weights, or in the memory of the host, from which it passes through the
device a batch at a time."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from contextlib import AbstractContextManager, nullcontext
from typing import NamedTuple

import torch
from torch import Tensor

from undertow.optim.part import Part


class Load(NamedTuple):
    """Parts as they are `kept`, the same with their state `here`, beside the weights, and when it is."""

    kept: list[Part]
    here: list[Part]
    arrived: torch.cuda.Event | None = None


class Beside:
    """State lies beside its weights: nothing moves."""

    def home(self, state: Tensor) -> Tensor:
        """A state as it is kept."""
        return state

    def fetch(self, parts: list[Part]) -> Load:
        """Start to bring the state of parts."""
        return Load(parts, parts)

    def arrive(self, load: Load) -> list[Part]:
        """Parts whose state has come."""
        return load.here

    def give_back(self, load: Load) -> None:
        """Start to bring updated state back."""

    def settle(self) -> None:
        """Wait until all that was given back is where it is kept."""


class Host:
    """State lies in the memory of the host, pinned for a GPU: there it comes and goes beside the work, by streams of
    its own. On a processor the same copies are made one after the other."""

    def __init__(self, device: torch.device):
        """`device` is that of the weights."""
        self._device, self._gpu = device, device.type == "cuda"
        self._coming = torch.cuda.Stream(device) if self._gpu else None
        self._going = torch.cuda.Stream(device) if self._gpu else None

    def home(self, state: Tensor) -> Tensor:
        """A state on the host, the same tensor if it lies there as it must."""
        if not self._gpu or state.is_pinned():
            return state
        return torch.empty(state.shape, dtype=state.dtype, pin_memory=True).copy_(state)

    def fetch(self, parts: list[Part]) -> Load:
        """Start to bring the state of parts; work that was given out before need not be done."""
        with _on(self._coming):
            here = [part._replace(state={key: self._copy(t) for key, t in part.state.items()}) for part in parts]
        if self._coming is None:
            return Load(parts, here)
        arrived = torch.cuda.Event()
        arrived.record(self._coming)
        return Load(parts, here, arrived)

    def _copy(self, state: Tensor) -> Tensor:
        copy = torch.empty_like(state, device=self._device)
        _move(copy, state)
        return copy

    def arrive(self, load: Load) -> list[Part]:
        """Parts whose state has come; the device waits for it, the host does not."""
        if load.arrived is not None:
            torch.cuda.current_stream(self._device).wait_event(load.arrived)
        return load.here

    def give_back(self, load: Load) -> None:
        """Start to bring updated state back, once the work that was given out is done."""
        if self._going is not None:
            self._going.wait_stream(torch.cuda.current_stream(self._device))
        with _on(self._going):
            for kept, here in zip(load.kept, load.here, strict=True):
                for key, state in here.state.items():
                    _move(kept.state[key], state)
                    if self._going is not None:
                        state.record_stream(self._going)  # it was allocated by the other stream

    def settle(self) -> None:
        """Wait until all that was given back is on the host: whoever reads it there waits for no GPU."""
        if self._going is not None:
            self._going.synchronize()


Keeper = Beside | Host
BESIDE = Beside()


def _on(stream: torch.cuda.Stream | None) -> AbstractContextManager[object]:
    return nullcontext() if stream is None else torch.cuda.stream(stream)


def _move(to: Tensor, state: Tensor) -> None:
    """Copy between host and device: matrix by matrix where a stack has gaps, which a single copy would not bridge."""
    if to.dim() > 2 and not (to.is_contiguous() and state.is_contiguous()):
        for one, other in zip(to.unbind(), state.unbind(), strict=True):
            one.copy_(other, non_blocking=True)
    else:
        to.copy_(state, non_blocking=True)


def through(batches: Iterable[list[Part]], keeper: Keeper) -> Iterator[list[Part]]:
    """Batches with their state beside their weights; it is kept when the next one is asked for. While one is worked on,
    the next is on its way, and so is the last."""
    ahead: Load | None = None
    for batch in batches:
        following = keeper.fetch(batch)
        if ahead is not None:
            yield keeper.arrive(ahead)
            keeper.give_back(ahead)
        ahead = following
    if ahead is not None:
        yield keeper.arrive(ahead)
        keeper.give_back(ahead)
