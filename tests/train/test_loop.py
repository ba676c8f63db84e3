"""Steps: what they report, that they learn, and that they stop before harm."""

import numpy as np
import pytest
import torch

from tests.model.small import small_config
from undertow.checkpoint.training import Progress
from undertow.config.errors import UndertowError
from undertow.config.schema import TrainConfig
from undertow.data.packing import Packer
from undertow.model.build import build_model
from undertow.train.evaluation import Evaluation
from undertow.train.loop import Trainer, adamw, train

CONFIG = small_config()
DOCUMENTS = [np.arange(3, 43, dtype=np.int32), np.arange(50, 90, dtype=np.int32)]


def trainer(**settings) -> Trainer:
    chosen = dict(steps=12, batch_size=2, sequence_length=40, warmup_steps=2, learning_rate=1e-2) | settings
    train = TrainConfig(**chosen)
    model = build_model(CONFIG, seed=1)
    return Trainer(model, adamw(model, train), Packer(DOCUMENTS, train.batch_size, train.sequence_length), train)


def test_loss_falls_on_text_that_repeats():
    steps = trainer(steps=12, min_learning_rate=1e-2)
    losses = [steps.step()["train/lm_loss"] for _ in range(12)]
    assert losses[0] == pytest.approx(np.log(CONFIG.vocab_size), rel=0.05)
    assert losses[-1] < 0.75 * losses[0]


def test_metrics_of_a_step():
    steps = trainer(mtp_weight=0.5)
    first, second = steps.step(), steps.step()
    assert list(first) == [
        *("step", "tokens", "time", "train/loss", "train/lm_loss", "train/mtp_loss", "train/grad_norm", "train/lr"),
        *("train/tokens_per_second", "moe/load_max", "moe/load_min"),
    ]
    assert (first["step"], second["step"], first["tokens"], second["tokens"]) == (1, 2, 80, 160)
    assert (first["train/lr"], second["train/lr"]) == (5e-3, 1e-2)
    assert first["train/loss"] == pytest.approx(first["train/lm_loss"] + 0.5 * first["train/mtp_loss"], rel=1e-6)
    assert 0 <= first["moe/load_min"] < 1 < first["moe/load_max"] <= CONFIG.n_routed_experts
    assert steps.progress.step == 2 and steps.progress.cursor["epoch"] == 2


def test_gradients_are_clipped_before_the_update():
    def norm_of(clip: float) -> float:
        steps = trainer(gradient_clip=clip)
        steps.step()
        return float(torch.stack([p.grad.norm() for p in steps.model.parameters() if p.grad is not None]).norm())

    assert norm_of(1e-3) == pytest.approx(1e-3, rel=1e-4)
    assert norm_of(1e3) > 0.1


@pytest.mark.parametrize("where", ["value", "gradient"])
def test_what_is_not_finite_stops_the_run_with_the_weights_untouched(where):
    steps = trainer()
    steps.step()
    weight = steps.model.layers[1].attn.wo_a.weight
    if where == "value":
        with torch.no_grad():
            weight[0, 0] = float("nan")
    else:
        weight.register_hook(lambda gradient: gradient * float("inf"))
    before = {name: tensor.clone() for name, tensor in steps.model.state_dict().items()}
    with pytest.raises(
        UndertowError, match=rf"^step 2: loss .*not finite: layers\.1\.attn\.wo_a\.weight \(its {where}"
    ):
        steps.step()
    after = steps.model.state_dict()
    assert all(torch.equal(before[name], after[name]) or name.endswith("wo_a.weight") for name in before)
    assert steps.progress.step == 1


def test_rhythm_of_evaluations_and_checkpoints():
    saved: list[Progress] = []
    entries = train(trainer(steps=7, eval_every=3, checkpoint_every=2), lambda: Evaluation(6.0, 3, 4), saved.append)
    evaluated = [
        (entry["step"], entry["eval/loss"], entry["eval/nats_per_byte"]) for entry in entries if "eval/loss" in entry
    ]
    assert evaluated == [(3, 2.0, 1.5), (6, 2.0, 1.5), (7, 2.0, 1.5)]
    assert [progress.step for progress in saved] == [2, 4, 6, 7]


def test_one_update_is_that_of_adamw():
    steps = trainer(learning_rate=1e-2, warmup_steps=0, decay_fraction=0.0, weight_decay=0.1, epsilon=1e-8)
    norm = steps.model.norm.weight
    before = norm.detach().clone()
    steps.step()
    gradient = norm.grad
    wanted = before * (1 - 1e-2 * 0.1) - 1e-2 * gradient / (gradient.abs() + 1e-8)
    torch.testing.assert_close(norm.detach(), wanted, rtol=1e-5, atol=1e-7)


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
