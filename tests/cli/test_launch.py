"""`undertow launch`: the dry run, its document, exit codes, and what this version refuses to start."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

from undertow.cli import main

ROOT = Path(__file__).parents[2]
FLASH = str(ROOT / "recipes" / "pretrain" / "flash-32xMI355X.yaml")


@pytest.fixture(autouse=True)
def folder(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    return tmp_path


def section(text: str, title: str) -> list[str]:
    """Lines of the paragraph that begins with this title."""
    (found,) = [part for part in text.split("\n\n") if part.startswith(title)]
    return [line.strip() for line in found.splitlines()[1:]]


def test_dry_run_of_the_published_run(capsys):
    assert main(["launch", FLASH, "--nodes", "4", "--dry-run"]) == 0
    out, error = capsys.readouterr()
    assert error == "" and out.startswith(f"{FLASH} on 4 nodes of 8 MI355X\n\nmodel:\n  preset: v4-flash ")
    lines = [" ".join(line.split()) for line in out.splitlines()]
    assert 'layout: "Et*10|t*12|t*12|t*9mL" # ' in "\n".join(lines)
    assert "beta1: 0.9 # " in "\n".join(lines) and "context: 1 # default" in lines
    assert section(out, "conflicts") == ["none"]
    assert len(section(out, "warnings")) == 3
    unbuilt = section(out, "not built yet")
    assert [line.split(":")[0] for line in unbuilt] == ["optimizations.mega_moe", "optimizations.layout"]
    for line in (
        "total 290.80 B indexer own_rank: own query path, the published AMD variant",
        "memory of a GPU, 288.0 GB (268.2 GiB) at most; 8 GPUs, all alike, in each stage",
        "8.55 s an iteration, 3,833 tokens/s/GPU",
        "344.2 TFLOP/s/GPU algorithmic, 1,378.3 reported",
        "nearest published rung: 7, layout 10/12/12/9, nothing recomputed",
        "difference: none",
    ):
        assert line in lines, line
    assert lines[-1].startswith("torchrun --nnodes 4 ") and lines[-1].endswith(f" -m undertow train {FLASH}")


def test_script_for_slurm(capsys):
    assert main(["launch", "pretrain/flash-64xH200", "--nodes", "8", "--slurm", "--dry-run"]) == 0
    script = capsys.readouterr().out.partition("script, for sbatch\n\n")[2].splitlines()
    assert script[:3] == ["#!/bin/bash", "#SBATCH --job-name=flash-64xH200", "#SBATCH --nodes=8"]
    assert script[-1].startswith("srun --kill-on-bad-exit=1 torchrun --nnodes 8 ")


def test_document(capsys):
    words = ["launch", "pretrain/flash-32xMI355X", "--nodes", "8", "--dry-run", "--json", "train.batch_size=512"]
    assert main(words) == 0
    found = json.loads(capsys.readouterr().out)
    assert (found["nodes"], found["gpus_per_node"], found["gpu"]) == (8, 8, "MI355X")
    assert found["replanned_from"] == "32xMI355X"
    assert found["values"]["train.batch_size"] == {"value": 512, "source": "command line"}
    assert found["values"]["parallel.layout"] == {"value": found["plan"]["layout"], "source": "planned for 64xMI355X"}
    assert len(found["plan"]["memory"]["ranks"]) == 64 and found["plan"]["fits"]
    assert (found["conflicts"], list(found["unbuilt"]), found["script"]) == ([], ["mega_moe", "layout"], None)
    assert found["rung"]["number"] == 7 and found["rung"]["differs"] == {}
    assert f"'parallel.layout={found['plan']['layout']}'" in found["command"]


def test_conflicts_end_with_2_after_all_is_told(capsys):
    assert main(["launch", "pretrain/flash-32xMI355X", "--nodes", "4", "--dry-run", "optimizations.dispatch=on"]) == 2
    out, error = capsys.readouterr()
    told = "optimizations.mega_moe and optimizations.dispatch are both on: mega_moe exchanges tokens in its own kernel"
    assert section(out, "conflicts")[0].startswith(told) and "torchrun" in out
    assert error.startswith(f"error: {told}") and error.count("\n") == 1


def test_what_the_processes_would_refuse_ends_a_dry_run_with_2(capsys):
    words = ["pretrain/proxy-4xH200", "--nodes", "1", "--dry-run", "train.batch_size_schedule=[[9,6]]"]
    assert main(["launch", *words]) == 2
    out, error = capsys.readouterr()
    told = "train.batch_size_schedule 6: 4 data-parallel ranks take as many sequences each; give a multiple of 4"
    assert section(out, "conflicts") == [told] and error == f"error: {told}\n"


def test_what_does_not_fit_ends_with_3(capsys):
    words = ["pretrain/v4-flash-amd", "--nodes", "4", "--gpu", "H100", "--dry-run"]
    assert main(["launch", *words]) == 3
    out, error = capsys.readouterr()
    assert "on 32xH100: DOES NOT FIT" in out
    assert error.startswith("error: pretrain/v4-flash-amd does not fit 32xH100: a GPU of stage")


def test_nodes_that_widths_do_not_suit_end_with_2(capsys):
    assert main(["launch", "pretrain/flash-32xMI355X", "--nodes", "2", "--dry-run"]) == 2
    out, error = capsys.readouterr()
    assert out == "" and error.startswith("error: --nodes 2: expert 8 does not divide the 4 ranks of a stage")


@pytest.mark.parametrize("name", ["pretrain/flash-32xMI355X", "pretrain/v4-flash"])
def test_several_machines_are_not_started_from_one(capsys, folder, name):
    assert main(["launch", name, "--nodes", "4"]) == 2
    out, error = capsys.readouterr()
    assert (out, error) == (
        "",
        "error: --nodes 4: the processes of one machine are started from here; run the command that --dry-run prints "
        "on each of them, or give sbatch the script that --slurm prints\n",
    )
    assert list(folder.iterdir()) == []


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["--nodes", "1", "--json"], "--json: it has an effect with --dry-run alone; add --dry-run, or leave it out"),
        (["--nodes", "1", "--slurm"], "--slurm: it has an effect with --dry-run alone; add --dry-run, or leave it out"),
        (
            ["--nodes", "2", "--dry-run"],
            "no GPUs: the recipe states none; say which the nodes have, as --gpu H200, or ",
        ),
        (["--nodes", "1", "device=cpu"], "device cpu: nobody says how many processes; give --nproc, as --nproc 2"),
        (["--nodes", "1", "--nproc", "2", "--gpu", "H200"], "--gpu: --nproc starts processes on processor cores; give"),
        (["--nodes", "1", "--nproc", "3", "--dry-run", "parallel.expert=2"], "expert 2 does not divide the 3 ranks"),
        (["--nodes", "1", "--nproc", "2", "optimizations.fp8=on"], "optimizations.fp8: not built yet"),
        (["--nodes", "1", "--nproc", "2", "train.batch_size=3"], "train.batch_size 3: 2 data-parallel ranks take as"),
        (["--nodes", "1", "--nproc", "2", "--dry-run", "train.batch_size=3"], "train.batch_size 3: 2 data-parallel"),
        (["--nodes", "1", "--nproc", "2", "--dry-run", "parallel.pipeline=2", "parallel.layout=no"], "layout 'no', "),
        (["--nodes", "1", "--gpus-per-node", "2", "parallel.schedule=zbv"], "parallel.schedule is zbv: it can be"),
        (["--nodes", "0", "--dry-run"], "Invalid value for '--nodes'"),
        ([], "Missing option '--nodes'"),
    ],
)
def test_mistakes_are_one_line_and_code_2(capsys, words, message):
    assert main(["launch", "pretrain/quickstart", *words]) == 2
    out, error = capsys.readouterr()
    assert out == "" and error.startswith(f"error: {message}") and error.count("\n") == 1


def test_unknown_kind_of_gpu(capsys):
    assert main(["launch", "pretrain/quickstart", "--nodes", "1", "--gpu", "H20", "--dry-run"]) == 2
    assert "unknown GPU 'H20'; did you mean" in capsys.readouterr().err


def test_one_process_trains_as_train_does(capsys, folder):
    words = ["train.steps=1", "train.sequence_length=64", "train.eval_sequences=1", "device=cpu", "out=run"]
    words.append("parallel.gpus=1xH200")
    assert main(["launch", "pretrain/quickstart", "--nodes", "1", *words]) == 0
    assert "done: step 1, 128 tokens" in capsys.readouterr().out
    assert (folder / "run" / "metrics.jsonl").is_file()


def test_one_process_with_a_conflict_is_refused(capsys, folder):
    words = ["--nodes", "1", "--gpus-per-node", "1", "optimizations.dispatch=on"]
    assert main(["launch", "pretrain/quickstart", *words]) == 2
    assert capsys.readouterr().err.startswith("error: optimizations.dispatch is on and parallel.expert is 1: there is")
    assert list(folder.iterdir()) == []


def test_dry_run_loads_no_torch():
    probe = (
        "import sys; from undertow.cli import main; "
        f"code = main(['launch', {FLASH!r}, '--nodes', '8', '--dry-run']); "
        "raise SystemExit(code or 'torch' in sys.modules)"
    )
    assert subprocess.run([sys.executable, "-c", probe], capture_output=True, check=False).returncode == 0


def test_every_option_is_explained(capsys):
    assert main(["launch", "--help"]) == 0
    shown = capsys.readouterr().out
    for option in ("--nodes", "--gpus-per-node", "--nproc", "--gpu", "--slurm", "--dry-run", "--json", "KEY=VALUE"):
        assert option in shown


def test_dry_run_on_processor_cores(capsys):
    words = ["launch", "pretrain/quickstart", "--nodes", "1", "--nproc", "2", "--dry-run", "parallel.expert=2"]
    command = "torchrun --standalone --nproc-per-node 2 -m undertow train pretrain/quickstart"
    command += " parallel.expert=2 device=cpu"
    assert main(words) == 0
    out = capsys.readouterr().out
    assert out.startswith("pretrain/quickstart in 2 processes on processor cores\n\nmodel:\n")
    assert section(out, "conflicts") == ["none"]
    assert section(out, "plan") == ["none: of processor cores no rates are known"]
    assert out.splitlines()[-1] == command
    assert main([*words, "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert (found["processes_per_node"], found["command"], found["conflicts"]) == (2, command, [])
    assert found["values"]["device"] == {"value": "cpu", "source": "command line"}


def test_what_does_not_fit_is_not_started(capsys, folder):
    words = ["pretrain/v4-flash", "--nodes", "1", "--gpu", "H200", "train.steps=1"]
    assert main(["launch", *words]) == 3
    assert capsys.readouterr().err.startswith("error: pretrain/v4-flash does not fit 8xH200: a GPU of stage")
    assert list(folder.iterdir()) == []
