"""The loss: head and cross-entropy in one, the mean of a batch. Its kernel makes the gradients in the forward pass, so
that both passes are timed as one."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional

from undertow.bench.backends import ways_of
from undertow.bench.operation import moved, normal
from undertow.bench.task import PEER, Run, Task, Way, relative
from undertow.bench.work import Work
from undertow.ops.registry import REFERENCE

FLASH, TINY = (4096, 129280), (32, 200)
"""Width and vocabulary; those for a CPU."""
_OP = "linear_cross_entropy_mean"
_CHUNK = 1024  # rows of torch's logits at once

Mean = Callable[[Tensor, Tensor], Tensor]


def loss_tasks(
    sizes: tuple[int, int], lengths: Sequence[int], device: torch.device, peers: Collection[str]
) -> Iterator[Task]:
    """The mean alone, and with the gradients of hidden states and head."""
    rows, (width, vocabulary) = sum(lengths), sizes
    hidden = normal(rows, width, device=device, seed=1)
    head = normal(vocabulary, width, device=device, seed=2).mul_(width**-0.5)
    generator = torch.Generator(device).manual_seed(3)
    labels = torch.randint(vocabulary, (rows,), generator=generator, device=device)
    expected = _both(lambda h, w: REFERENCE[_OP](h, w, labels, rows)[0], hidden.float(), head.float())()

    def forward(function: Callable[..., Any]) -> Run:
        def run() -> list[Tensor]:
            with torch.no_grad():
                return [function(hidden, head, labels, rows)[0][None]]

        return run

    def both(function: Callable[..., Any]) -> Run:
        return _both(lambda h, w: function(h, w, labels, rows)[0], hidden, head)

    def error(found: Sequence[Tensor]) -> float:
        return max(relative(x, y) for x, y in zip(found, expected[: len(found)], strict=True))

    shape = f"{rows} x {width}, vocabulary {vocabulary}"
    read, product = moved(hidden, head, labels), 2.0 * rows * width * vocabulary
    yield Task("loss forward", shape, Work(read, product, product), error, ways_of(_OP, device, peers, forward))
    ways = ways_of(_OP, device, peers, both)
    if "torch" in peers:
        ways["torch"] = Way(lambda: lambda: _chunked(hidden, head, labels), PEER)
    work = Work(read + moved(hidden, head), 3 * product, 3 * product)
    yield Task("loss with gradients", shape, work, error, ways)


def _both(mean: Mean, hidden: Tensor, head: Tensor) -> Callable[[], list[Tensor]]:
    leaves = [x.detach().requires_grad_() for x in (hidden, head)]

    def run() -> list[Tensor]:
        loss = mean(*leaves)
        return [loss.detach()[None], *torch.autograd.grad(loss, leaves)]

    return run


def _chunked(hidden: Tensor, head: Tensor, labels: Tensor) -> list[Tensor]:
    """Torch's own cross-entropy on the logits of some rows at a time."""
    weight, count = head.detach().requires_grad_(), len(hidden)
    total = torch.zeros(1, device=hidden.device)
    of_hidden, of_weight = torch.empty_like(hidden), torch.zeros_like(head)
    for start in range(0, count, _CHUNK):
        part = slice(start, start + _CHUNK)
        h = hidden[part].detach().requires_grad_()
        logits = functional.linear(h, weight).float()
        loss = functional.cross_entropy(logits, labels[part], reduction="sum") / count
        of_hidden[part], added = torch.autograd.grad(loss, (h, weight))
        of_weight += added
        total += loss.detach()
    return [total, of_hidden, of_weight]
