"""A pretraining run from its resolved recipe: built, resumed if asked, driven to its last step, and recorded."""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import closing, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from undertow.checkpoint.training import Progress, latest_checkpoint, load_checkpoint, save_checkpoint
from undertow.config.errors import InputError
from undertow.config.optimizations import refuse_unbuilt
from undertow.config.resolve import Resolved
from undertow.config.schema import RunConfig, TrainConfig
from undertow.data.packing import Cursor, Packer
from undertow.model.build import build_model
from undertow.model.transformer import Transformer
from undertow.ops import Ops
from undertow.ops.registry import choose
from undertow.train.evaluation import Evaluation, evaluate
from undertow.train.loop import Trainer, adamw, train
from undertow.train.metrics import MetricsFile
from undertow.train.progress import Reporter
from undertow.train.run import RunDirectory
from undertow.train.text import Text, read_text


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
    """Pretrain as the recipe says, in the run directory `out`.

    With `resume` the run goes on from its latest checkpoint, in the same order of data, or begins if there is none.
    `facts` about the machine go into `environment.json`; `text` is that of the recipe, if already read. Raises
    `InputError` for what cannot be carried out and `UndertowError` when a step or a checkpoint fails.
    """
    begun = time.perf_counter()
    config = resolved.tracked
    refuse_unbuilt(config.optimizations)
    device = _device(config.device)
    run = RunDirectory(Path(config.out))
    checkpoint = run.claim(resume)
    text = text or read_text(config.data, config.model)
    trainer = _trainer(config, text, device, checkpoint)
    resolved.refuse_unread()
    run.describe(resolved, facts or {}, device)
    origin = f"resumed from {checkpoint.name}" if checkpoint else "started"
    run.note(origin)
    reporter.say(f"{origin}: run directory {run.path}, on {device}")
    with _recorded(run, trainer, reporter):
        _drive(trainer, text, run, reporter)
    return Outcome(run, trainer.model, text, trainer.progress, time.perf_counter() - begun)


def _trainer(config: RunConfig, text: Text, device: torch.device, checkpoint: Path | None) -> Trainer:
    """The trainer of a run at its beginning, or where `checkpoint` left it."""
    settings = _whole(config.train)
    ops = Ops(_choices(config, device), batch_invariant=config.numerics.batch_invariant, device=device)
    model = build_model(config.model, config.seed, getattr(torch, config.numerics.dtype), device, ops)
    optimizer = adamw(model, settings)
    progress = load_checkpoint(checkpoint, model, optimizer) if checkpoint else None
    cursor = Cursor.from_dict(progress.cursor) if progress else None
    packer = Packer(text.training_ids, settings.batch_size, settings.sequence_length, config.seed, cursor)
    return Trainer(model, optimizer, packer, settings, progress)


def _drive(trainer: Trainer, text: Text, run: RunDirectory, reporter: Reporter) -> None:
    model, settings, begun = trainer.model, trainer.settings, trainer.progress.step
    device = model.embed.weight.device

    def held_out() -> Evaluation:
        return evaluate(model, text.held_out(settings, settings.eval_batches), text.tokenizer, device)

    def save(progress: Progress) -> None:
        run.note(
            f"checkpoint {save_checkpoint(run.checkpoints, model, trainer.optimizer, progress, text.tokenizer).name}"
        )

    reporter.begin(begun, settings.steps)
    since = time.perf_counter()
    with closing(MetricsFile(run.metrics, begun)) as metrics:
        for entry in train(trainer, held_out, save):
            metrics.write(entry)
            each = (time.perf_counter() - since) / (entry["step"] - begun)
            reporter.step(entry, each * (settings.steps - entry["step"]))


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
        run.note(f"{how} after step {trainer.progress.step}")
        if how == "interrupted":
            latest = latest_checkpoint(run.checkpoints)
            kept = f"{latest} is the last checkpoint" if latest else "there is no checkpoint yet"
            reporter.say(f"interrupted after step {trainer.progress.step}; {kept}; --resume auto goes on from it")


def _whole(section: TrainConfig) -> TrainConfig:
    """All keys of a section, each noted as read: the loop takes every one of them."""
    return TrainConfig(**{name: getattr(section, name) for name in TrainConfig.model_fields})


def _choices(config: RunConfig, device: torch.device) -> dict[str, str]:
    """Backends by operator. Both attention paths are one operator here, so both keys must be able to serve."""
    choices: dict[str, str] = dict(config.ops)
    for key in ("backend", "csa_backend"):
        wanted = getattr(config.attention, key)
        if wanted != "auto":
            choices["sparse_attention"] = choose("sparse_attention", device, wanted).chosen
    return choices


def _device(name: str) -> torch.device:
    found = torch.cuda.is_available()
    if name == "cuda" and not found:
        raise InputError("device 'cuda': torch sees no GPU here; use device=cpu or device=auto")
    return torch.device("cuda" if name != "cpu" and found else "cpu")
