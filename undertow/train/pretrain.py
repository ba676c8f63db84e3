"""A training run from its resolved recipe: built, resumed if asked, driven to its last step, and recorded."""

from __future__ import annotations

import time
from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager, ExitStack, closing, contextmanager, nullcontext, suppress
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
from undertow.config.world import World
from undertow.model.transformer import Transformer
from undertow.ops.registry import summary
from undertow.parallel.mesh import Mesh, build_mesh
from undertow.parallel.start import anyone, tell, tell_error
from undertow.parallel.watch import watched
from undertow.train.amount import describe_data, refuse_unlearned
from undertow.train.evaluation import Evaluation, evaluate
from undertow.train.fit import check_fit
from undertow.train.interruption import interruptible
from undertow.train.loop import Trainer, train
from undertow.train.metrics import MetricsFile
from undertow.train.progress import Lines, Reporter
from undertow.train.run import RunDirectory
from undertow.train.same import refuse_other
from undertow.train.start import MEASURED, device_of, trainer_of
from undertow.train.text import Text, read_text
from undertow.train.tracking import Tracker, open_trackers, refuse_missing
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
    world: World | None = None,
) -> Outcome:
    """Train as the recipe says, in the run directory `out`.

    With `resume` the run goes on from its latest checkpoint, in the same order of data, or begins if there is none.
    `facts` about the machine go into `environment.json`, beside the backend of each operator; `text` is that of the
    recipe, if already read. The processes of `world` have met, and each of them calls this; the first alone writes,
    checkpoints apart, and shows what happens. Raises `InputError` for what cannot be carried out, `UndertowError` when
    a step or a checkpoint fails, and `KeyboardInterrupt` once an interrupted run has written its last checkpoint.
    """
    begun = time.perf_counter()
    config, ranks = resolved.tracked, 1 if world is None else world.ranks
    if world is not None:
        refuse_other(resolved)
    refuse_unbuilt(config.optimizations)
    refuse_wider(config, ranks)
    device = device_of(config.device, world)
    mesh = None if world is None else build_mesh(config.parallel, model=config.model, device=device.type)
    trackers = list(config.tracking)
    refuse_missing(trackers)
    run = RunDirectory(Path(config.out), keeps=world is None or world.rank == 0)
    if not run.keeps:
        reporter = Lines(config.train.log_every, lambda line: None)
    at: list[Trainer] = []
    with _watched(config, world, at), _claimed(run, resume, mesh) as checkpoint:
        unfit = check_fit(resolved.config, device, world)
        source = config.init_from
        # A checkpoint has the tokenizer that its run began with.
        text = text or read_text(config.data, config.model, str(checkpoint) if checkpoint else source)
        torch.manual_seed(config.seed)  # nothing draws from it, but checkpoints hold its state
        trainer = trainer_of(config, text, device, checkpoint, mesh)
        at.append(trainer)
        refuse_unlearned(text, trainer.settings)
        resolved.refuse_unread()
        choices = trainer.model.ops.choices
        facts = {**(facts or {}), "ops": {op: str(choice) for op, choice in choices.items()}, "processes": ranks}
        run.describe(resolved, facts, device, trainer.progress.step)
        origin = f"resumed from {checkpoint.name}" if checkpoint else "started"
        run.note(origin)
        where = device if mesh is None else f"{device.type}, {ranks} processes: {mesh.axes}"
        reporter.say(f"{origin}: run directory {run.path}, on {where}")
        reporter.say(f"operators: {summary(choices.values())}")
        for line in [*describe_data(text, trainer, config.data.validation_fraction), *([unfit] if unfit else [])]:
            reporter.say(line)
        if trainer.indexer.frozen and not (checkpoint or source) and trainer.has_indexer:
            reporter.say(
                "warning: indexer.frozen in a run from scratch: compressed sparse attention keeps choosing at random; "
                "set indexer.frozen=false to train its indexer"
            )
        if trainer.settings.uniform_routing:
            reporter.say("warning: train.uniform_routing: experts are taken in turn; what is learned is of no use")
        with _recorded(run, trainer, reporter):
            _drive(trainer, text, run, reporter, resolved.config, trackers, mesh)
    return Outcome(run, trainer.model, text, trainer.progress, time.perf_counter() - begun)


def _watched(config: RunConfig, world: World | None, at: Sequence[Trainer]) -> AbstractContextManager[None]:
    """The watch of several processes over each other; `at` holds the trainer as soon as there is one."""
    if world is None:
        return nullcontext()
    return watched(config.parallel.timeout, lambda: at[0].progress.step if at else 0, fails=tell_error)


@contextmanager
def _claimed(run: RunDirectory, resume: bool, mesh: Mesh | None) -> Iterator[Path | None]:
    """`RunDirectory.claim` by the process that writes there; the others are told the checkpoint."""
    if not run.keeps:
        told = tell(None)
        yield None if told is None else Path(told)
        return
    with run.claim(resume) as checkpoint:
        if mesh is not None:
            tell(None if checkpoint is None else str(checkpoint))
        yield checkpoint


def _drive(
    trainer: Trainer, text: Text, run: RunDirectory, reporter: Reporter, config: RunConfig, trackers: Sequence[str],
    mesh: Mesh | None,
) -> None:  # fmt: skip
    model, settings, begun = trainer.model, trainer.settings, trainer.progress.step
    device = model.device

    def held_out() -> Evaluation:
        stage = trainer.stage(trainer.progress.step)
        indexing = stage.indexing._replace(distil=False, recall=not trainer.indexer.frozen)
        parts, each = 1 if mesh is None else mesh.data_place[1], settings.micro_batch_size
        rows = min(each * parts if each else stage.batch_size, stage.batch_size)
        batches = text.held_out(rows, stage.sequence_length, settings.eval_sequences)
        return evaluate(model, batches, text.tokenizer, device, indexing, mesh, trainer.pipeline)

    def published(path: Path) -> None:
        run.note(f"checkpoint {path.name}")

    reporter.begin(begun, settings.steps)
    since = time.perf_counter()
    with ExitStack() as stack:
        asked = stack.enter_context(interruptible())
        followers: list[MetricsFile | Tracker] = []
        if run.keeps:
            followers.append(stack.enter_context(closing(MetricsFile(run.metrics, begun))))
            for tracker in open_trackers(trackers, run.path, config.model_dump(mode="json"), begun):
                followers.append(stack.enter_context(closing(tracker)))
        writer = stack.enter_context(
            CheckpointWriter(run.checkpoints, text.tokenizer, settings.checkpoint_keep, published, mesh)
        )

        def save(progress: Progress) -> None:
            writer.save(model, trainer.optimizer, progress)

        try:
            stop = asked if mesh is None else lambda: anyone(asked())
            for entry in train(trainer, held_out, save, stop):
                for follower in followers:
                    follower.write(entry)
                if "train/skipped_for" in entry:
                    run.note(f"step {entry['step']} skipped: {entry['train/skipped_for']}")
                for passed in model.ops.calls.news():
                    run.note(passed)
                    reporter.say(f"warning: {passed}")
                each = (time.perf_counter() - since) / (entry["step"] - begun)
                reporter.step(entry, each * (settings.steps - entry["step"]))
                if trainer.pipeline is not None and entry["step"] == begun + MEASURED:
                    run.keep_timeline(trainer.pipeline.timeline or {})
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
