"""The page of a plan: verdict, parameters, memory, timeline, roofline and what was tuned, from plain values alone."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from html import escape
from pathlib import Path
from typing import Any

from undertow.report.page import Row, page, table
from undertow.report.plan_memory import memory_section
from undertow.report.plan_replicas import replicas_section
from undertow.report.plan_roofline import roofline_section
from undertow.report.plan_table import grid, note, share_bars
from undertow.report.plan_timeline import held_section, script, timeline_section
from undertow.report.plan_tuned import tuned_section
from undertow.report.quantity import billions, both, significant, words

_INDEXERS = {"shared": "shared query path, as released", "own_rank": "own query path, the published AMD variant"}
_UNITS = ((1e18, "EFLOP"), (1e15, "PFLOP"), (1e12, "TFLOP"), (1e9, "GFLOP"))


def plan_page(document: Mapping[str, Any]) -> str:
    """One HTML file from the document that the planner makes of a plan."""
    tracks, limit = document["tracks"], document["memory"]["limit_bytes"]
    tuned, rollout = document["tuned"], document["rollout"]
    pools = " + ".join([document["cluster"], *([f"{rollout['gpus']}x{rollout['gpu']}"] if rollout else [])])
    sections = {
        "Verdict": _verdict(document),
        "Parameters": _parameters(document["parameters"]),
        "Memory of a GPU": memory_section(document["memory"]),
        "Timeline of an iteration": timeline_section(tracks),
        "Memory over time": held_section(tracks, limit),
        "Operations of an iteration": _operations(document["flops"]),
        "Roofline": roofline_section(document["roofline"]),
        "Tuning": tuned_section(tuned, limit) if tuned else "",
        "GPUs that sample": replicas_section(rollout) if rollout else "",
    }
    style = (Path(__file__).parent / "plan.css").read_text(encoding="utf-8")
    return page(f"{document['name']} on {pools}", sections, style=style, last=script(tracks, limit))


def _verdict(document: Mapping[str, Any]) -> str:
    time = document["time"]
    figures = {
        "seconds an iteration": (significant(time["seconds_per_iteration"]), f"rates {time['calibration']}"),
        "tokens a second and GPU": (f"{time['tokens_per_second_per_gpu']:,.0f}", ""),
        "TFLOP/s a GPU, algorithmic": (
            f"{time['tflops_algorithmic']:,.1f}",
            f"what the architecture asks for; {time['peak_share']:.1%} of the peak in BF16",
        ),
        "TFLOP/s a GPU, reported": (f"{time['tflops_reported']:,.1f}", "as the published run counts"),
    }
    cards = "".join(
        f"<div><dt>{escape(name)}</dt><dd>{escape(value)}</dd><small>{escape(more)}</small></div>"
        for name, (value, more) in figures.items()
    )
    return f'{_sentence(document)}<dl class="key">{cards}</dl>{_settings(document["settings"])}{_notes(document)}'


def _sentence(document: Mapping[str, Any]) -> str:
    if not document["fits"]:
        return f'<p class="verdict no">\u2717 {escape(document["refusal"])}.</p>'
    memory = document["memory"]
    fullest = max(memory["stages"], key=lambda stage: stage["total_bytes"])
    place = "pipeline rank" if memory["chunks"] > 1 else "stage"
    free = memory["limit_bytes"] - fullest["total_bytes"]
    told = (
        f"Fits: the fullest GPU, of {place} {fullest['stage']}, holds {both(fullest['total_bytes'])} of "
        f"{both(memory['limit_bytes'])}; {both(free)} are free."
    )
    return f'<p class="verdict">\u2713 {escape(told)}</p>'


def _settings(of: Mapping[str, Any]) -> str:
    widths = ", ".join(f"{name} {of[name]}" for name in ("tensor", "pipeline", "expert", "context"))
    batch = f"{of['sequences']:,} sequences of {of['sequence_length']:,} tokens"
    rows = [
        Row("parallelism", widths, f"data {of['data']:,}, copies of each expert {of['expert_data']:,}"),
        Row("batch", batch, f"{of['microbatches']:,} microbatches of {of['micro_batch']:,} on each pipeline"),
        Row("layout", of["layout"], f"schedule {of['schedule']}"),
        Row("recomputed", of["recomputed"]),
        Row("saved activations", of["implementation"], f"state {of['state']}"),
    ]
    return f'<div class="narrow">{table(rows)}</div>'


def _notes(document: Mapping[str, Any]) -> str:
    items = "".join(f"<li>{escape(each)}</li>" for each in document["uncalibrated"])
    if not items:
        return note("All of it is covered by measurements that the rates and constants were fitted to.")
    return f"<h3>Not calibrated</h3><ul>{items}</ul>"


def _parameters(parameters: Mapping[str, Any]) -> str:
    counted, other = parameters["indexers"]
    total = counted["total"]
    modules = sorted(((size, name) for name, size in parameters["by_module"].items() if size), reverse=True)
    bars = share_bars((words(name), size / total, billions(size)) for size, name in modules)
    rows = [_indexer(each) for each in (counted, other)]
    told = f"{billions(total)} parameters, of which {billions(counted['active'])} are active for a token."
    head = ["indexer", "total", "without MTP", "active", "LM head besides"]
    return f"{note(told)}{bars}{grid(head, rows)}"


def _indexer(each: Mapping[str, Any]) -> Sequence[str]:
    name = each["name"]
    return [f"{words(name)}\n{_INDEXERS[name]}", *(billions(each[key]) for key in ("total", "main", "active", "head"))]


def _operations(flops: Mapping[str, Any]) -> str:
    whole = flops["algorithmic_per_iteration"]
    scale, unit = next((each for each in _UNITS if whole >= 10 * each[0]), _UNITS[-1])
    rows = [[words(name), *_work(term, scale)] for name, term in flops["terms"].items()]
    sums = {
        convention: {
            direction: sum(term[convention][direction] for term in flops["terms"].values())
            for direction in ("forward", "backward")
        }
        for convention in ("algorithmic", "reported")
    }
    told = (
        f"{unit}, in two conventions. Algorithmic counts what the architecture asks for; reported counts as the "
        "published run does, as if sub-layers ran on every residual stream. What is recomputed counts in neither."
    )
    head = ["term", "algorithmic", "forward", "backward", "reported", "forward", "backward"]
    return note(told) + grid(head, rows, ["all", *_work(sums, scale)])


def _work(term: Mapping[str, Mapping[str, float]], scale: float) -> Iterator[str]:
    for convention in ("algorithmic", "reported"):
        ahead, back = term[convention]["forward"], term[convention]["backward"]
        yield from (f"{part / scale:,.2f}" for part in (ahead + back, ahead, back))
