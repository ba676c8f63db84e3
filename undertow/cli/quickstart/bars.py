"""What the trained model is compared with: predictions that know frequencies alone, in nats per byte held out."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from undertow.cli.quickstart.samples import Words
from undertow.config.training import TrainConfig
from undertow.data.entropy import bigram_entropy, unigram_entropy
from undertow.data.packing import IGNORED
from undertow.train.text import Text


@dataclass(frozen=True)
class Bars:
    """Nats per byte: byte frequencies, bytes given the byte before, and token frequencies of the training text.

    The first two are entropies of the held-out text itself, so nobody who counts in this way can do better. The third
    shows whether the model learned to use context: a fresh one is near it already, because tokens span bytes.
    """

    byte_unigram: float
    byte_bigram: float
    token_unigram: float

    def passed_by(self, nats_per_byte: float) -> bool:
        """Whether a model with this held-out loss is below all of them."""
        return nats_per_byte < min(self.byte_unigram, self.byte_bigram, self.token_unigram)


KNOWN_SHARE, DISTINCT = 0.5, 200
"""Of the sampled words, the share that has to occur in the corpus, and how many of these have to be different."""


def words_pass(words: Words) -> bool:
    """Whether a model that writes these words writes its corpus' language."""
    return words.known >= KNOWN_SHARE * words.sampled > 0 and words.distinct >= DISTINCT


def measure(text: Text, settings: TrainConfig) -> Bars:
    """The bars of a corpus, computed from it now."""
    held_out = "".join(document.text for document in text.validation)
    return Bars(unigram_entropy(held_out), bigram_entropy(held_out), _token_unigram(text, settings))


def _token_unigram(text: Text, settings: TrainConfig) -> float:
    counts = np.bincount(np.concatenate(text.training_ids), minlength=text.tokenizer.vocab_size) + 1.0
    costs = -np.log(counts / counts.sum())
    batches = text.held_out(settings.batch_size, settings.sequence_length)
    labels = np.concatenate([batch.labels.ravel() for batch in batches])
    labels = labels[labels != IGNORED]
    return float(costs[labels].sum()) / text.tokenizer.bytes_of(labels)
