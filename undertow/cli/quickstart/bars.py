"""What the trained model is compared with: predictions that know frequencies alone, in nats per byte held out."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from undertow.config.schema import TrainConfig
from undertow.data.entropy import bigram_entropy, unigram_entropy
from undertow.data.packing import IGNORED
from undertow.train.text import Text


@dataclass(frozen=True)
class Bars:
    """Nats per byte: byte frequencies, bytes given the byte before, and token frequencies of the training text.

    The first two are entropies of the held-out text itself, so nobody who counts in this way can do better. A fresh
    model is already near the second, because tokens span bytes; the third shows whether it learned to use context.
    """

    byte_unigram: float
    byte_bigram: float
    token_unigram: float

    def passed_by(self, nats_per_byte: float) -> bool:
        """Whether a model with this held-out loss is below all that count: byte and token frequencies."""
        return nats_per_byte < min(self.byte_unigram, self.token_unigram)


def measure(text: Text, settings: TrainConfig) -> Bars:
    """The bars of a corpus, computed from it now."""
    held_out = "".join(document.text for document in text.validation)
    return Bars(unigram_entropy(held_out), bigram_entropy(held_out), _token_unigram(text, settings))


def _token_unigram(text: Text, settings: TrainConfig) -> float:
    counts = np.bincount(np.concatenate(text.training_ids), minlength=text.tokenizer.vocab_size) + 1.0
    costs = -np.log(counts / counts.sum())
    labels = np.concatenate([batch.labels.ravel() for batch in text.held_out(settings)])
    labels = labels[labels != IGNORED]
    return float(costs[labels].sum()) / text.tokenizer.bytes_of(labels)
