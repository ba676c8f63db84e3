"""`undertow train`: pretraining and fine-tuning from a recipe."""

from __future__ import annotations

import os
from enum import StrEnum
from typing import Annotated

import typer

from undertow.cli.config import Overrides
from undertow.cli.signals import terminable
from undertow.cli.threads import patient_threads


class Resume(StrEnum):
    """What to do with a run that is already in the run directory."""

    never = "never"
    auto = "auto"


def register(app: typer.Typer) -> None:
    """Attach the verb to the command line."""
    app.command("train")(train)


def train(
    recipe: Annotated[
        str, typer.Argument(metavar="RECIPE", help="Recipe file, or a name such as pretrain/quickstart.")
    ],
    overrides: Overrides = None,
    resume: Annotated[
        Resume,
        typer.Option(help="auto goes on from the latest checkpoint in the run directory, or begins if there is none."),
    ] = Resume.never,
) -> None:
    """Pretrain, or fine-tune on prompts and responses, as a recipe says.

    Configuration, metrics and checkpoints go into its run directory (out=DIR). `undertow config show RECIPE` lists
    every key. Ctrl-C and SIGTERM write a checkpoint and end with code 130.
    """
    from undertow.config.resolve import resolve

    patient_threads()
    resolved = resolve(recipe, overrides or [], os.environ)
    parallel = resolved.config.parallel
    if parallel.layout is not None:
        from undertow.planner.pipeline.layout import check_layout, parse_layout

        check_layout(parse_layout(parallel.layout), resolved.config.model, parallel.pipeline)
    from undertow.cli.doctor import examine
    from undertow.train.pretrain import pretrain
    from undertow.train.progress import duration, reporter

    facts = examine()
    with terminable():
        outcome = pretrain(
            resolved,
            reporter(resolved.config.train.log_every),
            resume=resume is Resume.auto,
            facts={key: facts[key] for key in ("versions", "system", "torch_built_for", "devices")},
        )
    print(f"done: step {outcome.progress.step}, {outcome.progress.tokens:,} tokens, {duration(outcome.seconds)}")
