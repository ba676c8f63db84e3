"""The quickstart's page: one HTML file that holds all it shows and asks nothing of any network."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from html import escape
from string import Template
from typing import Any

from undertow.report.curve import loss_curve

_PAGE = Template("""<!doctype html>
<html lang="en">
<head>
<meta charset="utf-8">
<meta name="viewport" content="width=device-width, initial-scale=1">
<title>Undertow quickstart</title>
<style>
:root { color-scheme: light dark; --line: #2f6f8f; --dot: #b4552d; }
body { font: 16px/1.5 system-ui, sans-serif; max-width: 46rem; margin: 2rem auto; padding: 0 1rem; }
table { border-collapse: collapse; } td { padding: .15rem 1rem .15rem 0; } td + td { text-align: right; }
svg { width: 100%; } svg text { font-size: 13px; fill: currentColor; }
svg .axes { fill: none; stroke: currentColor; } svg polyline { fill: none; stroke: var(--line); stroke-width: 1.5; }
svg circle { fill: var(--dot); } pre { white-space: pre-wrap; border-left: 3px solid var(--line); padding-left: 1rem; }
</style>
</head>
<body>
<h1>Undertow quickstart</h1>
<p>$verdict</p>
<h2>Loss</h2>
<p>Cross-entropy in nats per token: the line is each step's batch, the dots are held-out text.</p>
$curve
<h2>Held-out text, in nats per byte</h2>
$held_out
<h2>Samples</h2>
$samples
<h2>Training</h2>
$training
<h2>Parameters</h2>
$parameters
</body>
</html>
""")


def quickstart_page(figures: Mapping[str, Any], metrics: Sequence[Mapping[str, Any]]) -> str:
    """The page of a finished quickstart from its `quickstart.json` and the lines of its `metrics.jsonl`."""
    steps = [(entry["step"], entry["train/lm_loss"]) for entry in metrics]
    dots = [(entry["step"], entry["eval/loss"]) for entry in metrics if "eval/loss" in entry]
    bars = {name.replace("_", " ") + " frequencies": bar for name, bar in figures["bars"].items()}
    held_out = {"the model": figures["nats_per_byte"], **bars}
    seconds = figures["training_seconds"]
    training = {
        "steps": str(len(metrics)),
        "tokens": f"{figures['tokens']:,}",
        "seconds": f"{seconds:,.0f}",
        "tokens per second": f"{figures['tokens'] / seconds:,.0f}",
        "largest load of an expert, last step": f"{metrics[-1]['moe/load_max']:.2f} times an even share",
        "smallest": f"{metrics[-1]['moe/load_min']:.2f}",
    }
    return _PAGE.substitute(
        verdict=escape(_verdict(figures)),
        curve=loss_curve(steps, dots, "step", "nats per token"),
        held_out=_table((name, f"{value:.3f}") for name, value in held_out.items()),
        samples="".join(f"<pre>{escape(sample)}</pre>" for sample in figures["samples"]),
        training=_table(training.items()),
        parameters=_table((name.replace("_", " "), f"{n:,}") for name, n in figures["parameters"].items()),
    )


def _verdict(figures: Mapping[str, Any]) -> str:
    if not figures["judged"]:
        return "A short run: every step was taken, its quality is not judged."
    if figures["passed"]:
        return "The model predicts held-out text better than the frequencies of bytes and tokens do."
    return "The model predicts held-out text no better than frequencies do: it has not learned to use context."


def _table(rows: Iterable[tuple[str, str]]) -> str:
    cells = (f"<tr><td>{escape(name)}</td><td>{escape(value)}</td></tr>" for name, value in rows)
    return f"<table>{''.join(cells)}</table>"
