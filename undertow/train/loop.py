"""One optimizer step after another: the loop that every training run goes through."""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Collection, Iterator
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import Tensor

from undertow.checkpoint.training import Progress
from undertow.config.errors import UndertowError
from undertow.config.training import IndexerConfig, TrainConfig
from undertow.data.packing import Batch, Packer
from undertow.model.indexer import of_indexer
from undertow.model.modules import Again
from undertow.model.packed import refuse_packed
from undertow.model.transformer import Transformer
from undertow.optim.clipping import clip_gradients, first_not_finite
from undertow.parallel.mesh import Mesh
from undertow.parallel.norm import gradient_norm
from undertow.parallel.pipeline.run import Pipeline
from undertow.parallel.shard import sum_gradients, widen_gradients
from undertow.train.accumulate import Passes, accumulate, sum_losses
from undertow.train.balance import update_biases
from undertow.train.batches import count_labels, flat_batch, micro_batches, rows_of
from undertow.train.evaluation import Evaluation
from undertow.train.figures import step_figures
from undertow.train.objective import Weights
from undertow.train.pipeline import PipelinePasses
from undertow.train.stages import Stage, stage_of

_MEND = "no checkpoint of this step is written; lower train.learning_rate and go on from the one before, or start again"


class Gradients(NamedTuple):
    """What one batch gave: the total loss and its parts, gradient norms before clipping (the indexer's apart), how many
    tokens experts got `[layers, E]`, and how many labels the main loss had."""

    loss: float
    parts: dict[str, float]
    norm: float
    indexer_norm: float
    counts: Tensor
    labels: int

    @property
    def finite(self) -> bool:
        """Whether loss and gradients are."""
        return all(map(math.isfinite, (self.loss, self.norm, self.indexer_norm)))


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
        indexer: IndexerConfig,
        progress: Progress | None = None,
        recompute: Collection[Again] = (),
        mesh: Mesh | None = None,
        pipeline: Pipeline | None = None,
    ) -> None:
        """`packer` stands where `progress.cursor` says; without `progress` this is a beginning. Over the ranks of
        `mesh` each has its part of the model, all have the same packer, and each learns from its rows of every batch;
        `pipeline` are its stages, if there are several. Raises `InputError` for a model that holds matrices as
        codes."""
        refuse_packed(model, "no training")
        self.model, self.optimizer, self.settings, self.indexer = model, optimizer, settings, indexer
        self._packer, self._recompute, self._mesh, self.pipeline = packer, recompute, mesh, pipeline
        self._passes: Passes = partial(accumulate, model) if pipeline is None else PipelinePasses(model, pipeline)
        self._device = next(model.parameters()).device
        self.progress = progress or Progress(0, 0, packer.cursor.to_dict(), skipped=0, skipped_in_row=0)
        if settings.state_profile == "fp32":
            widen_gradients(model)

    def anew(self, packer: Packer, settings: TrainConfig) -> Trainer:
        """Another one at its beginning, with the same model and optimizer."""
        over = self._recompute, self._mesh, self.pipeline
        return Trainer(self.model, self.optimizer, packer, settings, self.indexer, None, *over)

    @property
    def ranks(self) -> int:
        """Processes that train."""
        return 1 if self._mesh is None else self._mesh.axes.geometry.gpus

    def stage(self, step: int) -> Stage:
        """The settings of a step, counted from 1."""
        return stage_of(step, self.settings, self.indexer)

    @property
    def has_indexer(self) -> bool:
        """Whether the model has layers of compressed sparse attention."""
        config = self.model.config
        return any(config.kind(layer) == "csa" for layer in range(config.num_hidden_layers))

    def step(self) -> dict[str, Any]:
        """One step, and its metrics by their names in `metrics.jsonl`.

        A step whose loss or gradient norm is not finite, or whose batch has no learned token, is skipped: weights,
        moments and router biases stay, the data is passed over, and `train/skipped_for` says why, with the first bad
        parameter. Raises `UndertowError` where that would happen `skip_limit` times in a row, or where a weight itself
        is not finite.
        """
        begun = time.perf_counter()
        number = self.progress.step + 1
        stage = self.stage(number)
        batch = self._packer.take(stage.batch_size, stage.sequence_length)
        self._choose_parameters(stage)
        found = self._gradients(batch, stage)
        reason = self._reason(number, found)
        if reason is None:
            for group in self.optimizer.param_groups:
                group["lr"] = stage.learning_rate
            self.optimizer.step()
            if not stage.indexer_alone:
                update_biases(self.model, found.counts, self.settings.bias_update_rate)
        else:
            self.optimizer.zero_grad(set_to_none=True)
        self._advance(batch.ids.size, skipped=reason is not None)
        figures = step_figures(
            self.model, self.progress, stage, loss=found.loss, parts=found.parts, norm=found.norm,
            indexer_norm=found.indexer_norm, counts=found.counts, seconds=time.perf_counter() - begun, ranks=self.ranks,
        )  # fmt: skip
        return figures | ({"train/skipped_for": reason} if reason else {})

    def refuse_bad_update(self) -> None:
        """Raise `UndertowError` where the last update left a parameter not finite, on whichever rank.

        Elsewhere the next step's loss tells; what is evaluated or kept must be known to be sound.
        """
        if culprit := first_not_finite(self.model, self._mesh):
            raise UndertowError(f"step {self.progress.step}: the update left {culprit} not finite; {_MEND}")

    def _choose_parameters(self, stage: Stage) -> None:
        """Let gradient reach what this step trains: all, all but a frozen indexer, or the indexer alone."""
        self.optimizer.zero_grad(set_to_none=True)
        for name, parameter in self.model.named_parameters():
            parameter.requires_grad_(not self.indexer.frozen if of_indexer(name) else not stage.indexer_alone)

    def _gradients(self, batch: Batch, stage: Stage) -> Gradients:
        """Gradients of the whole batch, summed over its micro-batches and over ranks, and clipped."""
        of = count_labels(batch)
        place, ranks = (0, 1) if self._mesh is None else self._mesh.data_place
        own = micro_batches(rows_of(batch, place, ranks), self.settings.micro_batch_size)
        parts = [flat_batch(part, self._device) for part in own]
        weights = Weights.of(stage, self.settings, self.indexer)
        every = self._passes(parts, weights, of, stage.indexing, self._recompute)
        if self._mesh is not None:
            sum_gradients(self.model, self._mesh)
        # Apart: the indexer's loss is its own, and its size is no reason to shorten the other gradients.
        norms = [self._clip(of_group) for of_group in (False, True)]
        sums = sum_losses(every, norms, self._mesh)
        norm, indexer_norm = sums.read
        told = sums.parts if of.lm else sums.parts | {"lm": math.nan}
        return Gradients(sums.loss, told, norm, indexer_norm, sums.counts, of.lm)

    def _clip(self, indexer: bool) -> Tensor:
        """Bound the gradient of the indexer or that of the rest; the norm before, that of all ranks."""
        members = [p for name, p in self.model.named_parameters() if of_indexer(name) is indexer]
        norm = None if self._mesh is None else gradient_norm(self.model, self._mesh, members)
        return clip_gradients(members, self.settings.gradient_clip, norm)

    def _reason(self, number: int, found: Gradients) -> str | None:
        """Why a step is to be skipped, None if it is not; an error where skipping does not help or has gone on."""
        if found.finite and found.labels:
            return None
        if found.finite:
            reason = "no token of its batch is learned: responses lie beyond train.sequence_length, or are empty"
            told, mend = f"step {number}: {reason}", "lengthen train.sequence_length or mend the data"
        else:
            reason = first_not_finite(self.model, self._mesh) or "no single parameter, the norm overflows"
            told = (
                f"step {number}: loss {found.loss}, gradient norm {found.norm}; the first parameter that is not "
                f"finite: {reason}; no update was made"
            )
            mend = "lower train.learning_rate and go on from the last checkpoint, or start again"
        if reason.endswith("(its value)"):
            raise UndertowError(f"{told}; no later step can mend it: {_MEND}")
        row = self.progress.skipped_in_row + 1
        if row >= self.settings.skip_limit:
            raise UndertowError(f"{told}, as in {row} steps in a row (train.skip_limit); {mend}")
        return reason

    def _advance(self, tokens: int, skipped: bool) -> None:
        last = self.progress
        self.progress = Progress(
            last.step + 1,
            last.tokens + (0 if skipped else tokens),
            self._packer.cursor.to_dict(),
            skipped=last.skipped + skipped,
            skipped_in_row=last.skipped_in_row + 1 if skipped else 0,
        )


def train(
    trainer: Trainer,
    evaluate: Callable[[], Evaluation],
    save: Callable[[Progress], None],
    stop: Callable[[], bool] = lambda: False,
) -> Iterator[dict[str, Any]]:
    """Steps up to `settings.steps`, each yielding its metrics once all that belongs to it is done.

    Every `eval_every`-th and the last step carry the metrics of an evaluation. After every `checkpoint_every`-th and
    the last one, `save` is called when the caller has taken the step's metrics. Once `stop` says so, the step that has
    just been taken is saved and `KeyboardInterrupt` raised. Raises `UndertowError` before either where the update left
    a parameter, or the held-out loss is, not finite.
    """
    settings = trainer.settings
    while trainer.progress.step < settings.steps:
        metrics = trainer.step()
        number = trainer.progress.step
        last, stopping = number == settings.steps, stop()
        evaluating = last or number % settings.eval_every == 0
        saving = last or stopping or number % settings.checkpoint_every == 0
        if evaluating or saving:
            trainer.refuse_bad_update()
        if evaluating:
            result = evaluate()
            if not math.isfinite(result.loss):
                raise UndertowError(f"step {number}: held-out loss is {result.loss}; {_MEND}")
            metrics |= result.figures
        yield metrics
        stopping = stopping or stop()
        if saving or stopping:
            save(trainer.progress)
        if stopping and not last:
            raise KeyboardInterrupt
