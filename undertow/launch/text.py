"""A launch as text for a terminal, and as plain values."""

from __future__ import annotations

import json
from typing import Any

from undertow.config.dump import to_json, to_yaml
from undertow.config.parallel import UNBUILT_AXES
from undertow.launch.prepare import Launch

PUBLISHED = "32xMI355X, 256 sequences of 4,096 tokens a step"


def launch_text(launch: Launch, slurm: bool) -> str:
    """Every value with its source, what speaks against it, the plan, the nearest published rung, and the command."""
    machines = launch.machines
    nodes = "1 node" if machines.nodes == 1 else f"{machines.nodes:,} nodes"
    head = [f"{launch.recipe} on {nodes} of {machines.gpus_per_node} {machines.gpu}"]
    if launch.replanned:
        head.append(f"  layout planned anew: that of the recipe is for {launch.replanned}")
    parts = [
        head,
        [to_yaml(launch.resolved).rstrip("\n")],
        ["conflicts", *_sentences(launch.conflicts)],
        ["warnings", *_sentences(launch.warnings)],
        ["not built yet", *_sentences(missing(launch))],
        [str(launch.plan)],
        _rung(launch),
        ["script, for sbatch", "", launch.script.rstrip("\n")] if slurm else _command(launch),
    ]
    return "\n\n".join("\n".join(lines) for lines in parts)


def missing(launch: Launch) -> tuple[str, ...]:
    """What of this launch cannot run in this version, a sentence each."""
    families = (f"optimizations.{name}: it needs {needs}" for name, needs in launch.unbuilt.items())
    parallel = launch.resolved.config.parallel
    axes = ((axis, getattr(parallel, axis)) for axis in UNBUILT_AXES)
    wide = (f"parallel.{axis} is {width}: this version trains without that axis" for axis, width in axes if width > 1)
    return (*families, *wide)


def launch_document(launch: Launch, slurm: bool) -> dict[str, Any]:
    """What `undertow launch --dry-run --json` prints: `values` by dotted key as `undertow config show --json`, `plan`
    as `undertow plan --json`."""
    machines, nearest = launch.machines, launch.rung
    return {
        "recipe": launch.recipe,
        "nodes": machines.nodes,
        "gpus_per_node": machines.gpus_per_node,
        "gpu": machines.gpu,
        "replanned_from": launch.replanned,
        "values": json.loads(to_json(launch.resolved)),
        "conflicts": list(launch.conflicts),
        "warnings": list(launch.warnings),
        "unbuilt": launch.unbuilt,
        "not_built": list(missing(launch)),
        "plan": launch.plan.json(),
        "rung": {
            "number": nearest.rung.number,
            "adds": nearest.rung.adds,
            "reported_tflops_per_gpu": nearest.rung.reported_tflops,
            "seconds_per_iteration": nearest.rung.seconds,
            "differs": nearest.differs,
            "named_backend_differs": nearest.named_backend,
        },
        "command": launch.command,
        "script": launch.script if slurm else None,
    }


def _sentences(lines: tuple[str, ...]) -> list[str]:
    return [f"  {line}" for line in lines or ("none",)]


def _rung(launch: Launch) -> list[str]:
    rung, differs, named = launch.rung
    here = launch.plan.task
    lines = [
        f"nearest published rung: {rung.number}, {rung.adds}",
        f"  {rung.reported_tflops:,.1f} reported TFLOP/s/GPU, {rung.seconds:.2f} s an iteration on {PUBLISHED}",
    ]
    told = [f"{family} is {position} here" for family, position in differs.items()]
    if named:
        told.append(f"the attention backend is {'best' if rung.named_backend else 'named'} here")
    batch = here.batch
    if (str(here.pool), batch.size, batch.sequence_length) != ("32xMI355X", 256, 4096):
        told.append(f"here {here.pool}, {batch.size:,} sequences of {batch.sequence_length:,} tokens")
    if here.config.hidden_size != 4096 or here.config.num_hidden_layers != 43:
        told.append("another model than v4-flash")
    return [*lines, f"  difference: {'; '.join(told) or 'none'}"]


def _command(launch: Launch) -> list[str]:
    where = "on every node, HEAD_NODE being the name of one of them" if launch.machines.nodes > 1 else "on the node"
    return [f"command, {where}", "", launch.command]
