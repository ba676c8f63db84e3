"""Pieces of a prompt to token ids: markers by their ids, texts apart from them, so that no text forges a marker."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import groupby

import numpy as np

from undertow.data.chat.markers import marker_ids
from undertow.data.chat.message import Message
from undertow.data.chat.render import Effort, Piece, render
from undertow.data.tokenizer import Tokenizer


@dataclass(frozen=True)
class Encoded:
    """Token ids [T] int32 and which of them are learned [T] bool."""

    ids: np.ndarray
    learned: np.ndarray


def encode(
    messages: Sequence[Message], tokenizer: Tokenizer, effort: Effort = "none", keep_reasoning: bool = False
) -> Encoded:
    """The tokens of a conversation, as `render` tells it: for a prompt, or to learn what the assistant says.

    A marker that the tokenizer has is its token; text that spells it stays text. One that it lacks is ordinary text,
    except for the begin and end tokens, which every tokenizer has.
    """
    (encoded,) = encode_pieces([render(messages, effort, keep_reasoning)], tokenizer)
    return encoded


def encode_pieces(conversations: Sequence[Sequence[Piece]], tokenizer: Tokenizer) -> list[Encoded]:
    """`encode` of conversations that are rendered, their texts all at once."""
    ids = marker_ids(tokenizer)
    joined = [_joined(pieces, ids) for pieces in conversations]
    texts = [part for parts in joined for part, _ in parts if isinstance(part, str)]
    encoded = iter(tokenizer.encode_literally(texts))
    found = []
    for parts in joined:
        runs = [(next(encoded) if isinstance(part, str) else [part], learned) for part, learned in parts]
        found.append(
            Encoded(
                np.array([id for run, _ in runs for id in run], dtype=np.int32),
                np.array([learned for run, learned in runs for _ in run], dtype=bool),
            )
        )
    return found


def _joined(pieces: Sequence[Piece], ids: dict[str, int]) -> list[tuple[str | int, bool]]:
    """Ids and texts in order, and whether they are learned; neighbouring texts are encoded as one."""
    parts: list[tuple[str | int, bool]] = []
    for (is_token, learned), run in groupby(pieces, lambda each: (each.marker and each.text in ids, each.learned)):
        texts = [each.text for each in run]
        parts += [(ids[text], learned) for text in texts] if is_token else [("".join(texts), learned)]
    return parts
