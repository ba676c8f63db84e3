"""The training loop over the stages of a pipeline against one process: metrics of steps, evaluation, equal copies."""

from __future__ import annotations

from functools import lru_cache

import numpy as np
import pytest
import torch
import torch.distributed as dist
from torch.distributed.tensor import DTensor

from tests.model.small import stirred
from undertow.config.model import ModelConfig
from undertow.config.parallel import ParallelConfig
from undertow.config.training import IndexerConfig, TrainConfig
from undertow.data.packing import Batch, Packer
from undertow.data.store import TokenStore
from undertow.model.context import Indexing
from undertow.model.transformer import Transformer
from undertow.optim.build import build_optimizer
from undertow.parallel.held import held
from undertow.parallel.mesh import build_mesh
from undertow.parallel.pipeline.run import Pipeline
from undertow.parallel.shard import share_out
from undertow.train.evaluation import evaluate
from undertow.train.loop import Trainer

SLOW = pytest.mark.slow
CONFIG = ModelConfig.from_preset("v4-debug")
CLOCK = ("time", "train/tokens_per_second", "train/tflops_algorithmic", "train/tflops_reported", "memory/peak_bytes")


class Bytes:
    """A tokenizer of one byte a token."""

    def bytes_of(self, labels: np.ndarray) -> int:
        return int((labels >= 0).sum())


def store(lengths=(20, 41, 64, 7, 100, 3, 55)):
    generator = np.random.default_rng(7)
    return TokenStore.of([generator.integers(3, CONFIG.vocab_size, length).astype(np.int32) for length in lengths])


def part_of(mesh):
    whole = stirred(CONFIG).state_dict()
    model = Transformer(CONFIG, part=mesh.part)
    model.load_state_dict({name: whole[name] for name in model.state_dict()})
    return model


def trainer(changes, mesh=None, recompute=()):
    train = TrainConfig(
        steps=5, batch_size=8, sequence_length=64, micro_batch_size=1, warmup_steps=2, learning_rate=1e-3,
        balance_weight=0.05, z_loss_weight=1e-3, bias_update_rate=0.01, epsilon=1e-8, **changes,
    )  # fmt: skip
    pipeline = None
    if mesh is None:
        model = stirred(CONFIG)
    else:
        model = part_of(mesh)
        pipeline = Pipeline(model, mesh, share_out(model, mesh))
    packer = Packer(store(), train.batch_size, train.sequence_length)
    optimizer = build_optimizer(model, train, mesh)
    return Trainer(model, optimizer, packer, train, IndexerConfig(), None, recompute, mesh, pipeline)


def in_parts(model):
    return {name for name, parameter in model.named_parameters() if isinstance(parameter, DTensor)}


def held_out(steps, mesh=None):
    rows = np.random.default_rng(3).integers(3, CONFIG.vocab_size, (3, 48))
    batch = Batch(rows, np.zeros_like(rows), np.roll(rows, -1, 1))
    parted = in_parts(steps.model)
    found = evaluate(steps.model, [batch], Bytes(), "cpu", Indexing(recall=True), mesh, steps.pipeline)
    assert in_parts(steps.model) == parted
    return found.nats, found.labels, found.bytes, found.found, found.wanted


def run(steps, mesh=None):
    """An evaluation, five steps, and another."""
    before = held_out(steps, mesh)
    metrics = [steps.step() for _ in range(steps.settings.steps)]
    told = [{name: value for name, value in each.items() if name not in CLOCK} for each in metrics]
    return before, told, held_out(steps, mesh)


def over_stages(parallel, changes, recompute=()):
    mesh = build_mesh(ParallelConfig(**parallel), model=CONFIG)
    steps = trainer(changes, mesh, recompute)
    found = run(steps, mesh)
    tables = {n: held(p).detach() for n, p in steps.model.named_parameters() if n in ("embed.weight", "head.weight")}
    everyone = [None] * dist.get_world_size(mesh.group("pipeline"))
    dist.all_gather_object(everyone, tables, group=mesh.group("pipeline"))
    copies = [[each[name] for each in everyone if name in each] for name in ("embed.weight", "head.weight")]
    return found, [torch.equal(first, other) for first, *others in copies for other in others]


@lru_cache
def one_process(changes):
    return run(trainer(dict(changes)))


def check(answers, changes, copies=1):
    before, expected, after = one_process(tuple(changes.items()))
    for (ours_before, ours, ours_after), same in answers:
        assert same == [True] * copies
        assert ours_before == pytest.approx(before, rel=1e-6)
        assert ours_after == pytest.approx(after, rel=1e-5)
        assert len(ours) == len(expected)
        for step, wanted in zip(ours, expected, strict=True):
            assert step == pytest.approx(wanted, rel=1e-5)


@pytest.mark.parametrize(
    ("parallel", "optimizer", "recompute", "copies"),
    [
        pytest.param({}, "adamw", (), 1, id="1f1b"),
        pytest.param({"schedule": "interleaved"}, "muon", (0, 3), 1, id="interleaved", marks=SLOW),
        pytest.param({"schedule": "zb-h1", "layout": "Et|t*4mL"}, "adamw", (), 1, id="zb-h1", marks=SLOW),
        pytest.param({"schedule": "zbv"}, "muon", (), 0, id="zbv", marks=SLOW),
        pytest.param(
            {"schedule": "interleaved", "layout": "Et|tt|ttm|L"}, "adamw", (), 1, id="loss-behind-mtp", marks=SLOW
        ),
    ],
)
def test_five_steps_of_two_stages_are_those_of_one_process(two, parallel, optimizer, recompute, copies):
    changes = {"optimizer": optimizer}
    check(two.run(over_stages, {"pipeline": 2} | parallel, changes, recompute), changes, copies)


@pytest.mark.parametrize(
    ("parallel", "optimizer"),
    [
        pytest.param({}, "muon", id="PP2xFSDP2", marks=SLOW),
        pytest.param({"shard": 1, "expert": 2}, "adamw", id="PP2xEP2", marks=SLOW),
        pytest.param({"expert": 2, "schedule": "interleaved"}, "muon", id="interleavedxEP2xFSDP2"),
    ],
)
def test_five_steps_of_four_ranks_are_those_of_one_process(four, parallel, optimizer):
    changes = {"optimizer": optimizer}
    check(four.run(over_stages, {"pipeline": 2} | parallel, changes), changes)
