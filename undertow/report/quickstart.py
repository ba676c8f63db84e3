"""The quickstart's page: its verdict, what held-out text costs, samples, and the run it made."""

from __future__ import annotations

from collections.abc import Mapping
from html import escape
from typing import Any

from undertow.report.page import page, table
from undertow.report.run import Metrics, run_sections


def quickstart_page(figures: Mapping[str, Any], metrics: Metrics) -> str:
    """The page of a finished quickstart from its `quickstart.json` and the lines of its `metrics.jsonl`."""
    bars = {name.replace("_", " ") + " frequencies": bar for name, bar in figures["bars"].items()}
    held_out = {"the model": figures["nats_per_byte"], **bars}
    words = figures["words"]
    told = (
        f"{words['known']:,} of {words['sampled']:,} sampled words of four or more letters occur in the corpus, "
        f"{words['distinct']:,} of these are distinct."
    )
    own = {
        "Held-out text, in nats per byte": table((name, f"{value:.3f}") for name, value in held_out.items()),
        "Samples": f"<p>{told}</p>" + "".join(f"<pre>{escape(sample)}</pre>" for sample in figures["samples"]),
        "Killed and resumed": f"<p>{escape(figures['resumed'])}</p>",
    }
    numbers = ((name.replace("_", " "), f"{n:,}") for name, n in figures["parameters"].items())
    sections = run_sections(metrics)
    return page(
        "Undertow quickstart",
        {"Loss": sections.pop("Loss"), **own, **sections, "Parameters": table(numbers)},
        _verdict(figures),
    )


def _verdict(figures: Mapping[str, Any]) -> str:
    if not figures["judged"]:
        return "A short run: every step was taken, its quality is not judged."
    if figures["passed"]:
        return (
            "The model predicts held-out text better than the frequencies of bytes, byte pairs and tokens do, and "
            "writes words of its corpus."
        )
    return "The model is not good enough: see the bars it did not pass."
