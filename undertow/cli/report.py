"""`undertow report`: one self-contained HTML page of a run."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from undertow.config.errors import InputError


def register(app: typer.Typer) -> None:
    """Attach the verb to the command line."""
    app.command("report")(report)


def report(
    run: Annotated[Path, typer.Argument(metavar="RUN", help="Run directory of `undertow train`.")],
    out: Annotated[
        Path | None, typer.Option(help="File to write. Default: report.html in the run directory.", show_default=False)
    ] = None,
) -> None:
    """Draw a run's losses, expert load, indexer recall and throughput into one HTML file, also while it is running."""
    from undertow.report.page import write_page
    from undertow.report.run import run_page
    from undertow.train.metrics import read_metrics
    from undertow.train.run import METRICS

    metrics = list(read_metrics(run / METRICS))
    if not metrics:
        raise InputError(f"{run / METRICS}: has no step yet; train at least one")
    target = out or run / "report.html"
    write_page(target, run_page(run.name, metrics))
    print(target)
