"""A run in several processes on processor cores: every value settled, what speaks against it, and its command."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from undertow.config.conflicts import conflicts, warnings
from undertow.config.dump import to_json, to_yaml
from undertow.config.resolve import Resolved, resolve
from undertow.launch.command import command_of
from undertow.launch.machines import Machines
from undertow.train.widths import refuse_wider


@dataclass(frozen=True)
class OnCores:
    """`nodes` machines with `processes` each. `words` are all `KEY=VALUE` that lead from the recipe to `resolved`."""

    recipe: str
    nodes: int
    processes: int
    resolved: Resolved
    words: tuple[str, ...]

    @property
    def conflicts(self) -> tuple[str, ...]:
        """What cannot go together, a sentence each."""
        return conflicts(self.resolved.config, self.processes)

    @property
    def command(self) -> str:
        """What starts it, on every machine."""
        return command_of(self.recipe, self.words, Machines(self.nodes, self.processes, "cpu"))


def on_cores(recipe: str, nodes: int, processes: int, words: Sequence[str], environment: Mapping[str, str]) -> OnCores:
    """A recipe on processor cores. Raises `ConfigError` where widths, layout, schedule or batches do not suit so many
    processes."""
    resolved, given = resolve(recipe, words, environment), list(words)
    if resolved.config.device != "cpu":
        given.append("device=cpu")
        resolved = resolve(recipe, given, environment)
    refuse_wider(resolved.config, nodes * processes)
    return OnCores(recipe, nodes, processes, resolved, tuple(given))


def processes_text(found: OnCores) -> str:
    """Every value with its source, what speaks against it, and the command."""
    where = "on every machine, HEAD_NODE being the name of one of them" if found.nodes > 1 else "on the machine"
    parts = [
        [f"{found.recipe} in {found.nodes * found.processes} processes on processor cores"],
        [to_yaml(found.resolved).rstrip("\n")],
        ["conflicts", *_sentences(found.conflicts)],
        ["warnings", *_sentences(warnings(found.resolved.config))],
        ["plan", "  none: of processor cores no rates are known"],
        [f"command, {where}", "", found.command],
    ]
    return "\n\n".join("\n".join(lines) for lines in parts)


def processes_document(found: OnCores) -> dict[str, Any]:
    """The same as plain values: what `undertow launch --nproc N --dry-run --json` prints."""
    return {
        "recipe": found.recipe,
        "nodes": found.nodes,
        "processes_per_node": found.processes,
        "values": json.loads(to_json(found.resolved)),
        "conflicts": list(found.conflicts),
        "warnings": list(warnings(found.resolved.config)),
        "command": found.command,
    }


def _sentences(lines: Sequence[str]) -> list[str]:
    return [f"  {line}" for line in lines or ("none",)]
