"""Documents as token ids: what a store holds of each, and what decides whether it is held out."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import TypeVar

import numpy as np

from undertow.data.corpus import Document
from undertow.data.division import document_key
from undertow.data.tokenizer import Tokenizer

_TOGETHER = 64  # documents encoded at once: the encoder's own records take about a hundred bytes a token
_CHARACTERS = 1 << 22  # no more is encoded at once where there is more than one document

Item = TypeVar("Item")


@dataclass(frozen=True)
class Example:
    """One document: `ids` [T] int32, the mask of its learned tokens [T] bool (None: all), and its bytes of text.

    Documents are held out by ascending `key` (`undertow.data.division`).
    """

    ids: np.ndarray
    learned: np.ndarray | None
    size: int
    key: int


def encode_documents(documents: Iterable[Document], tokenizer: Tokenizer) -> Iterator[Example]:
    """Each document's ids, the begin token first and the end token last; streamed, a few documents at a time."""
    for chunk in in_chunks((document, len(document.text)) for document in documents):
        encoded = tokenizer.encode_all([document.text for document in chunk])
        for document, ids in zip(chunk, encoded, strict=True):
            framed = np.array([tokenizer.bos_id, *ids, tokenizer.eos_id], dtype=np.int32)
            yield Example(framed, None, len(document.text.encode()), document_key(document.content))


def in_chunks(items: Iterable[tuple[Item, int]]) -> Iterator[list[Item]]:
    """Items, given with their number of characters, in groups that are worth encoding together and fit into memory."""
    chunk: list[Item] = []
    held = 0
    for item, characters in items:
        if chunk and (len(chunk) == _TOGETHER or held + characters > _CHARACTERS):
            yield chunk
            chunk, held = [], 0
        chunk.append(item)
        held += characters
    if chunk:
        yield chunk
