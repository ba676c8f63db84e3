"""The output of one request as it grows: token ids, text and the reason of its end, all ending at the same token."""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal

from undertow.engine.sampling import SamplingParams
from undertow.engine.stops import StopStrings

if TYPE_CHECKING:
    from undertow.data.tokenizer import Tokenizer

FinishReason = Literal["stop", "length"]


@dataclass(frozen=True)
class Chunk:
    """A piece of a request's output: concatenated over a stream, `text` and `token_ids` are those of its completion.

    `finish_reason` is set on the last chunk alone: "stop" (end of sequence, stop token or stop string) or "length"
    (`max_tokens` reached). Text may come some tokens after its ids, while it could still be the beginning of a stop
    string or of a character.
    """

    text: str
    token_ids: list[int]
    logprobs: list[float]
    finish_reason: FinishReason | None = None


class OutputStream:
    """Follows one request from token to token and says when it ends.

    The token that ends the output is its last id, whether it is the end of sequence, a stop token or the token that
    completes a stop string; the text ends before the stop string, and holds nothing of an ending token.
    """

    def __init__(self, params: SamplingParams, ends: Collection[int], tokenizer: Tokenizer | None) -> None:
        """`ends` are the ids that end this request. Without a tokenizer every text is empty."""
        self._ends = frozenset(ends)
        self._left = params.max_tokens
        self._text = _Text(tokenizer) if tokenizer is not None else None
        self._stops = StopStrings(params.stop)
        self.finish_reason: FinishReason | None = None

    def push(self, token_id: int, logprob: float) -> Chunk:
        """The chunk that this token makes; `finish_reason` is then that of the request."""
        self._left -= 1
        if token_id in self._ends:
            text = self._end("stop")
        else:
            text = self._stops.push(self._text.push(token_id)) if self._text else ""
            if self._stops.found:
                self.finish_reason = "stop"
            elif self._left == 0:
                text += self._end("length")
        return Chunk(text, [token_id], [logprob], self.finish_reason)

    def _end(self, reason: FinishReason) -> str:
        """Let the held text go; it may itself complete a stop string, when the last bytes make no whole character."""
        text = self._stops.push(self._text.flush()) if self._text else ""
        self.finish_reason = "stop" if self._stops.found else reason
        return text + self._stops.flush()


class _Text:
    """A stream decoder that gives the ids of a padded vocabulary, above the tokenizer's last, no text."""

    def __init__(self, tokenizer: Tokenizer) -> None:
        from undertow.data.tokenizer import StreamDecoder

        self._known = tokenizer.vocab_size
        self._decoder = StreamDecoder(tokenizer)

    def push(self, token_id: int) -> str:
        return self._decoder.push(token_id) if token_id < self._known else ""

    def flush(self) -> str:
        return self._decoder.flush()
