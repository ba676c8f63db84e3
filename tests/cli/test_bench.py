"""`undertow bench`: tables, result files, hooks, and mistakes in one line."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from undertow.bench.table import _absent
from undertow.cli import main


def test_kernels_on_a_cpu(tmp_path, capsys):
    target = tmp_path / "result.json"
    assert main(["bench", "kernels", "--device", "cpu", "--op", "swa", "--shape", "20+7", "--json", str(target)]) == 0
    out = capsys.readouterr().out
    assert "swa forward: 20+7 tokens, 4 x 32; floor " in out and "swa backward: 20+7 tokens, 4 x 32; floor " in out
    assert "absent: triton: triton kernels run on a GPU" in out
    assert "On a CPU kernels would run in an interpreter, which is not timed" in out
    result = json.loads(target.read_text())
    assert result["kind"] == "kernels" and result["ceilings"]["copy"] > 0 and result["environment"]["versions"]["torch"]
    status = {(row["op"], row["way"]): row["status"] for row in result["rows"]}
    assert status["swa forward", "reference"] == status["swa backward", "reference"] == "ok"
    assert status["swa forward", "triton"] == "absent"
    row = result["rows"][-1]
    assert row["error"] <= row["error_limit"] == 2e-2 and row["ms"]["repeats"] >= 5


def test_what_is_named_twice_is_measured_once(capsys):
    words = ["--device", "cpu", "--op", "swa", "--op", "swa", "--shape", "20", "--shape", "20", "--deterministic"]
    assert main(["bench", "kernels", *words]) == 0
    out = capsys.readouterr().out
    assert out.count("swa forward: 20 tokens") == 1 and out.count("  reference ") == 2
    assert "with --deterministic: gradients of the same bits every time were asked for" in out


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU")
def test_a_gpu_that_is_not_there(capsys):
    assert main(["bench", "kernels", "--device", "cuda"]) == 2
    expected = "error: --device cuda: torch sees no GPU here; give --device cpu or --device auto\n"
    assert capsys.readouterr().err == expected


def test_a_wrong_kernel_is_told_and_ends_with_1(capsys, monkeypatch):
    from undertow.ops.registry import REFERENCE

    plain = REFERENCE["sparse_attention"]

    def wrong(q, *rest, **options):
        o, lse = plain(q, *rest, **options)
        return (o * 1.03 if q.dtype.itemsize == 2 else o), lse

    monkeypatch.setitem(REFERENCE, "sparse_attention", wrong)
    assert main(["bench", "kernels", "--device", "cpu", "--op", "swa", "--shape", "20"]) == 1
    streams = capsys.readouterr()
    assert "WRONG, not timed: at most 2e-02" in streams.out
    assert "swa forward by reference (20 tokens, 4 x 32) is wrong" in streams.err


@pytest.mark.skipif(not Path("/dev/full").exists(), reason="no /dev/full here")
def test_a_full_disk_costs_the_file_and_not_what_was_measured(capsys):
    words = ["--device", "cpu", "--op", "swa", "--op", "rotary", "--shape", "20", "--json", "/dev/full"]
    assert main(["bench", "kernels", *words]) == 2
    streams = capsys.readouterr()
    assert "swa forward: 20 tokens" in streams.out and "rotary backward: 20 x 2 x 16" in streams.out
    full = "/dev/full: cannot be written (No space left on device); give --json another file"
    assert streams.err.count(f"{full}; measuring goes on, and it is tried again") == 1
    assert streams.err.splitlines()[-1] == f"error: {full}"


def test_what_is_absent_is_told_in_lines_of_a_terminal(cpu_rows):
    """The shorter of the operators that have a way and those that have not."""
    lines = _absent(cpu_rows)
    assert lines[0] == "absent: triton for all but quantise: triton kernels run on a GPU"
    assert all(len(line) <= 110 for line in lines)
    assert " ".join(" ".join(lines[1:]).split()) == f"absent: torch for {', '.join('abcdefghi')}: not here"


@pytest.fixture
def cpu_rows() -> list[dict[str, str]]:
    ops = ["quantise", *"abcdefghi", *(f"operator {n}" for n in range(30))]
    rows = [{"op": op, "way": "reference", "status": "ok"} for op in ops]
    rows += [{"op": op, "way": "triton", "status": "absent", "reason": "triton kernels run on a GPU"} for op in ops[1:]]
    return rows + [{"op": op, "way": "torch", "status": "absent", "reason": "not here"} for op in "abcdefghi"]


def test_step_as_json_without_a_preset(capsys):
    words = ["device=cpu", "train.sequence_length=32", "train.batch_size=1", "train.optimizer=adamw"]
    assert main(["bench", "step", *words, "--steps", "1", "--json", "-"]) == 0
    result = json.loads(capsys.readouterr().out)
    (setting,) = result["settings"]
    assert result["preset"] == "v4-tiny" and setting["name"] == "as given" and setting["tokens"] == 32
    assert len(setting["losses"]) == 4


def test_step_table(capsys):
    words = ["v4-debug", "device=cpu", "train.sequence_length=32", "--against", "train.learning_rate=1e-3"]
    assert main(["bench", "step", *words, "--steps", "1"]) == 0
    out = capsys.readouterr().out
    assert re.search(r"^tokens a step +64 +64$", out, re.MULTILINE)
    assert "train.learning_rate=0.003  train.learning_rate=1e-3" in out
    assert "losses of 4 steps: at most " in out and "operators of train.learning_rate=1e-3: all by reference" in out


def test_step_families(tmp_path, capsys):
    target = tmp_path / "families.json"
    words = ["v4-debug", "device=cpu", "train.sequence_length=32", "--families", "fusion,grouped_gemm"]
    assert main(["bench", "step", *words, "--steps", "1", "--alone", "0", "--json", str(target)]) == 0
    result = json.loads(target.read_text())
    assert (result["kind"], result["families"]) == ("step families", ["fusion", "grouped_gemm"])
    off, on = result["settings"]
    assert (off["role"], on["role"]) == ("off", "on") and off["losses"] == on["losses"]
    out = capsys.readouterr().out
    assert "No kernel of these operators runs here" in out and re.search(r"^all off +64 +", out, re.MULTILINE)


def test_hooks_are_written_and_nothing_is_measured(tmp_path, capsys):
    target = tmp_path / "ours.py"
    assert main(["bench", "kernels", "--peer-hooks", str(target)]) == 0
    assert capsys.readouterr().out == f"{target}\n"
    assert "def sparse_attn_bwd(" in target.read_text()


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["kernels", "--op", "csaa"], "--op csaa: unknown; did you mean 'csa'?"),
        (["kernels", "--against", "flexx"], "--against flexx: unknown; did you mean 'flex'?"),
        (["kernels", "--shape", "4k"], "--shape 4k: write the tokens of each document"),
        (["kernels", "--device", "tpu"], "--device tpu: unknown"),
        (["kernels", "--against", "none", "--against", "flex"], "it stands for no peer, and flex was named too"),
        (["kernels", "--peer-hooks", "x", "--op", "swa", "--json", "y"], "has no use for --op, --json, which measure"),
        (["step", "v4-prox"], "preset v4-prox: unknown; did you mean 'v4-proxy'?"),
        (["step", "v4-debug", "device=cpu", "--against", "seed=0"], "both settings are the same"),
        (["step", "v4-debug", "--against", "seed"], "is not of the form section.key=value"),
        (["step", "v4-debug", "--against", "sed=1"], "sed"),
        (["step", "v4-debug", "device=cpu", "ops.linear=triton", "--steps", "1"], "no triton kernel for linear"),
        (["step", "v4-debug", "ops.linear=gluon"], "ops.linear is 'gluon'; allowed: 'auto', 'reference' or 'triton'"),
        (["step", "v4-debug", "--trace", "none/trace.json"], "there is no directory none"),
        (["step", "v4-debug", "ops.linaer=reference"], "ops.linaer: unknown; did you mean 'linear'?"),
        (["step", "v4-debug", "--trace", "."], "--trace .: it is a directory"),
        (["step", "v4-debug", "--json", "none/a.json"], "--json none/a.json: there is no directory none"),
        (["step", "v4-debug", "--families", "fusio"], "no family of operators; did you mean 'fusion'?"),
        (["step", "--families", "fusion", "--losses", "9"], "--families fusion: it has no use for --losses"),
        (["step", "v4-debug", "--compile", "60"], "--compile 60.0: it belongs to --families"),
        (["kernels", "--json", "none/a.json"], "--json none/a.json: there is no directory none"),
        (["kernels", "--json", f"{'a' * 300}.json"], "the name is too long; give a shorter one"),
        (["kernels", "--json", "."], "--json .: it is a directory"),
        (["kernels", "--shape", "9" * 23], "more than 2,147,483,647 tokens"),
    ],
)
def test_mistakes(words, said, capsys):
    assert main(["bench", *words]) == 2
    error = capsys.readouterr().err.splitlines()[-1]
    assert error.startswith("error: ") and said in error


@pytest.mark.parametrize(
    ("words", "told"),
    [
        (["--nproc", "2", "--against", "train.batch_size=4"], "--against train.batch_size=4: over processes one"),
        (["--nproc", "2", "--families", "fusion"], "--families fusion: over processes one setting is measured; "),
        (["--beside", "one.json"], "--beside one.json: it is for a step over processes; give --nproc, or leave it out"),
    ],
)
def test_options_that_several_processes_do_not_have(words, told, capsys):
    assert main(["bench", "step", "v4-debug", *words]) == 2
    (line,) = capsys.readouterr().err.splitlines()
    assert line.startswith(f"error: {told}")


@pytest.mark.multi
def test_two_processes_that_are_started_here(tmp_path):
    target, environment = tmp_path / "two.json", {**os.environ, "OMP_NUM_THREADS": "1", "OMP_WAIT_POLICY": "PASSIVE"}
    words = ["device=cpu", "parallel.shard=2", "--steps", "1", "--nproc", "2", "--json", str(target)]
    command = [sys.executable, "-m", "undertow", "bench", "step", "v4-debug", *words]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    assert done.stdout.count("2 processes: shard 2; ") == 1 and "\n1  " in done.stdout
    result = json.loads(target.read_text())
    assert (result["processes"], len(result["ranks"])) == (2, 2)
