"""`undertow plan`: parameters, memory, operations and time of a run, before any GPU is booked."""

from __future__ import annotations

import os
import shlex
import sys
from collections.abc import Iterable
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from undertow.cli.config import Overrides
from undertow.cli.meter import meter
from undertow.cli.sizing import size
from undertow.cli.values import json_pieces
from undertow.config.errors import DoesNotFit, InputError
from undertow.config.writing import write_file

if TYPE_CHECKING:
    from undertow.config.gpus import Gpu
    from undertow.planner.calibration.measured import Calibration
    from undertow.planner.plan import Plan


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
        str | None,
        typer.Option(help="NxGPU, such as 32xMI355X; NxGPU+NxGPU for GPUs that train and GPUs that sample."),
    ] = None,
    overrides: Overrides = None,
    layout: Annotated[
        str | None, _width("layers spread evenly", "Pipeline layout, such as 'Et*10|t*12|t*12|t*9mL'.")
    ] = None,
    tp: Annotated[int | None, _width("the recipe's, or 1, wider where nothing fits", "Tensor parallelism.")] = None,
    pp: Annotated[
        int | None, _width("the recipe's, or the smallest that fits", "Pipeline parallelism, in ranks.")
    ] = None,
    ep: Annotated[int | None, _width("the recipe's, or up to 8", "Expert parallelism, in ranks.")] = None,
    cp: Annotated[int | None, _width("the recipe's, or 1", "Context parallelism, in ranks.")] = None,
    micro_batch: Annotated[
        int | None, _width("the recipe's, or 1", "Sequences a forward pass and data-parallel rank.")
    ] = None,
    global_batch: Annotated[int | None, _width("the recipe's, or 8 a GPU", "Sequences a step.")] = None,
    sequence_length: Annotated[int | None, _width("the recipe's, or 4096", "Tokens a sequence.")] = None,
    schedule: Annotated[
        str | None,
        _width("the recipe's, or 1f1b, or interleaved if the layout asks for it", "1f1b, interleaved, zb-h1 or zbv."),
    ] = None,
    recompute: Annotated[
        str | None,
        _width("the recipe's, or none", "Layers: none, all, 0,4,10-12, first:3 of each stage; or parts: query:0-10."),
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
    offload_optimizer: Annotated[
        bool, typer.Option("--offload-optimizer", help="Keep the optimizer state in the memory of the host.")
    ] = False,
    fit: Annotated[
        bool,
        typer.Option(
            "--fit",
            help="Ask for the smallest clusters: of all GPUs, or of --gpus MI355X+H200. With a number of GPUs, for the "
            "largest micro-batch and the longest sequence that fit.",
        ),
    ] = False,
    serve: Annotated[
        bool, typer.Option("--serve", help="Plan replicas that serve the model, and no training.")
    ] = False,
    weights: Annotated[
        str | None, _width("the smallest that the GPU computes in", "With --serve, stored weights: fp4, fp8 or bf16.")
    ] = None,
    cache: Annotated[str | None, _width("fp8", "With --serve, the cache: fp8, fp8-fp4 or bf16.")] = None,
    memory_fraction: Annotated[float | None, _width("0.9", "With --serve, the share of a GPU's memory to use.")] = None,
    gpu_file: Annotated[Path | None, _width("none", "YAML file with GPUs that the catalogue lacks.")] = None,
    calibration: Annotated[
        Path | None, _width("the shipped one", "Plan with this calibration, a file that --calibrate wrote.")
    ] = None,
    calibrate: Annotated[
        list[Path] | None,
        _width(
            "none",
            "Make a calibration, write it beside, and plan with it: from this JSON file of measured runs, or from "
            "results of `undertow bench kernels`, of which several may be given, each after a --calibrate.",
        ),
    ] = None,
    tune: Annotated[
        bool, typer.Option("--tune", help="Search for the fastest layout that fits, and for all widths left open.")
    ] = False,
    margin: Annotated[
        float | None, _width("0, and 0.05 with --tune or --fit", "The share of a GPU's memory that is left free.")
    ] = None,
    memory_limit: Annotated[
        float | None, _width("the GPU's", "GB (10^9 bytes) of a GPU, of which --margin is left free.")
    ] = None,
    granularity: Annotated[
        str | None, _width("layer", "With --tune, what is recomputed: layer (whole layers) or module (parts too).")
    ] = None,
    fragment: Annotated[
        Path | None, _width("none", "With --tune, write what was chosen as YAML for a recipe to this file.")
    ] = None,
    json: Annotated[
        Path | None, _width("none", "Write one JSON object to this file; - is standard output, instead of text.")
    ] = None,
    html: Annotated[
        Path | None, _width("none", "Write a page to look at, timeline and all, to this file; it needs no network.")
    ] = None,
) -> None:
    """Show parameters, memory of every stage against the limit, operations, seconds and bubbles of a run.

    Needs neither a GPU nor torch. A model alone is planned in bfloat16. Ends with code 3 if the run does not fit.
    """
    from undertow.config.clusters import read_gpus
    from undertow.planner.plan import plan as make

    if gpus is None and not fit:
        raise InputError("Missing option '--gpus'; write NxGPU, as 32xMI355X, or ask with --fit how many it takes")
    _distinct({"--json": json, "--html": html, "--fragment": fragment})
    said = dict(
        layout=layout, tensor=tp, pipeline=pp, expert=ep, context=cp, micro_batch=micro_batch,
        global_batch=global_batch, sequence_length=sequence_length, schedule=schedule, recompute=recompute, state=state,
        implementation=implementation, offload_optimizer=offload_optimizer,
    )  # fmt: skip
    serving = {"weights": weights, "cache": cache, "memory_fraction": memory_fraction}
    other = {"--tune": tune, "--html": html, "--calibrate": calibrate, "--calibration": calibration}
    other |= {"--granularity": granularity, "--fragment": fragment}
    limits = {"--margin": margin, "--memory-limit": memory_limit}
    rest = {"fit": fit, "serve": serve, "gpu_file": gpu_file, "overrides": overrides}
    if sized := size(model, gpus, said, serving, other, limits, **rest):
        _answer(sized, json)
        return
    assert gpus is not None  # --fit alone goes without
    search = {"margin": margin, "memory_limit": memory_limit, **_search(tune, granularity, fragment)}
    own = read_gpus(gpu_file, os.environ) if gpu_file else ()
    with meter("tuning, combinations searched") as progress:
        found = make(
            model,
            gpus,
            **said,
            calibration=_fitted(calibrate, calibration, own) if calibrate else calibration,
            **search,
            progress=progress,
            own_gpus=own,
            overrides=overrides or (),
            environment=os.environ,
        )
    if fragment is not None and found.tuned is not None:
        _write(fragment, found.tuned.fragment_in(shlex.quote(str(fragment))), "--fragment")
    if html is not None:
        _draw(html, found)
    _answer(found, json)


def _answer(found: Any, json: Path | None) -> None:
    """Print a plan of any kind, write it where asked, and end with code 3 if it does not fit."""
    if json is not None:
        _write(json, json_pieces(found.json()), "--json")
    if json is None or str(json) != "-":
        print(found)
    if found.refusal:
        raise DoesNotFit(found.refusal)


def _fitted(files: list[Path], other: Path | None, own: tuple[Gpu, ...]) -> Calibration:
    """The calibration of measurements, written beside the first file; every row goes to standard error."""
    from undertow.planner.calibration.file import write_calibration
    from undertow.planner.calibration.sources import calibrate
    from undertow.planner.calibration.text import calibration_text

    if other is not None:
        raise InputError(f"--calibrate {files[0]} and --calibration {other}: both name one; give one of them")
    found, target = calibrate(files, own), files[0].with_suffix(".calibration.json")
    write_calibration(found, target)
    typer.echo(f"{calibration_text(found)}\n  written to {target}\n", err=True)
    return found


def _draw(target: Path, found: Plan) -> None:
    from undertow.planner.drawing import page_document
    from undertow.report.page import write_page
    from undertow.report.plan import plan_page

    write_page(target, plan_page(page_document(found)), "--html")


def _search(tune: bool, granularity: str | None, fragment: Path | None) -> dict[str, Any]:
    """Arguments of the plan that say what is searched. Refuses options that have no effect without `--tune`."""
    for option, value in (("--granularity", granularity), ("--fragment", fragment)):
        if value is not None and not tune:
            raise InputError(f"{option} {value}: it has an effect with --tune alone; add --tune")
    return {"tune": tune} if granularity is None else {"tune": tune, "granularity": granularity}


def _write(target: Path, content: Iterable[str], option: str) -> None:
    """Standard output, or the file, replaced in one step."""
    if str(target) == "-":
        sys.stdout.writelines(content)
        return
    write_file(target, content, f"choose another with {option} FILE")


def _distinct(files: dict[str, Path | None]) -> None:
    """Refuse options that would write one file twice, of which the last alone would stay."""
    seen: dict[str, str] = {}
    for option, file in files.items():
        if file is None:
            continue
        place = os.path.realpath(file)
        if (first := seen.setdefault(place, option)) != option and not place.startswith("/dev/"):
            raise InputError(f"{first} {file} and {option} {file}: both would write one file; give two names")
