"""`undertow doctor`: what this machine is, how it reaches others, which backend each operator will use, and why."""

from __future__ import annotations

import json
import os
import platform
import textwrap
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from undertow.cli.machine import collectives, devices, versions

if TYPE_CHECKING:
    from undertow.ops.registry import Choice

_WIDTH = 100  # columns of a remark


def register(app: typer.Typer) -> None:
    """Attach the verb to the command line."""
    app.command("doctor")(doctor)


def doctor(
    as_json: Annotated[
        bool, typer.Option("--json", help="Print one JSON object instead of tables. Default: off.")
    ] = False,
    compare: Annotated[
        tuple[Path, Path] | None,
        typer.Option(
            metavar="A.json B.json",
            show_default=False,
            help="Tell what differs between two nodes, by what --json printed on each; code 1 if anything does.",
        ),
    ] = None,
) -> None:
    """Show versions, devices and FP8 dialects, network, RDMA and the variables of NCCL that follow, and for each
    operator its backend and why the others were refused."""
    if compare:
        _compare(compare, as_json)
        return
    from undertow.launch.preflight.examine import preflight

    facts = examine() | {"preflight": preflight(os.environ)}
    print(json.dumps(facts, indent=2) if as_json else _tables(facts))


def examine() -> dict[str, Any]:
    """What `doctor --json` prints besides `preflight`: `versions`, `system`, `devices` and, for each device type,
    `ops`."""
    import torch

    found = devices()
    kinds = {device.device.split(":")[0]: device.device for device in reversed(found)}
    return {
        "versions": {"undertow": _own_version(), **versions(), **collectives()},
        "system": f"{platform.system()} {platform.machine()}",
        "torch_built_for": _built_for(torch),
        "devices": [asdict(device) for device in found],
        "ops": {kind: _choices(torch.device(name)) for kind, name in sorted(kinds.items())},
    }


def _compare(files: tuple[Path, Path], as_json: bool) -> None:
    from undertow.launch.preflight.compare import differences, read_facts

    first, second = map(read_facts, files)
    found = differences(first, second, (str(files[0]), str(files[1])))
    print(json.dumps(found, indent=2) if as_json else "\n".join(found or ["nothing that matters differs"]))
    if found:
        raise typer.Exit(1)


def _own_version() -> str:
    from undertow import __version__

    return __version__


def _built_for(torch: Any) -> str:
    if torch.version.hip:
        return f"ROCm {torch.version.hip}"
    return f"CUDA {torch.version.cuda}" if torch.version.cuda else "CPU only"


def _choices(device: Any) -> list[dict[str, Any]]:
    from undertow.ops.registry import explain, recipe_key

    choices: list[Choice] = explain(device)
    return [
        {"op": c.op, "key": recipe_key(c.op), "chosen": c.chosen, "serves": c.serves, "refused": dict(c.refused)}
        for c in choices
    ]


def _tables(facts: dict[str, Any]) -> str:
    from undertow.launch.preflight.text import preflight_text

    lines = [*_columns([[name, version] for name, version in facts["versions"].items()])]
    lines += ["", f"system {facts['system']}; torch built for {facts['torch_built_for']}", ""]
    rows = [["device", "architecture", "memory GiB", "FP8", "name"]]
    for device in facts["devices"]:
        memory = device["memory_bytes"]
        size = "unknown" if memory is None else f"{memory / 2**30:.1f}"
        rows.append([device["device"], device["architecture"], size, device["fp8_dialect"], device["name"]])
    lines += [*_columns(rows), "", *preflight_text(facts["preflight"], _columns, _WIDTH)]
    for kind, choices in facts["ops"].items():
        rows = [[f"op on {kind}", "backend", "key of a recipe"]]
        rows += [[choice["op"], choice["chosen"], choice["key"]] for choice in choices]
        lines += ["", *_columns(rows), "", *_remarks(choices)]
    return "\n".join(lines)


def _remarks(choices: list[dict[str, Any]]) -> list[str]:
    """What kernels serve, and why others were refused, once with all the operators that it is said of."""
    found: dict[str, list[str]] = {}
    for choice in choices:
        if choice["serves"]:
            served = f"{choice['chosen']} serves {choice['serves']}; other calls go to the reference"
            found.setdefault(served, []).append(choice["op"])
        for name, why in choice["refused"].items():
            reason = why.replace(f" for {choice['op']} in this version", " in this version")
            found.setdefault(reason if name in reason else f"{name}: {reason}", []).append(choice["op"])
    told = (f"{why}: {', '.join(ops)}" for why, ops in found.items())
    return [line for text in told for line in textwrap.wrap(text, _WIDTH, subsequent_indent="  ")]


def _columns(rows: list[list[str]]) -> list[str]:
    widths = [max(len(row[column]) for row in rows) for column in range(len(rows[0]))]
    return ["  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip() for row in rows]
