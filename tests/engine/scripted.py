"""A stand-in for the model whose next token is written down: it follows from the exact history its cache holds."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from types import SimpleNamespace

import torch
from torch import Tensor

from undertow.config.model import ModelConfig
from undertow.ops.segments import Segments


class History:
    """A cache that holds each sequence's tokens."""

    def __init__(self, sequences: int) -> None:
        self.tokens: list[list[int]] = [[] for _ in range(sequences)]

    @property
    def lengths(self) -> tuple[int, ...]:
        return tuple(map(len, self.tokens))

    def select(self, rows: Sequence[int]) -> None:
        self.tokens = [self.tokens[row] for row in rows]


class Scripted:
    """`following` gives logits `[V]` after a history; `calls` records the new tokens of each sequence."""

    def __init__(self, config: ModelConfig, following: Callable[[list[int]], Tensor]) -> None:
        self.config = config
        self.embed = SimpleNamespace(weight=torch.zeros(1))
        self.calls: list[tuple[int, ...]] = []
        self.rows_of_logits: list[int] = []
        self._following = following

    def new_cache(self, *, sequences: int) -> History:
        return History(sequences)

    def trunk(self, ids: Tensor, segments: Segments, cache: History) -> SimpleNamespace:
        assert segments.past == cache.lengths and segments.tokens == len(ids)
        self.calls.append(segments.new)
        rows, given = [], iter(ids.tolist())
        for history, new in zip(cache.tokens, segments.new, strict=True):
            for _ in range(new):
                history.append(next(given))
                rows.append(self._following(history))
        return SimpleNamespace(streams=torch.stack(rows))

    def collapse(self, streams: Tensor) -> Tensor:
        self.rows_of_logits.append(len(streams))
        return streams

    def logits(self, hidden: Tensor) -> Tensor:
        return hidden


def by_rule(vocabulary: int, rule: Callable[[list[int]], int]) -> Callable[[list[int]], Tensor]:
    """Logits that leave `rule(history)` as the likeliest token and every other one possible."""

    def following(history: list[int]) -> Tensor:
        logits = torch.zeros(vocabulary)
        logits[rule(history)] = 3.0
        return logits

    return following


def saying(prompt: Sequence[int], answer: Sequence[int], vocabulary: int) -> Callable[[list[int]], Tensor]:
    """Logits that make a prompt's greedy continuation `answer`."""
    script = [*prompt, *answer]
    return by_rule(vocabulary, lambda history: script[len(history)] if len(history) < len(script) else 1)
