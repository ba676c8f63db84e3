"""The division of a corpus into training and held-out documents: by content, the same in every run."""

from __future__ import annotations

from collections.abc import Sequence
from hashlib import blake2b

import numpy as np

from undertow.config.errors import InputError
from undertow.data.corpus import Document


def split(
    documents: Sequence[Document], validation_fraction: float = 0.02, seed: int = 0
) -> tuple[list[Document], list[Document]]:
    """(training, validation): whole documents, disjoint, each part in corpus order and never empty.

    Documents are drawn as `held_out` does, in an order fixed by `seed` and their content. A corpus of one document is
    cut in two at a line break instead. The shipped tokenizers learned from the training part under the default
    arguments. Raises `InputError` if the fraction is not in (0, 1) or there is nothing to divide.
    """
    check_fraction(validation_fraction)
    if len(documents) == 1:
        start, end = cut(documents[0], validation_fraction)
        return [start], [end]
    keys = np.array([document_key(document.content, seed) for document in documents], np.uint64)
    sizes = np.array([len(document.text.encode()) for document in documents], np.int64)
    drawn = held_out(keys, sizes, validation_fraction)
    training = [document for document, held in zip(documents, drawn, strict=True) if not held]
    validation = [document for document, held in zip(documents, drawn, strict=True) if held]
    return training, validation


def document_key(content: str, seed: int = 0) -> int:
    """Where a document of this content stands in the order of drawing: 64 bits of its hash."""
    return int.from_bytes(blake2b(f"{seed}\n{content}".encode(), digest_size=16).digest()[:8], "big")


def held_out(keys: np.ndarray, sizes: np.ndarray, validation_fraction: float) -> np.ndarray:
    """Which documents are held out [N] bool, from their keys [N] uint64 and bytes [N] int64; neither side is empty.

    Documents are drawn by ascending key until they hold the fraction of the bytes. One that is larger than this
    fraction and than the mean document is not drawn, so that no single one takes the corpus with it; where the others
    hold less than the fraction, less is held out. Raises `InputError` for fewer than two.
    """
    check_fraction(validation_fraction)
    if len(keys) < 2:
        raise InputError(
            f"a corpus of {'one document' if len(keys) else 'no documents'} cannot be divided into training and "
            "validation: give at least two"
        )
    wanted = validation_fraction * sizes.sum()
    candidates = np.flatnonzero(sizes <= max(wanted, sizes.mean()))  # never none: one is at most the mean
    order = candidates[np.argsort(keys[candidates], kind="stable")]
    enough = np.flatnonzero(np.cumsum(sizes[order]) >= wanted)
    count = min(int(enough[0]) + 1 if len(enough) else len(order), len(keys) - 1)  # the last one stays in training
    drawn = np.zeros(len(keys), dtype=bool)
    drawn[order[:count]] = True
    return drawn


def cut(document: Document, validation_fraction: float) -> tuple[Document, Document]:
    """The two parts of a corpus that is one document: training text, and held-out text from a line break on.

    Raises `InputError` for a text of one character.
    """
    text = document.text
    if len(text) < 2:
        raise InputError(f"document '{document.name}' of one character cannot be divided into training and validation")
    target = min(max(round(len(text) * (1 - validation_fraction)), 1), len(text) - 1)
    # The line break may lie far off, or nowhere: then the cut falls inside a line.
    at = text.rfind("\n", 0, target) + 1
    at = at if at > target // 2 else target
    return Document(f"{document.name} (start)", text[:at]), Document(f"{document.name} (end)", text[at:])


def check_fraction(validation_fraction: float) -> None:
    """Raises `InputError` for a share that is not between 0 and 1, both excluded."""
    if not 0 < validation_fraction < 1:
        raise InputError(f"validation_fraction {validation_fraction} must lie between 0 and 1, both excluded")
