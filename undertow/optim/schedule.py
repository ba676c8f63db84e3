"""The learning rate of each step: linear warm-up, constant peak, cosine decay (model card 8.4)."""

from __future__ import annotations

import math

from undertow.config.training import TrainConfig


def decay_start(steps: int, settings: TrainConfig) -> int:
    """The last step, of `steps` in all, before the decay; a run no longer than its warm-up never decays."""
    return steps - round(settings.decay_fraction * max(0, steps - settings.warmup_steps))


def learning_rate(step: int, steps: int, settings: TrainConfig) -> float:
    """Learning rate of the `step`-th of `steps`, counted from 1.

    The last warm-up step has the peak, the last step of all the minimum; the decay takes `decay_fraction` of the steps
    after warm-up.
    """
    peak, floor = settings.learning_rate, settings.min_learning_rate
    if step <= settings.warmup_steps:
        return peak * step / settings.warmup_steps
    start = decay_start(steps, settings)
    if step <= start:
        return peak
    return floor + (peak - floor) * 0.5 * (1.0 + math.cos(math.pi * (step - start) / (steps - start)))
