"""`undertow report`: one self-contained HTML page of a run."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from undertow.config.errors import InputError

BELOW = "run"  # where a quickstart keeps its run


def register(app: typer.Typer) -> None:
    """Attach the verb to the command line."""
    app.command("report")(report)


def report(
    run: Annotated[
        Path, typer.Argument(metavar="RUN", help="Run directory of `undertow train`, or a quickstart's directory.")
    ],
    out: Annotated[
        Path | None, typer.Option(help="File to write. Default: report.html in the run directory.", show_default=False)
    ] = None,
) -> None:
    """Draw a run's losses, expert load, indexer recall and throughput into one HTML file, also while it is running."""
    from undertow.report.origin import origin
    from undertow.report.page import write_page
    from undertow.report.run import run_page
    from undertow.train.metrics import read_metrics
    from undertow.train.run import METRICS

    place = _run_directory(run, METRICS)
    metrics = list(read_metrics(place / METRICS))
    if not metrics:
        raise InputError(f"{place / METRICS}: has no step yet; train at least one")
    target = out or place / "report.html"
    write_page(target, run_page(_name(place), metrics, origin(place, metrics)))
    print(target)


def _run_directory(given: Path, metrics: str) -> Path:
    """The directory itself, or the run in it, whichever holds metrics."""
    for place in (given, given / BELOW):
        if (place / metrics).is_file():
            return place
    said = f"holds neither {metrics} nor {BELOW}/{metrics}" if given.is_dir() else "is no directory"
    raise InputError(f"{given}: {said}; give the out=DIR of an `undertow train` that has taken a step")


def _name(place: Path) -> str:
    """The directory's own name, with the one above where that says more."""
    whole = place.resolve()
    return f"{whole.parent.name}/{whole.name}" if whole.name == BELOW else whole.name or str(whole)
