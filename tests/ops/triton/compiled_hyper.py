"""Calls of the hyper-connections' kernels that are compiled ahead of time, with the sizes of released models."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import partial

import torch


def cases() -> Iterator[tuple[str, bool, Callable[[], object]]]:
    """Name, whether it is among the few that always run, and a call that launches kernels."""
    for width in (4096, 7168):
        yield f"streams of {width} read", width == 4096, partial(read, 4096, width)
        yield f"streams of {width} written", width == 4096, partial(written, 4096, width)
        yield f"streams of {width} read last", width == 4096, partial(read_last, 4096, width)
    yield "streams of 4096 read, one token", False, partial(read, 1, 4096)


def empty(*shape: int, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    return torch.empty(shape, dtype=dtype, device="meta", requires_grad=True)


def read(tokens: int, width: int) -> None:
    """Forward and backward, the gradient of the streams added and not."""
    from undertow.ops.triton.hyper.read import hyper_in

    streams, weight = (empty(*shape, dtype=torch.bfloat16) for shape in ((tokens, 4, width), (width,)))
    found = hyper_in(streams, empty(24, 4 * width), empty(3), empty(24), weight, 1e-6, 20, 1e-6)
    torch.autograd.backward(found, [torch.empty_like(x) for x in found], retain_graph=True)
    torch.autograd.backward(found[:3], [torch.empty_like(x) for x in found[:3]])


def read_last(tokens: int, width: int) -> None:
    """Forward and backward."""
    from undertow.ops.triton.hyper.head import hyper_head

    streams, weight = (empty(*shape, dtype=torch.bfloat16) for shape in ((tokens, 4, width), (width,)))
    out = hyper_head(streams, empty(4, 4 * width), empty(1), empty(4), weight, 1e-6, 1e-6)
    out.backward(torch.empty_like(out))


def written(tokens: int, width: int) -> None:
    """Forward and backward."""
    from undertow.ops.triton.hyper.expand import hyper_expand

    y, streams = (empty(*shape, dtype=torch.bfloat16) for shape in ((tokens, width), (tokens, 4, width)))
    out = hyper_expand(y, empty(tokens, 4), empty(tokens, 4, 4), streams)
    out.backward(torch.empty_like(out))
