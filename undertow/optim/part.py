"""Pieces of parameters with their gradients and state, cut and gathered so that one call updates many of them."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import NamedTuple

import torch
from torch import Tensor


class Part(NamedTuple):
    """The same elements of a parameter, of its gradient and of its optimizer state, as views.

    `state` holds moments by name and, for a bfloat16 parameter, `master` (float32) or `remainder` (int16).
    """

    weight: Tensor
    grad: Tensor
    state: dict[str, Tensor]

    def cut(self, view: Callable[[Tensor], Tensor]) -> Part:
        """The part that `view` selects from each tensor."""
        return Part(view(self.weight), view(self.grad), {key: view(value) for key, value in self.state.items()})


def workspace(device: torch.device) -> int:
    """Elements to update at once: what a processor's cache holds, or what keeps a GPU busy at 64 MiB a tensor."""
    return 1 << (16 if device.type == "cpu" else 24)


def batches(parts: list[Part], times: int = 1) -> Iterator[list[Part]]:
    """Consecutive parts of one device, `times` the `workspace` of elements together unless a single part is larger."""
    batch, held = [], 0
    for part in parts:
        if batch and held + part.weight.numel() > times * workspace(part.weight.device):
            yield batch
            batch, held = [], 0
        batch.append(part)
        held += part.weight.numel()
    if batch:
        yield batch


def gather(batch: list[Part]) -> Part:
    """Parts that differ along the first dimension alone, copied into one; a single part is returned as it is."""
    if len(batch) == 1:
        return batch[0]
    weights, gradients, states = zip(*batch, strict=True)
    state = {key: torch.cat([each[key] for each in states]) for key in states[0]}
    return Part(torch.cat(weights), torch.cat(gradients), state)


def scatter(whole: Part, batch: list[Part]) -> None:
    """Copy weights and state of what `gather` returned back into the parts."""
    if len(batch) == 1:
        return
    lengths = [len(part.weight) for part in batch]
    pairs = [(whole.weight, [part.weight for part in batch])]
    pairs += [(values, [part.state[key] for part in batch]) for key, values in whole.state.items()]
    for values, places in pairs:
        torch._foreach_copy_(places, values.split(lengths))  # type: ignore[reportPrivateImportUsage]
