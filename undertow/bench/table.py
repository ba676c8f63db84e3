"""Result files as tables for a terminal."""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence
from textwrap import wrap
from typing import Any

_HEADS = ("way", "ms", "lowest-highest", "of floor", "TFLOP/s", "nominal", "GB/s", "error", "")
_WIDTH = 110
_HOW = {"events": "launches included", "graph": "", "clock": ""}


def kernels_table(result: dict[str, Any]) -> str:
    """The rows of `bench kernels`, one block for each operator and shape, best first, under the ceilings."""
    reached = result["ceilings"]
    lines = [
        f"{_where(result)}; in this run a copy moves {reached['copy'] / 1e9:,.0f} GB/s and a matrix product does "
        f"{reached['matmul'] / 1e12:,.4g} TFLOP/s"
    ]
    if result["deterministic"]:
        lines.append("with --deterministic: gradients of the same bits every time were asked for")
    for (op, shape), rows in _blocks(result["rows"]):
        lines += ["", f"{op}: {shape}; floor {_ms(rows[0]['floor_ms'])} ms ({rows[0]['bound']})"]
        timed = sorted((row for row in rows if row["status"] == "ok"), key=lambda row: row["ms"]["median"])
        wrong = [row for row in rows if row["status"] not in ("ok", "absent")]
        if timed or wrong:
            lines += [f"  {line}" for line in columns([_HEADS, *map(_timed, timed), *map(_wrong, wrong)])]
    lines += ["", *(f"FAILED: {f['op']}, {f['shape']}: {f['reason']}" for f in result["failures"])]
    lines += _absent(result["rows"])
    if result["device"] == "cpu":
        lines.append("On a CPU kernels would run in an interpreter, which is not timed: the shapes are tiny, and only")
        lines.append("plain torch has times. Bench on a GPU for figures that mean something.")
    return "\n".join(lines).rstrip()


def step_table(result: dict[str, Any]) -> str:
    """The settings of `bench step` beside each other."""
    each: list[dict[str, Any]] = result["settings"]
    names = [s["name"] for s in each]
    rows: list[list[str]] = [["", *names]]

    def row(label: str, cells: Iterable[str]) -> None:
        rows.append([label, *cells])

    row("tokens a step", (f"{s['tokens']:,}" for s in each))
    row("ms a step", (_ms(s["ms"]["median"]) for s in each))
    row("lowest-highest", (f"{_ms(s['ms']['lowest'])}-{_ms(s['ms']['highest'])}" for s in each))
    row("tokens/s", (f"{s['tokens_per_second']:,.0f}" for s in each))
    for convention in ("algorithmic", "reported"):
        row(f"TFLOP/s, {convention}", (f"{s['tflops'][convention]:,.4g}" for s in each))
        if each[0]["share_of_peak"] is not None:
            row("  of the GPU's peak", (f"{s['share_of_peak'][convention]:.1%}" for s in each))
    row(each[0]["peak_memory"]["of"], (f"{s['peak_memory']['bytes'] / 2**30:,.2f} GiB" for s in each))
    row("loss, first and last", (f"{_loss(s['losses'][0])}, {_loss(s['losses'][-1])}" for s in each))
    lines = [f"{_where(result)}; {result['preset']}", "", *columns(rows)]
    if "ratio" in result:
        lines += ["", f"{names[1]} takes {result['ratio']:.3f} of the time per token of {names[0]}; {_curves(result)}"]
    lines += [f"operators of {s['name']}: {_calls(s['calls']) or s['operators']}" for s in each]
    lines += [f"{s['name']}: {line}" for s in each for line in s["passed_on"]]
    return "\n".join(lines)


_LADDER = ("setting", "tokens a step", "ms", "tokens/s", "times off", "TFLOP/s", "reported", "of matmul", "peak GiB")
_LADDER += ("loss", "gradient norm", "")


def families_table(result: dict[str, Any]) -> str:
    """The settings of `bench step --families` below each other, under the ceilings."""
    reached = result["ceilings"]
    lines = [
        f"{_where(result)}; {result['preset']}; {', '.join(result['families'])}; in this run a copy moves "
        f"{reached['copy'] / 1e9:,.0f} GB/s and a matrix product does {reached['matmul'] / 1e12:,.4g} TFLOP/s",
        "",
    ]
    good = [row for row in result["settings"] if row["status"] == "ok"]
    lines += columns([_LADDER, *map(_rung, good)])
    unmeasured: dict[str, list[str]] = {}
    for row in result["settings"]:
        if row["status"] != "ok":
            unmeasured.setdefault(f"{row['status']}: {row['reason']}", []).append(row["name"])
    lines += [""] if unmeasured else []
    for why, names in unmeasured.items():
        lines += wrap(f"{', '.join(names)}: {why}", _WIDTH, subsequent_indent="  ")
    if on := next((row for row in good if row["role"] == "on"), None):
        others = [row for row in good if row["role"] in ("off", "compile") and row["tokens"] == on["tokens"]]
        told = [f"{on['tokens_per_second'] / row['tokens_per_second']:.2f} times {row['name']}" for row in others]
        lines += ["", f"tokens/s of all on: {', '.join(told)}"] if told else []
    if not result["kernels"]:
        lines += ["", "No kernel of these operators runs here: every setting is the reference, and the same."]
    for row in good:
        if row["role"] != "alone":
            lines += ["", f"operators of {row['name']}: {_calls(row['calls']) or row['operators']}"]
            lines += row["passed_on"]
    return "\n".join(lines)


def _rung(row: dict[str, Any]) -> tuple[str, ...]:
    norm = row["gradient_norms"][-1]
    return (
        row["name"],
        f"{row['tokens']:,}",
        _ms(row["ms"]["median"]),
        f"{row['tokens_per_second']:,.0f}",
        "" if row["times_off"] is None else f"{row['times_off']:.2f}",
        f"{row['tflops']['algorithmic']:,.4g}",
        f"{row['tflops']['reported']:,.4g}",
        f"{row['share_of_matmul']['algorithmic']:.1%}",
        f"{row['peak_memory']['bytes'] / 2**30:,.1f}",
        "skipped" if row["losses"][-1] is None else f"{row['losses'][-1]:.5f}",
        "" if norm is None else f"{norm:.4g}",
        row["compile"]["told"] if "compile" in row else "",
    )


def _curves(result: dict[str, Any]) -> str:
    if "apart" not in result:
        return "losses are of other tokens, and not compared"
    apart = {key: value if isinstance(value, int) else _loss(value) for key, value in result["apart"].items()}
    return (
        f"losses of {apart['steps']} steps: at most {apart['most']} apart, {apart['mean']} on average, "
        f"{apart['last']} over the last tenth"
    )


def _calls(taken: dict[str, dict[str, int]]) -> str:
    told = [f"{op} {', '.join(f'{n:,} by {name}' for name, n in by.items())}" for op, by in taken.items()]
    return "; ".join([*told, "all other calls by reference"] if told else [])


def columns(rows: Sequence[Sequence[str]]) -> list[str]:
    """Cells in columns, the first to the left, the others to the right, but for a last one of remarks."""
    widths = [max(len(row[i]) for row in rows) for i in range(len(rows[0]))]
    remarks = len(rows[0]) - 1 if not rows[0][-1] else -1
    lines = []
    for row in rows:
        cells = [
            c.ljust(w) if i in (0, remarks) else c.rjust(w) for i, (c, w) in enumerate(zip(row, widths, strict=True))
        ]
        lines.append("  ".join(cells).rstrip())
    return lines


def _where(result: dict[str, Any]) -> str:
    found = result["environment"]
    name = found["processor"] if result["device"] == "cpu" else found["gpu"]
    return f"{name}, torch {found['versions']['torch']}, Triton {found['versions']['triton']}"


def _blocks(rows: Sequence[dict[str, Any]]) -> list[tuple[tuple[str, str], list[dict[str, Any]]]]:
    found: dict[tuple[str, str], list[dict[str, Any]]] = {}
    for row in rows:
        found.setdefault((row["op"], row["shape"]), []).append(row)
    return list(found.items())


def _timed(row: dict[str, Any]) -> tuple[str, ...]:
    ms = row["ms"]
    return (
        row["way"],
        _ms(ms["median"]),
        f"{_ms(ms['lowest'])}-{_ms(ms['highest'])}",
        f"{row['fraction_of_floor']:.1%}",
        _figure(row["tflops_exact"]),
        _figure(row["tflops_nominal"]),
        _figure(row["gigabytes_per_second"]),
        f"{row['error']:.0e}" if row["error"] else "0",
        _HOW.get(ms["how"], str(ms["how"])),
    )


def _wrong(row: dict[str, Any]) -> tuple[str, ...]:
    if row["status"] == "failed":
        return (row["way"], *[""] * 6, "failed", row["reason"][:60])
    error = row["error"] if isinstance(row["error"], str) else f"{row['error']:.0e}"
    return (row["way"], *[""] * 6, error, f"WRONG, not timed: at most {row['error_limit']:.0e}")


def _absent(rows: Sequence[dict[str, Any]]) -> list[str]:
    """A line for each way and reason, with the operators that it is absent from."""
    found: dict[tuple[str, str], list[str]] = {}
    for row in rows:
        if row["status"] == "absent":
            reason = re.sub(r" for \w+ in this version$", " in this version", row["reason"])
            ops = found.setdefault((row["way"], reason), [])
            ops += [row["op"]] if row["op"] not in ops else []
    every = list(dict.fromkeys(row["op"] for row in rows))
    lines = []
    for (way, reason), ops in found.items():
        left = [op for op in every if op not in ops]
        told = ", ".join(ops) if len(ops) <= len(left) else f"all but {', '.join(left)}"
        lines += wrap(f"absent: {way}{f' for {told}' if left else ''}: {reason}", _WIDTH, subsequent_indent="  ")
    return lines


def _ms(value: float) -> str:
    return f"{value:.4g}" if value < 1000 else f"{value:,.0f}"


def _loss(value: float | None) -> str:
    return "skipped" if value is None else f"{value:.4g}"


def _figure(value: float | None) -> str:
    return "" if value is None else f"{value:,.0f}" if value >= 100 else f"{value:.3g}"
