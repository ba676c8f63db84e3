"""Activations computed again in the backward pass: a layer keeps its input and its decisions, nothing else."""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple, Protocol, TypeVar

from torch import Tensor
from torch.utils.checkpoint import checkpoint


class Choices(NamedTuple):
    """What a layer decided: `experts [T, K]`, and `entries [T, index_topk]` its attention reads (None: every visible
    one)."""

    experts: Tensor
    entries: Tensor | None


class Decided(Protocol):
    """The result of a layer, as far as recomputation needs to know it."""

    @property
    def choices(self) -> Choices: ...


Result = TypeVar("Result", bound=Decided)


def recomputed(layer: Callable[..., Result], streams: Tensor) -> Result:
    """`layer(streams)`, its activations made again in the backward pass by `layer(streams, recorded=choices)`.

    The second run repeats the first one's choices: scores that round otherwise would pick other experts or entries near
    a tie, and the gradients would belong to another function.
    """
    made: list[Choices] = []

    def run(streams: Tensor) -> Result:
        result = layer(streams, recorded=made[0] if made else None)
        if not made:
            made.append(result.choices)
        return result

    # No layer draws random numbers, so there is no generator state to carry over.
    return checkpoint(run, streams, use_reentrant=False, preserve_rng_state=False)
