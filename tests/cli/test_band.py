"""A run beside its plan, once, after the warm-up."""

from undertow.cli import band
from undertow.planner.band import Band
from undertow.train.progress import Lines

METRICS = {
    "train/lm_loss": 1.0,
    "train/batch_size": 4,
    "train/sequence_length": 1000,
    "memory/peak_bytes": 104_000_000_000,
}


def _step(number: int, rate: float) -> dict[str, object]:
    return METRICS | {"step": number, "train/tokens_per_second": rate}


def test_steady_steps_are_judged_once():
    said: list[str] = []
    reporter = band._Judged(Lines(100, said.append), lambda: Band("1xH200", 2.0, 100_000_000_000))
    reporter.begin(0, 30)
    for number in range(1, 4):
        reporter.step(_step(number, 100.0), 1.0)
    reporter.step(_step(4, 1.0) | {"train/skipped_for": "loss"}, 1.0)
    for number in range(5, 20):
        reporter.step(_step(number, 2010.0), 1.0)
        assert len(said) == (number >= 9)
    assert said == [
        "plan for 1xH200: 1.99 s a step, 2 planned, inside the band of 5%; 104 GB on rank 0, 100 planned, inside the "
        "band of 5%"
    ]
    reporter.end()
