"""`undertow plan`: what it prints, the document, exit codes, and mistakes in one line."""

from __future__ import annotations

import json
import re
import shlex
import subprocess
import sys
from pathlib import Path

import pytest

from undertow.cli import main

PUBLISHED = ("v4-flash", "--gpus", "32xMI355X", "model.indexer=own_rank", "indexer.frozen=true")


def test_report_of_the_published_run(capsys):
    assert main(["plan", *PUBLISHED, "--layout", "Et*10|t*12|t*12|t*9mL"]) == 0
    shown = capsys.readouterr().out
    assert shown.startswith("v4-flash on 32xMI355X: fits\n  tensor 1, pipeline 4, expert 8, context 1; data 8,")
    lines = [" ".join(line.split()) for line in shown.splitlines()]
    for line in (
        "256 sequences of 4,096 tokens, micro-batch 1: 32 microbatches",
        "total 290.80 B indexer own_rank: own query path, the published AMD variant",
        "290.94 B with indexer shared: shared query path, as released",
        "memory of a GPU, 288.0 GB (268.2 GiB) at most; 8 GPUs, all alike, in each stage",
        "0 262.0 244.0 26.0 saved activations of layers 161.3 e, optimizer state 49.8, weights 20.0, rest 30.9 e",
        "operations of an iteration, PFLOP, with the own_rank indexer",
        "all 93.47 31.39 62.07 377.10",
        "8.55 s an iteration, 3,833 tokens/s/GPU",
        "344.2 TFLOP/s/GPU algorithmic, 1,378.3 reported",
        "bubbles by pipeline rank: 24%, 8%, 8%, 13%",
    ):
        assert line in lines, line
    assert "not calibrated" not in shown and not re.search(r"\bnan\b", shown)


def test_what_does_not_fit_ends_with_3(capsys):
    assert main(["plan", "v4-flash", "--gpus", "8xH200"]) == 3
    out, error = capsys.readouterr()
    assert (
        out.startswith("v4-flash on 8xH200: DOES NOT FIT\n")
        and "\nnot calibrated\n  choice: tensor 8, for nothing fits, and" in out
    )
    assert error.startswith("error: v4-flash does not fit 8xH200: a GPU of stage") and error.count("\n") == 1


def test_actor_and_rollout(capsys):
    assert main(["plan", "v4-flash", "--gpus", "32xMI355X+8xMI308X"]) == 0
    out = capsys.readouterr().out
    assert out.startswith("v4-flash on 32xMI355X + 8xMI308X: fits")
    assert "\nrollout on 8xMI308X\n  4 x 2 GPUs a replica: tensor 2, expert 2, data 1\n" in out
    assert (
        "  of 172.8 GB to use on a GPU: weights in FP8 143.5, buffers for new weights 2.1, room for caches 27.1 GB"
        in out
    )


def test_document(tmp_path: Path, capsys):
    assert main(["plan", "v4-flash", "--gpus", "32xMI355X", "--json", "-"]) == 0
    printed = json.loads(capsys.readouterr().out)
    file = tmp_path / "plan.json"
    assert main(["plan", "v4-flash", "--gpus", "32xMI355X", "--json", str(file)]) == 0
    assert json.loads(file.read_text()) == printed and capsys.readouterr().out.startswith("v4-flash on")
    assert [path.name for path in tmp_path.iterdir()] == ["plan.json"]
    assert main(["plan", "v4-flash", "--gpus", "8xH200", "--json", "-"]) == 3
    assert json.loads(capsys.readouterr().out)["fits"] is False


def test_document_says_what_was_planned(capsys):
    assert main(["plan", "v4-flash", "--gpus", "8xH200", "--pp", "2", "--json", "-"]) == 3
    out, error = capsys.readouterr()
    found = json.loads(out)
    assert (found["model"], found["gpu"], found["gpus"]) == ("v4-flash", "H200", 8)
    widths = found["geometry"]
    assert widths["pipeline"] == 2 and widths["tensor"] * widths["data"] == 4 and widths["context"] == 1
    assert found["batch"]["size"] == 64 and found["batch"]["sequence_length"] == 4096
    assert found["schedule"] == "1f1b" and found["state"] == "published-bf16" and found["implementation"] == "tight"
    assert len(found["bubbles"]) == 2 and all(0 <= share < 1 for share in found["bubbles"])
    assert error == f"error: {found['refusal']}\n" and len(found["memory"]["ranks"]) == 8


def test_a_line_of_memory_adds_up(capsys):
    assert main(["plan", *PUBLISHED]) == 0
    lines = capsys.readouterr().out.split("largest terms and the rest, GB (e: estimated)\n")[1].split("\n\n")[0]
    for line in lines.splitlines():
        total, terms = float(line.split()[1]), re.findall(r"(-?[\d.]+)(?: e)?(?:,|$)", line)
        assert len(terms) == 4 and sum(map(float, terms)) == pytest.approx(total, abs=1e-6), line


def test_one_file_for_two_answers_is_refused(tmp_path: Path, capsys):
    (tmp_path / "link").symlink_to("x")
    words = ["--json", str(tmp_path / "x"), "--html", str(tmp_path / "link")]
    assert main(["plan", "v4-flash", "--gpus", "32xMI355X", *words]) == 2
    error = capsys.readouterr().err
    assert error.endswith("both would write one file; give two names\n") and not (tmp_path / "x").exists()


def test_options_reach_the_plan(capsys):
    words = ["--tp", "4", "--pp", "4", "--ep", "4", "--cp", "2", "--micro-batch", "2", "--global-batch", "64"]
    words += ["--sequence-length", "8192", "--recompute", "first:1", "--state", "muon-bf16", "--schedule", "1f1b"]
    main(["plan", "v4-flash", "--gpus", "64xMI355X", "--implementation", "tight", *words])
    head = capsys.readouterr().out.split("\n\n")[0].splitlines()
    assert head[1:] == [
        "  tensor 4, pipeline 4, expert 4, context 2; data 2, copies of each expert 4",
        "  64 sequences of 8,192 tokens, micro-batch 2: 16 microbatches",
        "  layout Et*10|t*11|t*11|t*11mL, schedule 1f1b, recomputed layers 0, 10, 21, 32",
        "  implementation tight, state muon-bf16",
    ]


def test_gpus_from_a_file(tmp_path: Path, capsys):
    file = tmp_path / "gpus.yaml"
    file.write_text("Z1: {memory: 500e9, bandwidth: 9e12, bf16: 2e15, fp8: 4e15, link: 9e11}\n")
    assert main(["plan", "v4-flash", "--gpus", "32xZ1", "--gpu-file", str(file)]) == 0
    out = capsys.readouterr().out
    assert out.startswith("v4-flash on 32xZ1: fits") and "500.0 GB" in out and "rates of Z1 are guessed" in out


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["v4-flsh", "--gpus", "8xH200"], "no preset, recipe or model directory 'v4-flsh'; did you mean 'v4-flash'?"),
        (["v4-flash"], "Missing option '--gpus'"),
        (["v4-flash", "--gpus", "0xH200"], "gpus '0xH200': a pool of 0 GPUs; allowed: 1 to"),
        (["v4-flash", "--gpus", "8xH200", "--layout", "Et|mtL"], "layout 'Et|mtL', column 4: an MTP block m before"),
        (["v4-flash", "--gpus", "8xH200", "--pp", "x"], "Invalid value for '--pp'"),
        (["v4-flash", "--gpus", "8xH200", "foo"], "'foo' is not of the form section.key=value"),
        (["v4-flash", "--gpus", "32xMI355X", "--json", "/nowhere/x"], "/nowhere/x: cannot be written"),
        (["v4-flash", "--gpus", "32xMI355X", "--json", "."], ".: cannot be written (Is a directory); choose another"),
        (["v4-flash", "--gpus", "32xMI355X", "--html", ""], ".: cannot be written (Is a directory); choose another"),
        (["v4-flash", "--gpus", "32xMI355X", "--gpu-file", "/dev/zero"], "cannot read this GPU file: it is no regular"),
        (["v4-flash", "--gpus", "8xH200", "model.index_topk=0"], "model.index_topk is 0; allowed: greater than 0"),
    ],
)
def test_mistakes_are_one_line(words, message, capsys):
    assert main(["plan", *words]) == 2
    error = capsys.readouterr().err
    assert message in error and error.startswith("error: ") and error.count("\n") == 1


def test_it_takes_under_two_seconds_and_no_torch():
    probe = (
        "import sys, time; from undertow.cli import main; code = main(sys.argv[1:]); "
        "assert not {'torch', 'numpy'} & set(sys.modules); print(time.process_time()); sys.exit(code)"
    )
    words = [sys.executable, "-c", probe, "plan", "v4-flash", "--gpus", "32xMI355X"]
    done = subprocess.run(words, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    assert float(done.stdout.splitlines()[-1]) < 2


def test_tuned(tmp_path: Path, capsys):
    target, fragment = tmp_path / "plan.json", tmp_path / "tuned.yaml"
    words = ["plan", *PUBLISHED, "--tune", "--pp", "4", "--ep", "8", "--micro-batch", "1", "--schedule", "1f1b"]
    assert main([*words, "--fragment", str(fragment), "--json", str(target)]) == 0
    out, error = capsys.readouterr()
    assert "\ntuned within 273.6 GB a GPU, a margin of 0.05\n" in out and error == ""
    tuned = json.loads(target.read_text("utf-8"))["tuned"]
    assert tuned["layout"] == "Et*11|t*12|t*11|t*9mL"
    assert tuned["fragment"].splitlines()[1:] == fragment.read_text("utf-8").splitlines()[1:]
    told = fragment.read_text("utf-8").partition("\n")[0].partition("undertow plan ")[2]
    assert told.startswith(f"{fragment} model.indexer=own_rank indexer.frozen=true --implementation primus")
    again = tmp_path / "again.json"
    assert main(["plan", *shlex.split(told), "--json", str(again)]) == 0
    planned = json.loads(again.read_text("utf-8"))
    assert planned["layout"] == tuned["layout"] and planned["recompute"] == tuned["recompute"]
    assert planned["time"]["seconds_per_iteration"] == tuned["seconds_per_iteration"]
    capsys.readouterr()
    assert main([*words, "--memory-limit", "220", "--margin", "0", "--granularity", "module", "--json", "-"]) == 0
    narrow = json.loads(capsys.readouterr().out)["tuned"]
    assert narrow["peak_bytes"] <= 220e9 and narrow["recompute"]["modules"]


@pytest.mark.parametrize(
    ("words", "code", "message"),
    [
        (["--granularity", "module"], 2, "--granularity module: it has an effect with --tune alone; add --tune"),
        (["--memory-limit", "289"], 2, "memory limit is 289.0 GB; allowed: above 0, at most the 288 GB of MI355X"),
        (["--fragment", "x.yaml"], 2, "--fragment x.yaml: it has an effect with --tune alone; add --tune"),
        (["--tune", "--layout", "Et*43mL"], 2, "layout with tuning: the tuner chooses the layout; give one of the two"),
        (["--tune", "--pp", "4", "--ep", "8", "--memory-limit", "60"], 3, "no layout fits 57.0 GB a GPU: the nearest,"),
    ],
)
def test_what_cannot_be_tuned(words, code, message, capsys):
    assert main(["plan", "v4-flash", "--gpus", "32xMI355X", *words]) == code
    out, error = capsys.readouterr()
    assert out == "" and error.startswith(f"error: {message}") and error.count("\n") == 1
