"""From scratch the indexer learns to find what attention weighs most; one that is frozen does not."""

import numpy as np
import pytest

from tests.engine.bytelevel import tokenizer
from tests.model.small import small_config
from undertow.config.training import IndexerConfig, TrainConfig
from undertow.data.packing import Packer, validation_batches
from undertow.data.store import TokenStore
from undertow.model.build import build_model
from undertow.model.context import Indexing
from undertow.optim.build import build_optimizer
from undertow.train.evaluation import evaluate
from undertow.train.loop import Trainer

LENGTH, STEPS = 96, 20


def recalls(**indexer) -> tuple[float, float]:
    """Before and after the steps, on text of repeated motifs, so that attention has something to look up."""
    generator = np.random.default_rng(0)
    documents = [np.resize(generator.integers(3, 250, 12), LENGTH) for _ in range(24)]
    store = TokenStore.of(documents)
    settings = TrainConfig(steps=40, batch_size=4, sequence_length=LENGTH, warmup_steps=2, learning_rate=1e-2)
    model = build_model(small_config(), seed=1)
    trainer = Trainer(
        model, build_optimizer(model, settings), Packer(store, 4, LENGTH), settings, IndexerConfig(**indexer)
    )

    def recall() -> float:
        batches = list(validation_batches(store, 4, LENGTH))[:3]
        found = evaluate(model, batches, tokenizer(), "cpu", Indexing(recall=True))
        assert found.figures["eval/indexer_recall"] == found.found / found.wanted
        return found.found / found.wanted

    before = recall()
    for _ in range(STEPS):
        trainer.step()
    return before, recall()


@pytest.mark.parametrize("dense_steps", [STEPS, 0])
def test_recall_rises(dense_steps):
    before, after = recalls(dense_steps=dense_steps)
    assert after > before + 0.08


def test_without_distillation_it_does_not():
    before, after = recalls(frozen=True)
    assert abs(after - before) < 0.05
