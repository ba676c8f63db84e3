"""Token ids of documents end to end, in memory or memory-mapped, with a mask of the tokens that are learned."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from functools import cached_property
from hashlib import blake2b

import numpy as np

from undertow.config.errors import InputError
from undertow.data.mapped import MappedNumbers

_HASHED = 1 << 20  # tokens hashed at once


@dataclass(frozen=True)
class Part:
    """Documents in one piece: `tokens` [T] uint16 or uint32, `offsets` [N + 1] int64 from 0 to T.

    `learned` [T] bool says which tokens a model is to predict; None is all of them.
    """

    tokens: np.ndarray | MappedNumbers
    offsets: np.ndarray
    learned: np.ndarray | MappedNumbers | None = None


class TokenStore:
    """Documents as token ids, one after another over one or more parts; `len`, indexing and iteration go by document.

    Nothing is copied: parts may be memory-mapped, and only what is read comes into memory.
    """

    def __init__(self, parts: Sequence[Part], documents: np.ndarray | None = None, content: str | None = None) -> None:
        """`documents` [N] int64 chooses some, by number over all parts; None is all, in order.

        `content` is a digest of them where one is known; else it is computed when asked for. Raises `InputError` where
        there is no document, or one without a token.
        """
        lengths = [np.diff(part.offsets) for part in parts]
        self._parts = parts
        self._firsts = np.cumsum([0, *map(len, lengths)])
        everything = np.concatenate(lengths) if lengths else np.zeros(0, np.int64)
        self._documents = documents
        self._content = content
        self.lengths: np.ndarray = everything if documents is None else everything[documents]
        """Tokens of each document [N] int64."""
        if not len(self.lengths) or self.lengths.min() < 1:
            raise InputError("packing needs at least one document, and at least one token in each")
        self.tokens = int(self.lengths.sum())
        """Tokens of all documents."""

    @classmethod
    def of(
        cls, documents: Iterable[Sequence[int] | np.ndarray], learned: Iterable[np.ndarray] | None = None
    ) -> TokenStore:
        """A store in memory of documents given as ids, and of the masks of their learned tokens, if any."""
        arrays = [np.asarray(document) for document in documents]
        if not arrays or min(map(len, arrays)) < 1:
            raise InputError("packing needs at least one document, and at least one token in each")
        tokens = np.concatenate(arrays)
        if tokens.min() < 0 or tokens.max() >= 2**32:
            raise InputError(f"token ids {tokens.min()} to {tokens.max()} must lie between 0 and {2**32 - 1}")
        offsets = np.cumsum([0, *map(len, arrays)], dtype=np.int64)
        mask = None if learned is None else np.concatenate(list(learned)).astype(bool)
        if mask is not None and len(mask) != len(tokens):
            raise InputError(f"masks of {len(mask)} tokens do not fit documents of {len(tokens)}")
        return cls([Part(tokens.astype(token_dtype(int(tokens.max()) + 1)), offsets, mask)])

    def __len__(self) -> int:
        return len(self.lengths)

    def __getitem__(self, document: int) -> np.ndarray:
        """All ids of a document."""
        if not 0 <= document < len(self):
            raise IndexError(document)
        return self.read(document, 0, int(self.lengths[document]))[0]

    def read(self, document: int, start: int, stop: int) -> tuple[np.ndarray, np.ndarray | None]:
        """Ids of a document's tokens from `start` to `stop` or its end, and which of them are learned (None: all)."""
        number = document if self._documents is None else int(self._documents[document])
        at = int(np.searchsorted(self._firsts, number, side="right")) - 1
        part, number = self._parts[at], number - int(self._firsts[at])
        begin, end = int(part.offsets[number]), int(part.offsets[number + 1])
        chosen = slice(begin + start, min(begin + stop, end))
        return part.tokens[chosen], None if part.learned is None else part.learned[chosen]

    @cached_property
    def content(self) -> str:
        """A digest of the documents, their order and their masks."""
        if self._content is not None:
            return self._content
        digest = blake2b(self.lengths.astype("<i8").tobytes(), digest_size=16)
        if self._documents is not None:
            digest.update(self._documents.astype("<i8").tobytes())
        for part in self._parts:
            for start in range(0, len(part.tokens), _HASHED):
                digest.update(part.tokens[start : start + _HASHED].astype("<u4").tobytes())
                digest.update(b"" if part.learned is None else part.learned[start : start + _HASHED].tobytes())
            digest.update(b"all" if part.learned is None else b"some")
        return digest.hexdigest()


def token_dtype(vocab_size: int) -> np.dtype:
    """The smaller of little-endian uint16 and uint32 that holds every id below `vocab_size`."""
    return np.dtype("<u2" if vocab_size <= 2**16 else "<u4")
