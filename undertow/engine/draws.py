"""Randomness of one request, addressed by token number, so that no neighbour and no restart can shift it."""

from __future__ import annotations

import secrets
from dataclasses import dataclass
from hashlib import blake2b

from undertow.engine.sampling import SEEDS

UNIFORM_BITS = 53


@dataclass(frozen=True)
class Draws:
    """A sequence of uniform numbers in [0, 1); number i is a function of (seed, i) and of nothing else."""

    seed: int

    @classmethod
    def of(cls, seed: int | None) -> Draws:
        """Draws of the seed given, or of a fresh one from the operating system."""
        return cls(secrets.randbelow(SEEDS) if seed is None else seed)

    def uniform(self, index: int) -> float:
        """Number `index` (0 for the first generated token): 53 random bits, a float64 on an even grid."""
        word = blake2b(index.to_bytes(8, "little"), key=self.seed.to_bytes(8, "little"), digest_size=8).digest()
        return (int.from_bytes(word, "little") >> (64 - UNIFORM_BITS)) * 2.0**-UNIFORM_BITS
