"""`undertow plan`: parameters, memory, operations and time of a run, before any GPU is booked."""

from __future__ import annotations

import json as json_module
import os
from contextlib import suppress
from pathlib import Path
from typing import Annotated

import typer

from undertow.cli.config import Overrides
from undertow.config.errors import DoesNotFit, InputError


def register(app: typer.Typer) -> None:
    """Attach the verb to the command line."""
    app.command("plan")(plan)


def _width(default: str, text: str) -> typer.models.OptionInfo:
    return typer.Option(help=f"{text} Default: {default}.", show_default=False)


def plan(
    model: Annotated[
        str,
        typer.Argument(
            metavar="MODEL_OR_RECIPE",
            help="Preset such as v4-flash, recipe file or name, model directory or its config.json.",
        ),
    ],
    gpus: Annotated[
        str, typer.Option(help="NxGPU, such as 32xMI355X; NxGPU+NxGPU for GPUs that train and GPUs that sample.")
    ],
    overrides: Overrides = None,
    layout: Annotated[
        str | None, _width("layers spread evenly", "Pipeline layout, such as 'Et*10|t*12|t*12|t*9mL'.")
    ] = None,
    tp: Annotated[int, typer.Option(help="Tensor parallelism, in ranks.")] = 1,
    pp: Annotated[int | None, _width("the smallest that fits", "Pipeline parallelism, in ranks.")] = None,
    ep: Annotated[int | None, _width("up to 8", "Expert parallelism, in ranks.")] = None,
    cp: Annotated[int, typer.Option(help="Context parallelism, in ranks.")] = 1,
    micro_batch: Annotated[
        int | None, _width("the recipe's, or 1", "Sequences a forward pass and data-parallel rank.")
    ] = None,
    global_batch: Annotated[int | None, _width("the recipe's, or 8 a GPU", "Sequences a step.")] = None,
    sequence_length: Annotated[int | None, _width("the recipe's, or 4096", "Tokens a sequence.")] = None,
    schedule: Annotated[
        str | None, _width("1f1b, or interleaved if the layout asks for it", "1f1b, interleaved, zb-h1 or zbv.")
    ] = None,
    recompute: Annotated[
        str | None,
        _width("the recipe's, or none", "Layers to recompute: none, all, 0,4,10-12, or first:3 of each stage."),
    ] = None,
    state: Annotated[
        str | None,
        _width("the recipe's, or published-bf16", "Profile of weights, gradients and optimizer state, by name."),
    ] = None,
    implementation: Annotated[
        str | None,
        _width(
            "reference for a recipe or one GPU, otherwise primus where it can run, or tight",
            "Whose saved activations count: tight, primus or reference.",
        ),
    ] = None,
    gpu_file: Annotated[Path | None, _width("none", "YAML file with GPUs that the catalogue lacks.")] = None,
    json: Annotated[
        Path | None, _width("none", "Write one JSON object to this file; - is standard output, instead of text.")
    ] = None,
) -> None:
    """Show parameters, memory of every stage against the limit, operations, seconds and bubbles of a run.

    Needs neither a GPU nor torch. A model alone is planned in bfloat16. Ends with code 3 if the run does not fit.
    """
    from undertow.config.clusters import read_gpus
    from undertow.planner.plan import plan as make

    found = make(
        model,
        gpus,
        layout=layout,
        tensor=tp,
        pipeline=pp,
        expert=ep,
        context=cp,
        micro_batch=micro_batch,
        global_batch=global_batch,
        sequence_length=sequence_length,
        schedule=schedule,
        recompute=recompute,
        state=state,
        implementation=implementation,
        own_gpus=read_gpus(gpu_file, os.environ) if gpu_file else (),
        overrides=overrides or (),
        environment=os.environ,
    )
    if json is not None:
        _write(json, json_module.dumps(found.json(), indent=2) + "\n")
    if json is None or str(json) != "-":
        print(found)
    if found.refusal:
        raise DoesNotFit(found.refusal)


def _write(target: Path, content: str) -> None:
    """Standard output, or the file, replaced in one step."""
    if str(target) == "-":
        print(content, end="")
        return
    fresh = target.with_name(f".{target.name}.writing")
    try:
        with fresh.open("w", encoding="utf-8") as file:
            file.write(content)
            file.flush()
            os.fsync(file.fileno())
        os.replace(fresh, target)
    except OSError as error:
        with suppress(OSError):
            fresh.unlink(missing_ok=True)
        raise InputError(f"{target}: cannot be written ({error.strerror}); choose another with --json FILE") from None
