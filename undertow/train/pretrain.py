"""A training run from its resolved recipe: built, resumed if asked, driven to its last step, and recorded."""

from __future__ import annotations

import time
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, closing, contextmanager, nullcontext, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from undertow.checkpoint.training import Progress, latest_checkpoint
from undertow.checkpoint.writer import CheckpointWriter
from undertow.config.errors import UndertowError
from undertow.config.optimizations import refuse_unbuilt
from undertow.config.resolve import Resolved
from undertow.config.schema import RunConfig
from undertow.model.transformer import Transformer
from undertow.ops.registry import summary
from undertow.train.amount import describe_data, refuse_unlearned
from undertow.train.evaluation import Evaluation, evaluate
from undertow.train.fit import check_fit
from undertow.train.interruption import interruptible
from undertow.train.loop import Trainer, train
from undertow.train.metrics import MetricsFile
from undertow.train.progress import Reporter
from undertow.train.run import RunDirectory
from undertow.train.start import device_of, trainer_of
from undertow.train.text import Text, read_text
from undertow.train.tracking import open_trackers, refuse_missing
from undertow.train.widths import refuse_wider


@dataclass(frozen=True)
class Outcome:
    """A finished run: its directory, the trained model, its text, and the wall-clock seconds of this part of it."""

    run: RunDirectory
    model: Transformer
    text: Text
    progress: Progress
    seconds: float


def pretrain(
    resolved: Resolved,
    reporter: Reporter,
    *,
    resume: bool = False,
    facts: dict[str, Any] | None = None,
    text: Text | None = None,
) -> Outcome:
    """Train as the recipe says, in the run directory `out`.

    With `resume` the run goes on from its latest checkpoint, in the same order of data, or begins if there is none.
    `facts` about the machine go into `environment.json`, beside the backend of each operator; `text` is that of the
    recipe, if already read. Raises `InputError` for what cannot be carried out, `UndertowError` when a step or a
    checkpoint fails, and `KeyboardInterrupt` once an interrupted run has written its last checkpoint.
    """
    begun = time.perf_counter()
    config = resolved.tracked
    refuse_unbuilt(config.optimizations)
    refuse_wider(config)
    device = device_of(config.device)
    trackers = list(config.tracking)
    refuse_missing(trackers)
    run = RunDirectory(Path(config.out))
    with run.claim(resume) as checkpoint:
        unfit = check_fit(resolved.config, device)
        source = config.init_from
        # A checkpoint has the tokenizer that its run began with.
        text = text or read_text(config.data, config.model, str(checkpoint) if checkpoint else source)
        torch.manual_seed(config.seed)  # nothing draws from it, but checkpoints hold its state
        trainer = trainer_of(config, text, device, checkpoint)
        refuse_unlearned(text, trainer.settings)
        resolved.refuse_unread()
        choices = trainer.model.ops.choices
        facts = {**(facts or {}), "ops": {op: str(choice) for op, choice in choices.items()}}
        run.describe(resolved, facts, device, trainer.progress.step)
        origin = f"resumed from {checkpoint.name}" if checkpoint else "started"
        run.note(origin)
        reporter.say(f"{origin}: run directory {run.path}, on {device}")
        reporter.say(f"operators: {summary(choices.values())}")
        for line in [*describe_data(text, trainer, config.data.validation_fraction), *([unfit] if unfit else [])]:
            reporter.say(line)
        if trainer.indexer.frozen and not (checkpoint or source) and trainer.has_indexer:
            reporter.say(
                "warning: indexer.frozen in a run from scratch: compressed sparse attention keeps choosing at random; "
                "set indexer.frozen=false to train its indexer"
            )
        with _recorded(run, trainer, reporter):
            _drive(trainer, text, run, reporter, resolved.config, trackers)
    return Outcome(run, trainer.model, text, trainer.progress, time.perf_counter() - begun)


def _drive(
    trainer: Trainer, text: Text, run: RunDirectory, reporter: Reporter, config: RunConfig, trackers: Sequence[str]
) -> None:
    model, settings, begun = trainer.model, trainer.settings, trainer.progress.step
    device = model.embed.weight.device

    def held_out() -> Evaluation:
        stage = trainer.stage(trainer.progress.step)
        indexing = stage.indexing._replace(distil=False, recall=not trainer.indexer.frozen)
        rows = min(settings.micro_batch_size or stage.batch_size, stage.batch_size)
        batches = text.held_out(rows, stage.sequence_length, settings.eval_sequences)
        return evaluate(model, batches, text.tokenizer, device, indexing)

    def published(path: Path) -> None:
        run.note(f"checkpoint {path.name}")

    reporter.begin(begun, settings.steps)
    since = time.perf_counter()
    with ExitStack() as stack:
        asked = stack.enter_context(interruptible())
        metrics = stack.enter_context(closing(MetricsFile(run.metrics, begun)))
        followers = open_trackers(trackers, run.path, config.model_dump(mode="json"), begun)
        for follower in followers:
            stack.enter_context(closing(follower))
        writer = stack.enter_context(
            CheckpointWriter(run.checkpoints, text.tokenizer, settings.checkpoint_keep, published)
        )

        def save(progress: Progress) -> None:
            writer.save(model, trainer.optimizer, progress)

        try:
            for entry in train(trainer, held_out, save, asked):
                metrics.write(entry)
                for follower in followers:
                    follower.write(entry)
                if "train/skipped_for" in entry:
                    run.note(f"step {entry['step']} skipped: {entry['train/skipped_for']}")
                for passed in model.ops.calls.news():
                    run.note(passed)
                    reporter.say(f"warning: {passed}")
                each = (time.perf_counter() - since) / (entry["step"] - begun)
                reporter.step(entry, each * (settings.steps - entry["step"]))
                writer.poll()
        except KeyboardInterrupt:
            writer.wait()
            raise


@contextmanager
def _recorded(run: RunDirectory, trainer: Trainer, reporter: Reporter) -> Iterator[None]:
    """Note in the run's events how it ended, and take its display down."""
    how = "failed"
    try:
        yield
        how = "finished"
    except KeyboardInterrupt:
        how = "interrupted"
        raise
    finally:
        reporter.end()
        # What made a run fail is told, not that the same full disk takes no note of it.
        with suppress(UndertowError) if how == "failed" else nullcontext():
            run.note(f"{how} after step {trainer.progress.step}")
        if how == "interrupted":
            latest = latest_checkpoint(run.checkpoints)
            kept = f"goes on from {latest}" if latest else "begins anew, there is no checkpoint yet"
            reporter.say(f"interrupted after step {trainer.progress.step}; --resume auto {kept}")
