"""`undertow launch`: a run on machines, explained before it is started."""

from __future__ import annotations

import os
import sys
from typing import TYPE_CHECKING, Annotated

import typer

from undertow.cli.config import Overrides
from undertow.cli.train import Resume
from undertow.cli.values import json_pieces
from undertow.config.errors import ConfigError, DoesNotFit, InputError

if TYPE_CHECKING:
    from undertow.launch.prepare import Launch


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
    nproc: Annotated[
        int | None,
        typer.Option(min=1, max=1_000_000, show_default=False, help="Processes on processor cores, instead of GPUs."),
    ] = None,
    gpu: Annotated[
        str | None, typer.Option(show_default=False, help="Kind of GPU, as H200. Default: that of parallel.gpus.")
    ] = None,
    resume: Annotated[
        Resume,
        typer.Option(help="auto goes on from the latest checkpoint in the run directory, or begins if there is none."),
    ] = Resume.never,
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
    cannot go together, with 3 if the run does not fit. On one machine the processes are started here, and end together;
    on several, run the command that --dry-run prints on each.
    """
    words = overrides or []
    if nproc is not None:
        for flag, given in (("--gpus-per-node", gpus_per_node), ("--gpu", gpu), ("--slurm", slurm)):
            if given:
                raise InputError(f"{flag}: --nproc starts processes on processor cores; give one of the two")
    if not dry_run:
        for flag, given in (("--slurm", slurm), ("--json", json)):
            if given:
                raise InputError(f"{flag}: it has an effect with --dry-run alone; add --dry-run, or leave it out")
        _start(recipe, nodes, gpus_per_node, nproc, gpu, words, resume)
    elif nproc is not None:
        _explain_processes(recipe, nodes, nproc, words, json)
    else:
        _explain(recipe, nodes, gpus_per_node, gpu, words, slurm, json)


def _explain(
    recipe: str, nodes: int, gpus_per_node: int | None, gpu: str | None, words: list[str], slurm: bool, json: bool
) -> None:
    from undertow.launch.prepare import prepare
    from undertow.launch.text import launch_document, launch_text

    found = prepare(recipe, nodes, gpus_per_node, gpu, words, os.environ)
    if json:
        sys.stdout.writelines(json_pieces(launch_document(found, slurm)))
    else:
        print(launch_text(found, slurm))
    _refuse(found)


def _explain_processes(recipe: str, nodes: int, nproc: int, words: list[str], json: bool) -> None:
    from undertow.launch.processes import on_cores, processes_document, processes_text

    found = on_cores(recipe, nodes, nproc, words, os.environ)
    if json:
        sys.stdout.writelines(json_pieces(processes_document(found)))
    else:
        print(processes_text(found))
    if found.conflicts:
        raise ConfigError("; ".join(found.conflicts))


def _refuse(found: Launch) -> None:
    if found.conflicts:
        raise ConfigError("; ".join(found.conflicts))
    if found.plan.refusal:
        raise DoesNotFit(found.plan.refusal)


def _start(
    recipe: str, nodes: int, gpus_per_node: int | None, nproc: int | None, gpu: str | None, words: list[str],
    resume: Resume,
) -> None:  # fmt: skip
    """Run the processes of one machine, one alone as `undertow train` does. What is planned for is asked first whether
    it fits."""
    from undertow.config.conflicts import conflicts
    from undertow.config.optimizations import refuse_unbuilt
    from undertow.config.resolve import resolve
    from undertow.launch.machines import gpus_of_a_node

    if nodes > 1:
        raise InputError(
            f"--nodes {nodes}: the processes of one machine are started from here; run the command that --dry-run "
            "prints on each of them, or give sbatch the script that --slurm prints"
        )
    config = resolve(recipe, words, os.environ).config
    if config.device == "cpu" and not (nproc or gpus_per_node or config.parallel.gpus):
        raise InputError("device cpu: nobody says how many processes; give --nproc, as --nproc 2")
    each = nproc or gpus_of_a_node(config, gpus_per_node)
    if nproc is not None:
        from undertow.launch.processes import on_cores

        words = list(on_cores(recipe, nodes, nproc, words, os.environ).words)
    elif each > 1 and (gpu or config.parallel.gpus):
        from undertow.launch.prepare import prepare

        found = prepare(recipe, nodes, gpus_per_node, gpu, words, os.environ)
        _refuse(found)
        words = list(found.words)
    elif each > 1:
        from undertow.train.widths import refuse_wider

        refuse_wider(config, each)
    if against := conflicts(config, each):
        raise ConfigError("; ".join(against))
    refuse_unbuilt(config.optimizations)
    if each == 1:
        from undertow.cli.train import train

        train(recipe, words, resume)
    else:
        from undertow.cli.processes import start

        start(["train", recipe, *words, "--resume", resume], each)
