"""The learning rate at the steps that matter."""

import pytest

from undertow.config.training import TrainConfig
from undertow.optim.schedule import learning_rate


def rates(**settings) -> list[float]:
    chosen = TrainConfig(learning_rate=1.0, min_learning_rate=0.1, **settings)
    return [learning_rate(step, chosen.steps, chosen) for step in range(1, chosen.steps + 1)]


def test_warm_up_then_cosine():
    assert rates(steps=8, warmup_steps=4) == pytest.approx(
        [0.25, 0.5, 0.75, 1.0, 0.1 + 0.9 * 0.8535534, 0.55, 0.1 + 0.9 * 0.1464466, 0.1]
    )


def test_constant_between_warm_up_and_decay():
    assert rates(steps=10, warmup_steps=2, decay_fraction=0.25) == pytest.approx([0.5, *[1.0] * 7, 0.55, 0.1])


def test_without_decay_or_warm_up():
    assert rates(steps=3, warmup_steps=0, decay_fraction=0.0) == [1.0, 1.0, 1.0]


@pytest.mark.parametrize("steps", [1, 3])
def test_a_run_shorter_than_its_warm_up_only_rises(steps):
    assert rates(steps=steps, warmup_steps=4) == [0.25, 0.5, 0.75][:steps]
