"""Says once, after the warm-up of a run, whether it takes the time and the memory that were planned."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from undertow.config.schema import RunConfig
    from undertow.planner.band import Band
    from undertow.train.progress import Reporter


def judged(reporter: Reporter, config: RunConfig, ranks: int) -> Reporter:
    """The reporter of rank 0, which besides compares the run with its plan."""
    return _Judged(reporter, lambda: _band(config, ranks))


def _band(config: RunConfig, ranks: int) -> Band:
    import torch

    from undertow.planner.band import band_of
    from undertow.train.start import device_of

    device = device_of(config.device)
    return band_of(config, ranks, torch.cuda.get_device_name(device) if device.type == "cuda" else device.type)


class _Judged:
    def __init__(self, reporter: Reporter, band: Callable[[], Band]) -> None:
        from undertow.planner.band import STEADY, WARM_UP

        self._reporter, self._band = reporter, band
        self._cold, self._judges, self._seconds = WARM_UP, STEADY, list[float]()
        self.begin, self.say, self.end = reporter.begin, reporter.say, reporter.end

    def step(self, metrics: dict[str, Any], seconds_left: float) -> None:
        self._reporter.step(metrics, seconds_left)
        if self._cold:
            self._cold -= 1
        elif len(self._seconds) < self._judges and "train/skipped_for" not in metrics:
            tokens = metrics["train/batch_size"] * metrics["train/sequence_length"]
            self._seconds.append(tokens / metrics["train/tokens_per_second"])
            if len(self._seconds) == self._judges:
                self.say(self._band().sentence(self._seconds, metrics["memory/peak_bytes"]))
