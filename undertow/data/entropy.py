"""Byte entropies of a text: what a model that counts bytes reaches, the first bars that a trained one must pass."""

from __future__ import annotations

import numpy as np

from undertow.config.errors import InputError


def unigram_entropy(text: str | bytes) -> float:
    """Nats per byte of the UTF-8 text under its own byte frequencies: H(b). Raises `InputError` for an empty text."""
    data = _as_bytes(text, 1)
    return _entropy(np.bincount(data, minlength=256))


def bigram_entropy(text: str | bytes) -> float:
    """Nats per byte given the byte before: H(b_t | b_t-1) = H(b_t-1, b_t) - H(b_t-1), over the text's own frequencies.

    Raises `InputError` for a text of fewer than two bytes.
    """
    data = _as_bytes(text, 2)
    pairs = np.bincount(data[:-1].astype(np.int32) * 256 + data[1:], minlength=65536)
    return _entropy(pairs) - _entropy(pairs.reshape(256, 256).sum(1))


def _entropy(counts: np.ndarray) -> float:
    shares = counts[counts > 0] / counts.sum()
    return abs(float((shares * np.log(shares)).sum()))


def _as_bytes(text: str | bytes, least: int) -> np.ndarray:
    data = np.frombuffer(text.encode() if isinstance(text, str) else text, dtype=np.uint8)
    if len(data) < least:
        raise InputError(f"a text of {len(data)} bytes has no byte entropy of this kind: it needs at least {least}")
    return data
