"""`undertow train`: pretraining and fine-tuning from a recipe."""

from __future__ import annotations

import os
from contextlib import AbstractContextManager, nullcontext
from enum import StrEnum
from typing import TYPE_CHECKING, Annotated

import typer

from undertow.cli.config import Overrides
from undertow.cli.signals import following, terminable
from undertow.cli.threads import patient_threads

if TYPE_CHECKING:
    from undertow.config.world import World


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
    every key. Ctrl-C and SIGTERM write a checkpoint and end with code 130. Under torchrun each process is a rank of one
    run.
    """
    from undertow.config.world import World

    patient_threads()
    world = World.of(os.environ)
    with terminable(), nullcontext() if world is None else following(), _together(world):
        _train(recipe, overrides or [], resume is Resume.auto, world)


def _together(world: World | None) -> AbstractContextManager[None]:
    """The meeting of several processes."""
    if world is None:
        return nullcontext()
    os.environ.setdefault("TORCH_FR_BUFFER_SIZE", "2000")  # collectives that torch keeps to explain a standstill by
    from undertow.parallel.start import met

    return met(world)


def _train(recipe: str, overrides: list[str], resume: bool, world: World | None) -> None:
    from undertow.config.resolve import resolve

    resolved = resolve(recipe, overrides, os.environ)
    parallel = resolved.config.parallel
    if parallel.layout is not None:
        from undertow.config.layout import check_layout, parse_layout, placement_of

        layout, placement = parse_layout(parallel.layout), placement_of(parallel.schedule)
        check_layout(layout, resolved.config.model, parallel.pipeline, placement)
    from undertow.cli.band import judged
    from undertow.cli.doctor import examine
    from undertow.train.pretrain import pretrain
    from undertow.train.progress import duration, reporter

    first = world is None or world.rank == 0
    facts = examine() if first else {}
    outcome = pretrain(
        resolved,
        judged(reporter(resolved.config.train.log_every), resolved.config, 1 if world is None else world.ranks),
        resume=resume,
        facts={key: facts[key] for key in ("versions", "system", "torch_built_for", "devices") if key in facts},
        world=world,
    )
    if first:
        print(f"done: step {outcome.progress.step}, {outcome.progress.tokens:,} tokens, {duration(outcome.seconds)}")
