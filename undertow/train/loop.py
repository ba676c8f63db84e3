"""One optimizer step after another: the loop that every training run goes through."""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Iterator
from typing import Any

import torch

from undertow.checkpoint.training import Progress
from undertow.config.errors import UndertowError
from undertow.config.schema import TrainConfig
from undertow.data.packing import Batch, Packer
from undertow.model.transformer import Transformer
from undertow.optim.clipping import clip_gradients, first_not_finite
from undertow.optim.schedule import learning_rate
from undertow.train.batches import flat_batch
from undertow.train.evaluation import Evaluation
from undertow.train.metrics import expert_load
from undertow.train.objective import Losses, objective

_MEND = "no checkpoint of this step is written; lower train.learning_rate and go on from the one before, or start again"


def adamw(model: Transformer, settings: TrainConfig) -> torch.optim.AdamW:
    """AdamW over every parameter (model card 8.3); router biases and hash tables are buffers and stay outside."""
    return torch.optim.AdamW(
        model.parameters(),
        lr=settings.learning_rate,
        betas=(settings.beta1, settings.beta2),
        eps=settings.epsilon,
        weight_decay=settings.weight_decay,
        fused=True,
    )


class Trainer:
    """A model that learns from a packer: `step` takes one optimizer step and returns its metrics.

    `progress` says how far it is, in the form that a checkpoint keeps.
    """

    def __init__(
        self,
        model: Transformer,
        optimizer: torch.optim.Optimizer,
        packer: Packer,
        settings: TrainConfig,
        progress: Progress | None = None,
    ) -> None:
        """`packer` stands where `progress.cursor` says; without `progress` this is a beginning."""
        self.model, self.optimizer, self.settings = model, optimizer, settings
        self._packer = packer
        self._device = model.embed.weight.device
        self.progress = progress or Progress(0, 0, packer.cursor.to_dict())

    def step(self) -> dict[str, Any]:
        """One step, and its metrics by their names in `metrics.jsonl`.

        Raises `UndertowError`, naming the first bad parameter, where the loss or the gradient norm is not finite; the
        weights are then as before the step.
        """
        begun = time.perf_counter()
        number = self.progress.step + 1
        rate = learning_rate(number, self.settings)
        losses, norm, tokens = self._gradients(next(self._packer), number)
        for group in self.optimizer.param_groups:
            group["lr"] = rate
        self.optimizer.step()
        self.progress = Progress(number, self.progress.tokens + tokens, self._packer.cursor.to_dict())
        most, least = expert_load(losses.routes)
        mtp = {} if losses.mtp is None else {"train/mtp_loss": float(losses.mtp.detach())}
        return {
            "step": number,
            "tokens": self.progress.tokens,
            "time": round(time.time(), 3),
            "train/loss": float(losses.total.detach()),
            "train/lm_loss": float(losses.lm.detach()),
            **mtp,
            "train/grad_norm": norm,
            "train/lr": rate,
            "train/tokens_per_second": round(tokens / (time.perf_counter() - begun), 1),
            "moe/load_max": most,
            "moe/load_min": least,
        }

    def _gradients(self, batch: Batch, number: int) -> tuple[Losses, float, int]:
        """Losses, the gradient norm before clipping, and the number of tokens."""
        flat = flat_batch(batch, self._device)
        self.optimizer.zero_grad(set_to_none=True)
        losses = objective(self.model, flat, self.settings.mtp_weight)
        losses.total.backward()
        norm = float(clip_gradients(self.model.parameters(), self.settings.gradient_clip))
        loss = float(losses.total.detach())
        if not (math.isfinite(loss) and math.isfinite(norm)):
            culprit = first_not_finite(self.model) or "no single parameter, the norm overflows"
            raise UndertowError(
                f"step {number}: loss {loss}, gradient norm {norm}; the first parameter that is not finite: {culprit}; "
                "no update was made; lower train.learning_rate and start again"
            )
        return losses, norm, len(flat.ids)


def train(
    trainer: Trainer,
    evaluate: Callable[[], Evaluation],
    save: Callable[[Progress], None],
) -> Iterator[dict[str, Any]]:
    """Steps up to `settings.steps`, each yielding its metrics once all that belongs to it is done.

    Every `eval_every`-th and the last step carry `eval/loss` and `eval/nats_per_byte`. After every
    `checkpoint_every`-th and the last one, `save` is called when the caller has taken the step's metrics.
    Raises `UndertowError` before either where the update left a parameter, or the held-out loss is, not finite.
    """
    settings = trainer.settings
    while trainer.progress.step < settings.steps:
        metrics = trainer.step()
        number = trainer.progress.step
        evaluating = number % settings.eval_every == 0 or number == settings.steps
        saving = number % settings.checkpoint_every == 0 or number == settings.steps
        if evaluating or saving:
            _refuse_bad_update(trainer.model, number)
        if evaluating:
            result = evaluate()
            if not math.isfinite(result.loss):
                raise UndertowError(f"step {number}: held-out loss is {result.loss}; {_MEND}")
            metrics |= {"eval/loss": result.loss, "eval/nats_per_byte": result.nats_per_byte}
        yield metrics
        if saving:
            save(trainer.progress)


def _refuse_bad_update(model: Transformer, number: int) -> None:
    # Elsewhere the next step's loss tells; what is evaluated or kept must be known to be sound.
    if culprit := first_not_finite(model):
        raise UndertowError(f"step {number}: the update left {culprit} not finite; {_MEND}")
