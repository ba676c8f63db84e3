"""The command that starts a run on every machine, and the script for Slurm around it."""

from __future__ import annotations

import re
import shlex
from collections.abc import Sequence

from undertow.launch.machines import Machines

_PORT = 29400
"""Where processes of several machines meet."""


def command_of(recipe: str, words: Sequence[str], machines: Machines) -> str:
    """One line for a shell, the same on every machine; with several, HEAD_NODE is the name of one of them.

    `words` are all KEY=VALUE that the run differs from its recipe in.
    """
    train = shlex.join(["undertow", "train", recipe, *words])
    if machines.gpus == 1:
        return train
    meeting = "--standalone"
    if machines.nodes > 1:
        meeting = (
            f"--nnodes {machines.nodes} --rdzv-backend c10d --rdzv-id {job_name(recipe)} "
            f'--rdzv-endpoint "$HEAD_NODE:{_PORT}"'
        )
    return f"torchrun {meeting} --nproc-per-node {machines.gpus_per_node} -m {train}"


def slurm_script(recipe: str, words: Sequence[str], machines: Machines) -> str:
    """A script for `sbatch`: one task a machine, which starts a process for each of its GPUs."""
    lines = [
        "#!/bin/bash",
        f"#SBATCH --job-name={job_name(recipe)}",
        f"#SBATCH --nodes={machines.nodes}",
        "#SBATCH --ntasks-per-node=1",
        f"#SBATCH --gpus-per-node={machines.gpus_per_node}",
        "#SBATCH --exclusive",
        "set -euo pipefail",
    ]
    if machines.nodes > 1:
        lines += [
            'mapfile -t HOSTS < <(scontrol show hostnames "$SLURM_JOB_NODELIST")',
            'export HEAD_NODE="${HOSTS[0]}"',
        ]
    lines.append(f"srun --kill-on-bad-exit=1 {command_of(recipe, words, machines)}")
    return "\n".join(lines) + "\n"


def job_name(recipe: str) -> str:
    """The last part of the recipe's name, in characters that Slurm and torchrun take."""
    stem = recipe.rstrip("/").rsplit("/", 1)[-1].removesuffix(".yaml").removesuffix(".yml")
    return re.sub(r"[^A-Za-z0-9._-]", "-", stem).strip("-.") or "undertow"
