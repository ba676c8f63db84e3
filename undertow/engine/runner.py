"""Runs the model over its contiguous cache: ragged prompts in chunks, then one token a sequence."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import accumulate
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from undertow.ops.segments import Segments

if TYPE_CHECKING:
    from undertow.model.cache import ContiguousCache
    from undertow.model.transformer import Transformer

CHUNK_TOKENS = 512
CALL_TOKENS = 2048


def prefill_calls(lengths: Sequence[int], chunk: int, budget: int) -> list[list[int]]:
    """How many tokens of each prompt each call takes; a call has at most `budget` tokens, and `budget` >= `chunk`.

    A prompt is cut at multiples of `chunk` of its own positions, whatever its neighbours, so that they do not change
    its arithmetic. Every call makes progress.
    """
    done = [0] * len(lengths)
    calls: list[list[int]] = []
    while any(d < n for d, n in zip(done, lengths, strict=True)):
        call, room = [0] * len(lengths), budget
        for row, length in enumerate(lengths):
            take = min(chunk, length - done[row])
            if take <= room:
                call[row], done[row], room = take, done[row] + take, room - take
        calls.append(call)
    return calls


class Batch:
    """Sequences that decode together: their cache, and the logits `[B, V]` float32 for the next token of each."""

    def __init__(
        self, model: Transformer, prompts: Sequence[Sequence[int]], chunk: int = CHUNK_TOKENS, budget: int = CALL_TOKENS
    ):
        """Prefill `prompts` (token ids, none empty), at most `budget` tokens a call."""
        self._model = model
        self._device = model.embed.weight.device
        with torch.inference_mode():
            self._cache: ContiguousCache = model.new_cache(sequences=len(prompts))
            self.logits = self._prefill(prompts, chunk, budget)

    def _prefill(self, prompts: Sequence[Sequence[int]], chunk: int, budget: int) -> Tensor:
        done = [0] * len(prompts)
        rows: list[Tensor] = [torch.empty(0)] * len(prompts)
        for call in prefill_calls([len(p) for p in prompts], chunk, budget):
            hidden = self._forward([t for p, d, n in zip(prompts, done, call, strict=True) for t in p[d : d + n]], call)
            done = [d + n for d, n in zip(done, call, strict=True)]
            for row, end in enumerate(accumulate(call)):
                if call[row] and done[row] == len(prompts[row]):
                    rows[row] = hidden[end - 1]
        return self._model.logits(self._model.collapse(torch.stack(rows)))

    def _forward(self, tokens: Sequence[int], lengths: Sequence[int]) -> Tensor:
        """Append `lengths[i]` tokens to sequence `i`; the residual streams of all of them, `[T, n, d]`."""
        segments = Segments.from_lengths(lengths, past=self._cache.lengths, device=self._device)
        ids = torch.tensor(tokens, dtype=torch.int64, device=self._device)
        return self._model.trunk(ids, segments, self._cache).streams

    def step(self, tokens: Sequence[int]) -> None:
        """Append one token to each sequence and compute the logits that follow it."""
        with torch.inference_mode():
            self.logits = self._model.logits(self._model.collapse(self._forward(tokens, [1] * len(tokens))))

    def keep(self, rows: Sequence[int]) -> None:
        """Go on with the sequences in `rows` alone, in that order; takes effect before the next `step`."""
        with torch.inference_mode():
            self._cache.select(rows)
