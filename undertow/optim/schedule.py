"""The learning rate of each step: linear warm-up, constant peak, cosine decay (model card 8.4)."""

from __future__ import annotations

import math

from undertow.config.schema import TrainConfig


def learning_rate(step: int, settings: TrainConfig) -> float:
    """Learning rate of the `step`-th step, counted from 1 to `settings.steps`.

    The last warm-up step has the peak, the last step of all the minimum; the decay takes `decay_fraction` of the steps
    after warm-up. A run no longer than its warm-up never decays.
    """
    peak, floor = settings.learning_rate, settings.min_learning_rate
    if step <= settings.warmup_steps:
        return peak * step / settings.warmup_steps
    decaying = round(settings.decay_fraction * (settings.steps - settings.warmup_steps))
    into = step - (settings.steps - decaying)
    if into <= 0:
        return peak
    return floor + (peak - floor) * 0.5 * (1.0 + math.cos(math.pi * into / decaying))
