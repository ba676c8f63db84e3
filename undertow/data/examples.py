"""Any corpus as encoded documents, and which of them are held out: the same in memory and in shards."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from itertools import chain
from typing import Literal

import numpy as np

from undertow.data.chat import encode_conversations, read_conversations
from undertow.data.corpus import read_documents
from undertow.data.division import cut, held_out
from undertow.data.encoding import Example, encode_documents
from undertow.data.records import Reading
from undertow.data.tokenizer import Tokenizer

Kind = Literal["text", "chat"]


def read_examples(
    corpus: str,
    tokenizer: Tokenizer,
    kind: Kind,
    text_field: str,
    split: str,
    validation_fraction: float,
    reading: Reading | None = None,
) -> tuple[Iterator[Example], bool]:
    """The documents of a corpus, streamed, and whether they are the two parts of a single one."""
    if kind == "chat":
        return encode_conversations(read_conversations(corpus, split, reading), tokenizer), False
    documents = read_documents(corpus, text_field, split, reading)
    first, second = next(documents), next(documents, None)
    if second is None:
        return encode_documents(cut(first, validation_fraction), tokenizer), True
    return encode_documents(chain((first, second), documents), tokenizer), False


def held_side(keys: Sequence[int], sizes: Sequence[int], validation_fraction: float, parts: bool) -> np.ndarray:
    """Which documents are held out [N] bool, from their keys and bytes; of the two `parts` of one it is the second."""
    if parts:
        return np.array([False, True])
    return held_out(np.array(keys, np.uint64), np.array(sizes, np.int64), validation_fraction)
