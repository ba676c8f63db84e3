"""The quickstart's page: its verdict, what held-out text costs, samples, and the run it made."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from html import escape
from typing import Any

from undertow.report.page import Row, page, table
from undertow.report.run import Metrics, run_sections

_EVERYTHING = (
    "Over all held-out text. What the run measured on its way is over a sample of it, and therefore differs a little."
)
_NOTES = {
    "total": "All that the modules below hold.",
    "active": "Those whose values one token meets: of the routed experts its own; no embedding, router biases or MTP.",
}


def quickstart_page(figures: Mapping[str, Any], metrics: Metrics, origin: Sequence[Row] = ()) -> str:
    """The page of a finished quickstart from its `quickstart.json`, the lines of its `metrics.jsonl` and its origin."""
    bars = {name.replace("_", " ") + " frequencies": bar for name, bar in figures["bars"].items()}
    held_out = {"the model": figures["nats_per_byte"], **bars}
    words = figures["words"]
    told = (
        f"{words['known']:,} of {words['sampled']:,} sampled words of four or more letters occur in the corpus, "
        f"{words['distinct']:,} of these are distinct."
    )
    cost = table(Row(name, f"{value:.3f}") for name, value in held_out.items())
    own = {
        "Held-out text, in nats per byte": f"<p>{_EVERYTHING}</p>{cost}",
        "Samples": f"<p>{told}</p>" + "".join(f"<pre>{escape(sample)}</pre>" for sample in figures["samples"]),
        "Killed and resumed": f"<p>{escape(figures['resumed'])}</p>",
    }
    numbers = (Row(name.replace("_", " "), f"{n:,}", _NOTES.get(name, "")) for name, n in figures["parameters"].items())
    sections = run_sections(metrics, origin)
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
