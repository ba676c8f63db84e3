"""A run that goes on under another layout than it was saved under: the losses of one process that never stopped."""

from __future__ import annotations

from functools import lru_cache
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

from tests.parallel.test_train import CONFIG, store
from undertow.checkpoint.training import save_checkpoint
from undertow.config.parallel import ParallelConfig
from undertow.config.schema import RunConfig
from undertow.config.training import TrainConfig
from undertow.parallel.mesh import build_mesh
from undertow.train.start import trainer_of

SLOW = pytest.mark.slow
BEFORE, AFTER = 2, 3  # steps
LAYOUTS = {
    "one process": (1, {}),
    "FSDP2": (2, {}),
    "EP2": (2, {"expert": 2, "shard": 1}),
    "EP2 x FSDP2": (4, {"expert": 2, "shard": 2}),
    "HSDP 2x2": (4, {"shard": 2}),
    "PP2": (2, {"pipeline": 2}),
    "PP2 x FSDP2": (4, {"pipeline": 2}),
}


def trainer(layout, optimizer, checkpoint=None):
    ranks, widths = LAYOUTS[layout]
    train = TrainConfig(
        steps=BEFORE + AFTER, batch_size=8, sequence_length=48, micro_batch_size=1, warmup_steps=2, learning_rate=1e-3,
        balance_weight=0.05, bias_update_rate=0.01, epsilon=1e-8, optimizer=optimizer,
    )  # fmt: skip
    parallel = ParallelConfig(**widths)
    config = RunConfig(model=CONFIG, train=train, parallel=parallel)
    mesh = build_mesh(parallel, model=CONFIG) if ranks > 1 else None
    text = SimpleNamespace(training_ids=store())
    return trainer_of(config, text, torch.device("cpu"), checkpoint, mesh), mesh


def begun(layout, optimizer, folder):
    """The first losses of a run, and its checkpoint."""
    run, mesh = trainer(layout, optimizer)
    losses = [run.step()["train/loss"] for _ in range(BEFORE)]
    return losses, str(save_checkpoint(folder, run.model, run.optimizer, run.progress, None, mesh))


def gone_on(layout, optimizer, path):
    """The losses that follow."""
    run, _ = trainer(layout, optimizer, path)
    assert run.progress.step == BEFORE
    return [run.step()["train/loss"] for _ in range(AFTER)]


@lru_cache
def never_stopped(optimizer):
    run, _ = trainer("one process", optimizer)
    return [run.step()["train/loss"] for _ in range(BEFORE + AFTER)]


@pytest.mark.parametrize(
    ("writer", "reader", "optimizer"),
    [
        ("one process", "one process", "adamw"),
        ("EP2 x FSDP2", "PP2", "adamw"),
        *(
            pytest.param(writer, reader, optimizer, marks=SLOW)
            for writer, reader in (
                ("one process", "FSDP2"),
                ("one process", "PP2 x FSDP2"),
                ("FSDP2", "one process"),
                ("FSDP2", "EP2 x FSDP2"),
                ("EP2", "HSDP 2x2"),
                ("HSDP 2x2", "EP2"),
                ("PP2", "FSDP2"),
                ("PP2 x FSDP2", "EP2 x FSDP2"),
            )
            for optimizer in ("adamw", "muon")
        ),
    ],
)
def test_losses_are_those_of_a_run_that_never_stopped(two, four, tmp_path, writer, reader, optimizer):
    def run(layout, function, *given):
        ranks = LAYOUTS[layout][0]
        return [function(layout, *given)] if ranks == 1 else {2: two, 4: four}[ranks].run(function, layout, *given)

    expected = never_stopped(optimizer)
    losses, path = run(writer, begun, optimizer, tmp_path)[0]
    assert losses == pytest.approx(expected[:BEFORE], rel=1e-5)
    for found in run(reader, gone_on, optimizer, Path(path)):
        assert found == pytest.approx(expected[BEFORE:], rel=1e-5)
