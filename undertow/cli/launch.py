"""`undertow launch`: a run on machines, explained before it is started."""

from __future__ import annotations

import os
import sys
from typing import Annotated

import typer

from undertow.cli.config import Overrides
from undertow.cli.values import json_pieces
from undertow.config.errors import ConfigError, DoesNotFit, InputError


def register(app: typer.Typer) -> None:
    """Attach the verb to the command line."""
    app.command("launch")(launch)


def launch(
    recipe: Annotated[
        str, typer.Argument(metavar="RECIPE", help="Recipe file, or a name such as pretrain/flash-32xMI355X.")
    ],
    nodes: Annotated[int, typer.Option(min=1, max=1_000_000, help="Machines.")],
    overrides: Overrides = None,
    gpus_per_node: Annotated[
        int | None,
        typer.Option(
            min=1, max=1_000_000, show_default=False, help="GPUs of a machine. Default: the recipe's, 8 at most, or 8."
        ),
    ] = None,
    gpu: Annotated[
        str | None, typer.Option(show_default=False, help="Kind of GPU, as H200. Default: that of parallel.gpus.")
    ] = None,
    slurm: Annotated[
        bool, typer.Option("--slurm", help="With --dry-run, print a script for sbatch instead of the command.")
    ] = False,
    dry_run: Annotated[
        bool, typer.Option("--dry-run", help="Explain and print the command; start nothing. Needs no GPU.")
    ] = False,
    json: Annotated[
        bool, typer.Option("--json", help="With --dry-run, print one JSON object instead of text.")
    ] = False,
) -> None:
    """Start a run on machines; with --dry-run, explain it: values and sources, conflicts, memory, seconds, command.

    On other GPUs than the recipe's parallel.gpus, widths stay and the layout is tuned anew. Ends with code 2 for what
    cannot go together, with 3 if the run does not fit. This version starts one process alone, as undertow train does.
    """
    words = overrides or []
    if not dry_run:
        for flag, given in (("--slurm", slurm), ("--json", json)):
            if given:
                raise InputError(f"{flag}: it has an effect with --dry-run alone; add --dry-run, or leave it out")
        _start(recipe, nodes, gpus_per_node, words)
        return
    from undertow.launch.prepare import prepare
    from undertow.launch.text import launch_document, launch_text

    found = prepare(recipe, nodes, gpus_per_node, gpu, words, os.environ)
    if json:
        sys.stdout.writelines(json_pieces(launch_document(found, slurm)))
    else:
        print(launch_text(found, slurm))
    if found.conflicts:
        raise ConfigError("; ".join(found.conflicts))
    if found.plan.refusal:
        raise DoesNotFit(found.plan.refusal)


def _start(recipe: str, nodes: int, gpus_per_node: int | None, words: list[str]) -> None:
    """Run one process as `undertow train` does. Raises `InputError` for more of them."""
    from undertow.config.conflicts import conflicts
    from undertow.config.resolve import resolve
    from undertow.launch.machines import gpus_of_a_node
    from undertow.launch.text import ONE_PROCESS

    config = resolve(recipe, words, os.environ).config
    each = gpus_of_a_node(config, gpus_per_node)
    if nodes * each > 1:
        raise InputError(
            f"--nodes {nodes} of {each} GPUs each: {ONE_PROCESS}; --dry-run tells what it would be, --nodes 1 "
            "--gpus-per-node 1 runs in one process"
        )
    if against := conflicts(config, each):
        raise ConfigError("; ".join(against))
    from undertow.cli.train import train

    train(recipe, words)
