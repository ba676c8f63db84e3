"""The command of every machine and the script for Slurm."""

import subprocess

import pytest

from undertow.launch.command import command_of, job_name, slurm_script
from undertow.launch.machines import Machines

RECIPE = "pretrain/flash-32xMI355X"


def test_one_process_needs_no_launcher():
    assert command_of("a.yaml", ["train.steps=3"], Machines(1, 1, "H200")) == "undertow train a.yaml train.steps=3"


def test_one_machine_stands_alone():
    found = command_of("my runs/a.yaml", ["parallel.layout=Et|tL"], Machines(1, 2, "H200"))
    assert found == (
        "torchrun --standalone --nproc-per-node 2 -m undertow train 'my runs/a.yaml' 'parallel.layout=Et|tL'"
    )


def test_several_machines_meet_at_one():
    assert command_of(RECIPE, [], Machines(4, 8, "MI355X")) == (
        "torchrun --nnodes 4 --rdzv-backend c10d --rdzv-id flash-32xMI355X "
        '--rdzv-endpoint "$HEAD_NODE:29400" --nproc-per-node 8 -m undertow train pretrain/flash-32xMI355X'
    )


def test_script_for_slurm():
    script = slurm_script(RECIPE, ["out=a b"], Machines(4, 8, "MI355X"))
    assert script.splitlines() == [
        "#!/bin/bash",
        "#SBATCH --job-name=flash-32xMI355X",
        "#SBATCH --nodes=4",
        "#SBATCH --ntasks-per-node=1",
        "#SBATCH --gpus-per-node=8",
        "#SBATCH --exclusive",
        "set -euo pipefail",
        'mapfile -t HOSTS < <(scontrol show hostnames "$SLURM_JOB_NODELIST")',
        'export HEAD_NODE="${HOSTS[0]}"',
        f"srun --kill-on-bad-exit=1 {command_of(RECIPE, ['out=a b'], Machines(4, 8, 'MI355X'))}",
    ]
    assert "HEAD_NODE" not in slurm_script(RECIPE, [], Machines(1, 8, "MI355X"))


@pytest.mark.parametrize("nodes", [1, 3])
def test_a_shell_reads_the_script(nodes):
    script = slurm_script("a'b c.yaml", ["parallel.layout=E(t|)*2L", "out=$HOME"], Machines(nodes, 8, "H200"))
    subprocess.run(["bash", "-n"], input=script, text=True, check=True)
    line = script.splitlines()[-1].partition("-m ")[2]
    printed = subprocess.run(["bash", "-c", f"printf '%s\\n' {line}"], text=True, capture_output=True, check=True)
    words = ["undertow", "train", "a'b c.yaml", "parallel.layout=E(t|)*2L", "out=$HOME"]
    assert printed.stdout.splitlines() == words


@pytest.mark.parametrize(
    ("recipe", "name"), [("a/b.yaml", "b"), ("x y;z.yml", "x-y-z"), ("/", "undertow"), ("--.yaml", "undertow")]
)
def test_names_of_jobs_are_plain(recipe, name):
    assert job_name(recipe) == name
