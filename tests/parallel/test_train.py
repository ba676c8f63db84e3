"""The training loop over ranks against one process: every metric, skipped steps, stages of the indexer, evaluation."""

from __future__ import annotations

from functools import lru_cache

import numpy as np
import pytest
import torch

from tests.engine.bytelevel import tokenizer
from tests.model.small import small_config, stirred
from undertow.config.errors import UndertowError
from undertow.config.parallel import ParallelConfig
from undertow.config.training import IndexerConfig, TrainConfig
from undertow.data.packing import Packer, validation_batches
from undertow.data.store import TokenStore
from undertow.model.context import Indexing
from undertow.optim.build import build_optimizer
from undertow.parallel.held import held
from undertow.parallel.mesh import build_mesh
from undertow.parallel.shard import share_out
from undertow.train.balance import routers
from undertow.train.evaluation import evaluate
from undertow.train.loop import Trainer

SLOW = pytest.mark.slow
CONFIG = small_config(num_hidden_layers=4, compress_ratios=(0, 4, 8, 4, 0))
CLOCK = ("time", "train/tokens_per_second", "train/tflops_algorithmic", "train/tflops_reported", "memory/peak_bytes")
UNEVEN = (20, 41, 64, 7, 100, 3, 55)
DP2, FSDP2, EP2, BOTH = {"shard": 1}, {}, {"expert": 2, "shard": 1}, {"expert": 2}


def store(lengths=UNEVEN):
    generator = np.random.default_rng(7)
    return TokenStore.of([generator.integers(3, CONFIG.vocab_size, length).astype(np.int32) for length in lengths])


def trainer(changes, indexer, mesh=None, lengths=UNEVEN):
    chosen = dict(
        steps=5, batch_size=4, sequence_length=48, micro_batch_size=1, warmup_steps=2, learning_rate=1e-3,
        balance_weight=0.05, z_loss_weight=1e-3, bias_update_rate=0.01, epsilon=1e-8,
    )  # fmt: skip
    train = TrainConfig(**(chosen | changes))
    model = stirred(CONFIG)
    if mesh is not None:
        share_out(model, mesh)
    packer = Packer(store(lengths), train.batch_size, train.sequence_length)
    return Trainer(
        model, build_optimizer(model, train, mesh), packer, train, IndexerConfig(**indexer), None, (), mesh
    )  # fmt: skip


def steps_of(found):
    taken = [found.step() for _ in range(found.settings.steps)]
    biases = torch.cat([router.bias for router in routers(found.model) if not router.hashed])
    return [{name: value for name, value in each.items() if name not in CLOCK} for each in taken], biases.tolist()


def over_ranks(parallel, changes, indexer, lengths=UNEVEN):
    return steps_of(trainer(changes, indexer, build_mesh(ParallelConfig(**parallel), model=CONFIG), lengths))


@lru_cache
def one_process(changes, indexer, lengths=UNEVEN):
    return steps_of(trainer(dict(changes), dict(indexer), None, lengths))


def check(gang, parallel, changes=(), indexer=(), lengths=UNEVEN, tolerance=1e-5):
    """Every metric of every step, and the router biases after the last one."""
    answers = gang.run(over_ranks, parallel, dict(changes), dict(indexer), lengths)
    expected, biases = one_process(changes, indexer, lengths)
    for ours, theirs in answers:
        assert ours == answers[0][0] and theirs == biases
    for ours, theirs in zip(answers[0][0], expected, strict=True):
        assert ours.keys() == theirs.keys()
        for name in theirs:
            assert ours[name] == pytest.approx(theirs[name], rel=tolerance), (ours["step"], name)


@pytest.mark.parametrize(
    ("parallel", "optimizer"),
    [
        pytest.param(DP2, "adamw", id="DP2-adamw", marks=SLOW),
        pytest.param(FSDP2, "adamw", id="FSDP2-adamw", marks=SLOW),
        pytest.param(EP2, "adamw", id="EP2-adamw", marks=SLOW),
        pytest.param(BOTH, "adamw", id="EP2xFSDP2-adamw"),
        pytest.param(DP2, "muon", id="DP2-muon"),
        pytest.param(FSDP2, "muon", id="FSDP2-muon", marks=SLOW),
        pytest.param(EP2, "muon", id="EP2-muon", marks=SLOW),
        pytest.param(BOTH, "muon", id="EP2xFSDP2-muon", marks=SLOW),
    ],
)
def test_five_steps_of_two_ranks_are_those_of_one_process(two, parallel, optimizer):
    check(two, parallel, (("optimizer", optimizer),))


@pytest.mark.parametrize("length", [100, 127, 128, 129])
@SLOW
def test_rows_of_any_length(two, length):
    check(two, BOTH, (("sequence_length", length), ("batch_size", 2), ("steps", 2)), lengths=(100, 300, 127, 128, 129))


@SLOW
def test_four_ranks(four):
    check(four, {"expert": 2, "shard": 2}, (("steps", 3),))


@SLOW
def test_batches_and_rows_that_change(two):
    schedule = (("batch_size_schedule", [[2, 6]]), ("sequence_length_schedule", [[3, 16]]), ("steps", 3))
    expected = steps_of(trainer(dict(schedule), {}))
    for ours, biases in two.run(over_ranks, FSDP2, dict(schedule), {}):
        told = [(each["tokens"], each["train/loss"]) for each in ours]
        assert told == [(each["tokens"], pytest.approx(each["train/loss"], rel=1e-5)) for each in expected[0]]
        assert biases == expected[1]


@pytest.mark.parametrize("parallel", [pytest.param(FSDP2, id="FSDP2"), pytest.param(BOTH, id="EP2", marks=SLOW)])
def test_the_indexer_dense_alone_and_thawed(two, parallel):
    stages = (("dense_steps", 1), ("warmup_steps", 1), ("warmup_learning_rate", 0.125))
    check(two, parallel, (("steps", 3),), stages)


@SLOW
def test_a_frozen_indexer_rests(two):
    check(two, FSDP2, (("steps", 2),), (("frozen", True),))


def skipping(parallel):
    """A gradient of one rank alone is not finite in the second step; then one of its weights."""
    mesh = build_mesh(ParallelConfig(**parallel), model=CONFIG)
    found = trainer({}, {}, mesh)
    entries, name = [found.step()], "layers.1.attn.wq_b.weight"
    weights = {each: held(tensor).clone() for each, tensor in found.model.state_dict().items()}

    def spoil(gradient):
        return torch.full_like(gradient, torch.inf) if mesh.rank == 1 else gradient

    hook = found.model.hc_head.fn.register_hook(spoil)
    entries.append(found.step())
    hook.remove()
    now = found.model.state_dict()
    assert all(torch.equal(held(now[each]), before) for each, before in weights.items())
    entries.append(found.step())
    with torch.no_grad():
        if mesh.rank == 1:
            held(found.model.get_parameter(name)).fill_(torch.nan)
    try:
        found.step()
    except UndertowError as error:
        return [(each["train/skipped"], each.get("train/skipped_for")) for each in entries], str(error)
    raise AssertionError("no error")


@pytest.mark.parametrize("parallel", [pytest.param(BOTH, id="EP2xFSDP2"), pytest.param(DP2, id="DP2", marks=SLOW)])
def test_what_one_rank_meets_all_of_them_skip_or_tell(two, parallel):
    (told, error), others = two.run(skipping, parallel)
    assert others == (told, error)
    assert told == [(0, None), (1, "hc_head.fn (its gradient)"), (1, None)]
    assert error.startswith("step 4: loss nan") and "finite: layers.1.attn.wq_b.weight (its value);" in error
    assert "no later step can mend it" in error


def evaluated(parallel, rows):
    mesh = None if parallel is None else build_mesh(ParallelConfig(**parallel), model=CONFIG)
    found = trainer({}, {}, mesh)
    batches = list(validation_batches(store(), rows, 48))
    result = evaluate(found.model, batches, tokenizer(), "cpu", Indexing(recall=True), mesh)
    found.step()  # what it left gathered is in parts again
    return result, found.model.layers[0].attn.wq_a.weight.shape, [len(batch.ids) for batch in batches]


@pytest.mark.parametrize("parallel", [pytest.param(BOTH, id="EP2xFSDP2"), pytest.param(FSDP2, id="FSDP2", marks=SLOW)])
def test_ranks_share_the_held_out_rows(two, parallel):
    alone, _, rows = evaluated(None, 4)
    assert rows == [4, 2, 1]  # of the last one a rank has no row
    answers = two.run(evaluated, parallel, 4)
    for result, _, _ in answers:
        assert result == answers[0][0]
        assert (result.labels, result.bytes, result.wanted) == (alone.labels, alone.bytes, alone.wanted)
        assert result.loss == pytest.approx(alone.loss, rel=1e-6) and abs(result.found - alone.found) <= 1
