"""Planned random cases against transformers: shape and length follow from a number, weights are redrawn near ties."""

from __future__ import annotations

import math
import random
from dataclasses import dataclass

import torch
from torch import Tensor

from tests.model.oracle import Pair, gradients, margins, pair, random_shape, worst_gradient

# Nearest that a choice of experts or entries, and a SwiGLU input, may come to falling the other way in rounding.
CHOICE_MARGIN = 1e-5
CLAMP_MARGIN = 2e-6

FIRST_LENGTHS = (1, 2, 3, 1, 2, 3, 299, 300)


@dataclass(frozen=True)
class Plan:
    """One case: everything but its weights and tokens."""

    number: int
    shape: dict
    batch: int
    length: int

    @property
    def ratios(self) -> tuple[int, int]:
        return self.shape["csa_ratio"], self.shape["hca_ratio"]


def plan(number: int, divisible: bool = False) -> Plan:
    """Case `number`: a length of 1 to 300 that neither ratio divides, or one that both do."""
    rng = random.Random(f"{number} {divisible}")
    shape = random_shape(rng)
    csa, hca = shape["csa_ratio"], shape["hca_ratio"]
    lengths = [n for n in range(1, 301) if (n % csa == n % hca == 0 if divisible else n % csa and n % hca)]
    wanted = FIRST_LENGTHS[number] if number < len(FIRST_LENGTHS) and not divisible else rng.randint(1, 300)
    return Plan(number, shape, rng.randint(1, 2), min(lengths, key=lambda n: abs(n - wanted)))


def draw(case: Plan, attempt: int = 0) -> tuple[Pair, Tensor, int]:
    """Both models with random weights and `ids [B, S]`: the first of draws `attempt`, `attempt + 1`, ... that stands
    clear of every tie, and its number."""
    while True:
        seed = 1000 * case.number + attempt
        models = pair(case.shape, seed)
        generator = torch.Generator().manual_seed(seed)
        ids = torch.randint(0, case.shape["vocab_size"], (case.batch, case.length), generator=generator)
        choice, clamp = margins(models.ours, ids)
        if choice >= CHOICE_MARGIN and clamp >= CLAMP_MARGIN:
            return models, ids, attempt
        attempt += 1


def logit_error(ours: Tensor, theirs: Tensor) -> float:
    """Largest difference, over a fifth of the largest logit where that exceeds 1; infinite for a NaN."""
    error = (ours - theirs).abs().max().item() / max(1.0, theirs.abs().max().item() / 5)
    return error if math.isfinite(error) else math.inf


def rounding(theirs: torch.nn.Module, ids: Tensor, floor: float) -> tuple[float, float]:
    """How far transformers in float32 is from transformers in float64: `logit_error` and `worst_gradient`. The model is
    left in float64."""
    logits, slopes = gradients(theirs, ids)
    theirs.set_experts_implementation("eager")
    exact_logits, exact_slopes = gradients(theirs.double(), ids)
    return logit_error(logits, exact_logits), worst_gradient(slopes, exact_slopes, floor)[0]
