"""`undertow quickstart`: the whole path in miniature on real text, without network or GPU."""

from __future__ import annotations

import json
import os
from enum import StrEnum
from pathlib import Path
from typing import Annotated

import typer

from undertow.cli.signals import terminable
from undertow.cli.threads import patient_threads

RECIPE = "pretrain/quickstart"

# The same steps, only fewer of each; the length stays, so that every branch of the model is still taken.
SHORT = (
    *("train.steps=8", "train.batch_size=2", "train.warmup_steps=2", "train.log_every=2"),
    *("train.eval_every=4", "train.eval_sequences=2", "train.checkpoint_every=4"),
    "indexer.dense_steps=2",
)


class Device(StrEnum):
    """Where the quickstart can run."""

    auto = "auto"
    cpu = "cpu"
    cuda = "cuda"


def register(app: typer.Typer) -> None:
    """Attach the verb to the command line."""
    app.command("quickstart")(quickstart)


def quickstart(
    out: Annotated[
        Path, typer.Option(help="Directory for all that is made; an earlier quickstart's output in it is replaced.")
    ] = Path("quickstart"),
    device: Annotated[
        Device | None,
        typer.Option(
            help="Where tensors live: cpu, cuda (AMD GPUs too are called so), or auto, cuda if there is one. "
            "Default: UNDERTOW_DEVICE, else auto.",
            show_default=False,
        ),
    ] = None,
    short: Annotated[
        bool, typer.Option("--short", help="The same steps in miniature, without a quality bar. Default: off.")
    ] = False,
) -> None:
    """Pretrain a small model on plays, kill and resume it, evaluate, export, sample, report: minutes on two cores."""
    chosen = () if device is None else (f"device={device.value}",)
    begin(out, (*chosen, *(SHORT if short else ())), judged=not short)


def begin(out: Path, overrides: tuple[str, ...], judged: bool) -> None:
    """Run the quickstart with `overrides` to its recipe; `judged` makes its verdict count.

    Raises `typer.Exit` with code 1 when the model is not good enough, and 130 when interrupted.
    """
    from undertow.config.resolve import resolve

    patient_threads()
    words = [RECIPE, *overrides, f"out={json.dumps(str(out / 'run'))}"]
    resolved = resolve(words[0], words[1:], os.environ)
    from undertow.cli.doctor import examine
    from undertow.cli.quickstart.course import Course
    from undertow.train.lock import locked

    try:
        with terminable(), locked(out):
            passed = Course(out, resolved, words, examine(), judged).run()
    except KeyboardInterrupt:
        print(f"interrupted; what is complete stays in {out}", flush=True)
        raise typer.Exit(130) from None
    if not passed:
        raise typer.Exit(1)
