"""Steps: what they report, that they learn, and that they stop before harm."""

import json
import weakref

import numpy as np
import pytest
import torch

from tests.model.small import small_config
from undertow.checkpoint.training import Progress
from undertow.config.errors import InputError, UndertowError
from undertow.config.training import IndexerConfig, TrainConfig
from undertow.data.packing import IGNORED, Batch, Packer
from undertow.data.store import TokenStore
from undertow.model.build import build_model
from undertow.model.flops import flops_per_token
from undertow.model.packed import hold
from undertow.optim.build import build_optimizer
from undertow.quant.quantise import quantise
from undertow.quant.scheme import MXFP4
from undertow.train import accumulate
from undertow.train.balance import routers
from undertow.train.evaluation import Evaluation
from undertow.train.loop import Trainer, train
from undertow.train.objective import objective

CONFIG = small_config()
DOCUMENTS = [np.arange(3, 43, dtype=np.int32), np.arange(50, 90, dtype=np.int32)]


def trainer(indexer: dict | None = None, progress: Progress | None = None, **settings) -> Trainer:
    chosen = dict(steps=12, batch_size=2, sequence_length=40, warmup_steps=2, learning_rate=1e-2) | settings
    train = TrainConfig(**chosen)
    model = build_model(CONFIG, seed=1)
    packer = Packer(TokenStore.of(DOCUMENTS), train.batch_size, train.sequence_length)
    return Trainer(model, build_optimizer(model, train), packer, train, IndexerConfig(**(indexer or {})), progress)


def test_loss_falls_on_text_that_repeats():
    steps = trainer(steps=12, min_learning_rate=1e-2)
    losses = [steps.step()["train/lm_loss"] for _ in range(12)]
    assert losses[0] == pytest.approx(np.log(CONFIG.vocab_size), rel=0.05)
    assert losses[-1] < 0.75 * losses[0]


def test_metrics_of_a_step():
    steps = trainer(mtp_weight=0.5, mtp_weight_in_decay=0.5, balance_weight=0.01)
    first, second = steps.step(), steps.step()
    assert list(first) == [
        *("step", "tokens", "time", "train/loss", "train/lm_loss", "train/mtp_loss", "train/balance_loss"),
        *(
            "train/indexer_loss",
            "train/grad_norm",
            "train/indexer_grad_norm",
            "train/lr",
            "train/batch_size",
            "train/sequence_length",
        ),
        *("train/skipped", "moe/load_max", "moe/load_min", "moe/dropped_share", "memory/peak_bytes"),
        *("train/tokens_per_second", "train/tflops_algorithmic", "train/tflops_reported"),
    ]
    assert (first["step"], second["step"], first["tokens"], second["tokens"]) == (1, 2, 80, 160)
    assert (first["train/lr"], second["train/lr"]) == (5e-3, 1e-2)
    parts = first["train/lm_loss"] + 0.5 * first["train/mtp_loss"] + first["train/indexer_loss"]
    learned = 3  # two layers of the trunk and the MTP block; the first layer is hashed
    assert first["train/loss"] == pytest.approx(parts + 0.01 * learned * first["train/balance_loss"], rel=1e-6)
    assert 0 <= first["moe/load_min"] < 1 < first["moe/load_max"] <= CONFIG.n_routed_experts
    assert first["moe/dropped_share"] == 0.0 and first["memory/peak_bytes"] > 2**26
    both = flops_per_token(CONFIG, 40)  # sparse from the first step
    told = first["train/tflops_algorithmic"], first["train/tflops_reported"]
    assert told[1] / told[0] == pytest.approx(both[1] / both[0], rel=1e-2)
    assert told[0] == pytest.approx(both[0] * first["train/tokens_per_second"] / 1e12, rel=1e-2)
    assert steps.progress.step == 2 and steps.progress.cursor["epoch"] == 2


def test_a_step_follows_its_schedules():
    steps = trainer(batch_size_schedule=[[2, 3]], sequence_length_schedule=[[3, 16]], micro_batch_size=2)
    told = [steps.step() for _ in range(3)]
    shapes = [(entry["train/batch_size"], entry["train/sequence_length"], entry["tokens"]) for entry in told]
    assert shapes == [(2, 40, 80), (3, 40, 200), (3, 16, 248)]


def test_biases_move_against_the_load_of_the_whole_batch():
    parted, whole = trainer(micro_batch_size=1, bias_update_rate=0.25), trainer(bias_update_rate=0.25)
    for steps in (parted, whole):
        steps.step()
    for ours, theirs in zip(routers(parted.model), routers(whole.model), strict=True):
        if not ours.hashed:
            assert torch.equal(ours.bias, theirs.bias) and set(ours.bias.abs().tolist()) <= {0.0, 0.25}
            assert float(ours.bias.abs().sum()) > 0


def test_balancing_evens_the_load():
    def excess(rate: float) -> float:
        steps = trainer(steps=40, bias_update_rate=rate, balance_weight=0.0)
        return np.mean([steps.step()["moe/load_max"] for _ in range(40)][-5:]) - 1.0

    assert excess(0.02) < 0.75 * excess(0.0)


def test_nothing_of_a_micro_batch_outlives_it(monkeypatch):
    """But its losses: what operators hold for the backward pass goes before the next one begins."""
    graphs = []

    def watched(*given, **named):
        assert all(graph() is None for graph in graphs)
        losses = objective(*given, **named)
        graphs.append(weakref.ref(losses.total))
        return losses

    monkeypatch.setattr(accumulate, "objective", watched)
    trainer(micro_batch_size=1).step()
    assert len(graphs) == 2 and all(graph() is None for graph in graphs)


@torch.no_grad()
def test_a_model_that_holds_codes_is_refused():
    packed, steps = build_model(CONFIG), trainer()
    name = "layers.0.ffn.experts.w2"
    hold(packed, name, quantise(packed.get_parameter(name), MXFP4))
    why = f"this model holds {name} as FP8 or FP4 codes, which serve forward alone; load it without packed=True"
    with pytest.raises(InputError, match=f"^no training: {why}$"):
        Trainer(packed, steps.optimizer, steps._packer, steps.settings, steps.indexer)


def moved(steps: Trainer) -> set[str]:
    """Names of the tensors that a step changes."""
    before = {name: tensor.clone() for name, tensor in steps.model.state_dict().items()}
    steps.step()
    return {name for name, tensor in steps.model.state_dict().items() if not torch.equal(tensor, before[name])}


def test_a_frozen_indexer_rests_and_learns_once_thawed():
    frozen = trainer(dict(frozen=True))
    names = {name for name in frozen.model.state_dict() if ".indexer." in name}
    assert names and not names & moved(frozen)
    assert not names & {name for name, p in frozen.model.named_parameters() if p in frozen.optimizer.state}
    thawed = Trainer(
        frozen.model, frozen.optimizer, Packer(TokenStore.of(DOCUMENTS), 2, 40), frozen.settings, IndexerConfig(),
        frozen.progress,
    )  # fmt: skip
    assert names <= moved(thawed)


def test_in_its_warm_up_the_indexer_alone_learns():
    steps = trainer(dict(dense_steps=1, warmup_steps=1, warmup_learning_rate=0.125))
    names = {name for name in steps.model.state_dict() if ".indexer." in name}
    assert moved(steps) > names
    assert moved(steps) == names
    assert moved(steps) > names
    assert steps.optimizer.param_groups[0]["lr"] != 0.125


def test_gradients_are_clipped_before_the_update():
    def norms(clip: float, weight: float = 1.0) -> list[float]:
        steps = trainer(dict(weight=weight), gradient_clip=clip)
        told = steps.step()
        found = []
        for of_indexer in (False, True):
            members = [p for name, p in steps.model.named_parameters() if (".indexer." in name) is of_indexer]
            found.append(float(torch.stack([p.grad.norm() for p in members]).norm()))
        return [*found, told["train/grad_norm"], told["train/indexer_grad_norm"]]

    assert norms(1e-3)[:2] == pytest.approx([1e-3, 1e-3], rel=1e-4)
    main, indexer, *told = norms(1e3)
    assert main > 0.1 and [main, indexer] == pytest.approx(told, rel=1e-5)
    # The indexer's loss has a gradient of its own, and so a bound of its own.
    heavy = norms(1e3, weight=100.0)
    assert heavy[0] == pytest.approx(main, rel=1e-5) and heavy[1] == pytest.approx(100 * indexer, rel=1e-4)


def spoiled(steps: Trainer, at: set[int]) -> Trainer:
    """Makes a gradient infinite in the steps `at`."""
    weight = steps.model.layers[1].attn.wo_a.weight
    weight.register_hook(lambda gradient: gradient * (float("inf") if steps.progress.step + 1 in at else 1.0))
    return steps


def everything(steps: Trainer) -> dict[str, torch.Tensor]:
    moments = {
        f"{name}/{part}": value.clone()
        for name, parameter in steps.model.named_parameters()
        for part, value in steps.optimizer.state.get(parameter, {}).items()
    }
    return moments | {name: tensor.clone() for name, tensor in steps.model.state_dict().items()}


def test_a_step_that_is_not_finite_is_skipped_counted_and_named():
    steps = spoiled(trainer(), {2, 4})
    steps.step()
    before, cursor = everything(steps), steps.progress.cursor
    entry = steps.step()
    after = everything(steps)
    assert before.keys() == after.keys() and all(torch.equal(before[name], after[name]) for name in before)
    assert entry["train/skipped_for"] == "layers.1.attn.wo_a.weight (its gradient)"
    assert entry["train/grad_norm"] is None and entry["train/lm_loss"] > 0
    assert (entry["step"], entry["tokens"], entry["train/skipped"]) == (2, 80, 1)
    assert steps.progress.cursor != cursor
    json.dumps(entry, allow_nan=False)
    told = [steps.step() for _ in range(2)]
    assert [e["train/skipped"] for e in told] == [1, 2] and "train/skipped_for" not in told[0]
    assert (steps.progress.skipped, steps.progress.skipped_in_row) == (2, 1)


def test_a_run_stops_after_so_many_skipped_in_a_row():
    steps = spoiled(trainer(skip_limit=3), {2, 4, 5, 6})
    for _ in range(5):
        steps.step()
    with pytest.raises(
        UndertowError,
        match=r"^step 6: loss .*wo_a\.weight \(its gradient\).* in 3 steps in a row \(train\.skip_limit\)",
    ):
        steps.step()
    assert steps.progress.step == 5


def test_what_was_skipped_before_a_resumption_counts():
    first = spoiled(trainer(skip_limit=2), {1})
    first.step()
    again = spoiled(trainer(skip_limit=2, progress=first.progress), {2})
    with pytest.raises(UndertowError, match="2 steps in a row"):
        again.step()


def unlearned(steps: Trainer, at: int) -> Trainer:
    """Takes the labels from the batch of the step `at`."""
    take = steps._packer.take

    def without(rows: int, length: int) -> Batch:
        batch = take(rows, length)
        if steps.progress.step + 1 == at:
            batch.labels[:] = IGNORED
        return batch

    steps._packer.take = without  # type: ignore[method-assign]
    return steps


def test_a_batch_in_which_nothing_is_learned_is_skipped():
    steps = unlearned(trainer(), 2)
    steps.step()
    before = everything(steps)
    entry = steps.step()
    after = everything(steps)
    assert all(torch.equal(before[name], after[name]) for name in before)
    assert entry["train/lm_loss"] is None and entry["train/skipped_for"].startswith("no token of its batch is learned")
    assert steps.step()["train/lm_loss"] > 0
    with pytest.raises(UndertowError, match=r"no token of its batch is learned: .* lengthen train\.sequence_length"):
        unlearned(trainer(skip_limit=1), 1).step()


def test_a_weight_that_is_not_finite_stops_the_run_at_once():
    steps = trainer()
    steps.step()
    with torch.no_grad():
        steps.model.layers[1].attn.wo_a.weight[0, 0] = float("nan")
    with pytest.raises(UndertowError, match=r"^step 2: loss .*not finite: layers\.1\.attn\.wo_a\.weight \(its value"):
        steps.step()
    assert steps.progress.step == 1


def test_a_skipped_step_may_be_saved_and_evaluated():
    saved: list[Progress] = []
    steps = spoiled(trainer(steps=2, eval_every=1, checkpoint_every=1), {1})
    entries = list(train(steps, lambda: Evaluation(6.0, 3, 4), saved.append))
    assert [progress.skipped for progress in saved] == [1, 1] and all("eval/loss" in entry for entry in entries)


def test_asked_to_stop_the_loop_saves_the_step_it_has_taken():
    saved: list[Progress] = []
    steps = trainer(steps=9, checkpoint_every=100)
    with pytest.raises(KeyboardInterrupt):
        for _ in train(steps, lambda: Evaluation(6.0, 3, 4), saved.append, lambda: steps.progress.step == 3):
            pass
    assert [progress.step for progress in saved] == [3]


def test_a_request_to_stop_in_the_last_step_lets_the_run_finish():
    saved: list[Progress] = []
    steps = trainer(steps=2)
    assert len(list(train(steps, lambda: Evaluation(6.0, 3, 4), saved.append, lambda: steps.progress.step == 2))) == 2
    assert [progress.step for progress in saved] == [2]


def test_bfloat16_weights_collect_float32_gradients_unless_the_profile_is_bf16():
    for profile, dtype in (("fp32", torch.float32), ("bf16", torch.bfloat16)):
        settings = TrainConfig(steps=2, batch_size=4, sequence_length=40, micro_batch_size=1, state_profile=profile)
        model = build_model(CONFIG, seed=1, dtype=torch.bfloat16)
        packer = Packer(TokenStore.of(DOCUMENTS), 4, 40)
        steps = Trainer(model, build_optimizer(model, settings), packer, settings, IndexerConfig())
        assert np.isfinite(steps.step()["train/loss"])
        assert model.layers[1].attn.wkv.weight.grad.dtype == dtype


def test_rhythm_of_evaluations_and_checkpoints():
    saved: list[Progress] = []
    entries = train(trainer(steps=7, eval_every=3, checkpoint_every=2), lambda: Evaluation(6.0, 3, 4), saved.append)
    evaluated = [
        (entry["step"], entry["eval/loss"], entry["eval/nats_per_byte"]) for entry in entries if "eval/loss" in entry
    ]
    assert evaluated == [(3, 2.0, 1.5), (6, 2.0, 1.5), (7, 2.0, 1.5)]
    assert [progress.step for progress in saved] == [2, 4, 6, 7]


def test_one_update_is_that_of_the_optimizer():
    for optimizer in ("muon", "adamw"):
        steps = trainer(
            optimizer=optimizer, learning_rate=1e-2, warmup_steps=0, decay_fraction=0.0, weight_decay=0.1, epsilon=1e-8
        )
        norm, matrix = steps.model.norm.weight, steps.model.layers[0].attn.wkv.weight
        before = norm.detach().clone(), matrix.detach().clone()
        steps.step()
        gradient = norm.grad
        wanted = before[0] * (1 - 1e-2 * 0.1) - 1e-2 * gradient / (gradient.abs() + 1e-8)
        torch.testing.assert_close(norm.detach(), wanted, rtol=1e-5, atol=1e-7)
        move = (before[1] * (1 - 1e-2 * 0.1) - matrix.detach()) / 1e-2
        if optimizer == "adamw":
            torch.testing.assert_close(move.abs(), torch.ones_like(move), rtol=1e-2, atol=1e-2)
        else:
            assert float(move.square().mean().sqrt()) == pytest.approx(0.18, rel=0.05)


@pytest.mark.parametrize("due", ["checkpoint_every", "eval_every"])
def test_a_bad_update_is_neither_evaluated_nor_saved(due):
    never = {"checkpoint_every": 100, "eval_every": 100} | {due: 2}
    steps, saved, evaluated = trainer(steps=4, **never), [], []
    update = steps.optimizer.step

    def spoiling():
        update()
        if steps.progress.step == 1:
            with torch.no_grad():
                steps.model.head.weight[0, 0] = float("nan")

    steps.optimizer.step = spoiling
    with pytest.raises(
        UndertowError, match=r"^step 2: the update left head\.weight .*not finite; no checkpoint"
    ) as raised:
        list(train(steps, lambda: evaluated.append(1) or Evaluation(1.0, 1, 1), saved.append))
    assert raised.value.exit_code == 1 and not saved and not evaluated


def test_a_held_out_loss_that_is_not_finite_is_an_error():
    saved: list[Progress] = []
    with pytest.raises(UndertowError, match=r"^step 1: held-out loss is nan; no checkpoint of this step"):
        list(train(trainer(steps=1), lambda: Evaluation(float("nan"), 3, 4), saved.append))
    assert saved == []
