"""`undertow plan --fit` and `--serve`, state on the host, and mistakes of every kind through the command line."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from undertow.cli import main
from undertow.config.model import ModelConfig


def test_how_many_gpus(capsys):
    assert main(["plan", "v4-flash", "--fit", "--gpus", "H200+MI355X"]) == 0
    out = [" ".join(line.split()) for line in capsys.readouterr().out.splitlines()]
    assert out[0] == "v4-flash: the smallest clusters that train it, up to 4,096 GPUs"
    assert sum(line.startswith("H200 32 ") for line in out) == 2
    assert sum(line.startswith("MI355X 16 ") for line in out) == 2
    assert "MI355X 8 all 0 370.8 273.6 optimizer state 221.9" in out
    assert main(["plan", "v4-flash", "--fit", "--gpus", "B200", "--json", "-"]) == 0
    rows = json.loads(capsys.readouterr().out)["fit"]
    assert [(row["recompute"], row["gpus"]) for row in rows] == [("none", 24), ("all", 24)]


def test_fit_respects_what_is_said(tmp_path: Path, capsys):
    file = tmp_path / "gpus.yaml"
    file.write_text("Z1: {memory: 500e9, bandwidth: 9e12, bf16: 2e15, fp8: 4e15, link: 9e11}\n")
    words = ["--gpus", "Z1", "--gpu-file", str(file), "--state", "muon-bf16", "--recompute", "first:2", "--json", "-"]
    assert main(["plan", "v4-flash", "--fit", *words]) == 0
    (row,) = json.loads(capsys.readouterr().out)["fit"]
    assert (row["gpu"], row["state"], row["recompute"]) == ("Z1", "muon-bf16", "first:2") and row["gpus"] >= 8


def test_the_most_that_a_cluster_holds(capsys):
    assert main(["plan", "v4-flash", "--fit", "--gpus", "32xMI355X", "--recompute", "none", "--json", "-"]) == 0
    rows = json.loads(capsys.readouterr().out)["fit"]
    assert [(row["largest"], row["value"]) for row in rows] == [("micro-batch", 8), ("sequence length", 58_240)]


def test_what_fits_nowhere_ends_with_3(capsys):
    assert main(["plan", "v4-flash", "--fit", "--gpus", "H100", "--sequence-length", "1048576", "--tp", "1"]) == 3
    error = capsys.readouterr().err
    assert error.startswith("error: v4-flash fits no cluster of up to 4,096 GPUs: on 4096xH100, ")
    assert main(["plan", "v4-flash", "--fit", "--gpus", "8xH200"]) == 3


def test_serving(capsys):
    assert main(["plan", "v4-flash", "--gpus", "8xH200", "--serve", "--sequence-length", "65536"]) == 0
    out = [" ".join(line.split()) for line in capsys.readouterr().out.splitlines()]
    assert out[:2] == ["v4-flash served on 8xH200: fits", "2 x 4 GPUs a replica: tensor 4, expert 4, data 1"]
    assert any(line.startswith("65,536 ") for line in out) and any(line.startswith("1,048,576 ") for line in out)
    words = ["--weights", "bf16", "--cache", "bf16", "--memory-fraction", "0.8", "--tp", "8", "--json", "-"]
    assert main(["plan", "v4-flash", "--gpus", "8xH200", "--serve", *words]) == 0
    serving = json.loads(capsys.readouterr().out)["serving"]
    assert (serving["weights_format"], serving["gpus_per_replica"], serving["budget_bytes"]) == (
        "bf16", 8, 112_800_000_000,
    )  # fmt: skip
    assert main(["plan", "v4-flash", "--gpus", "1xH200", "--serve"]) == 3
    assert capsys.readouterr().err.startswith("error: v4-flash does not fit 1xH200: on each GPU of a replica of 1, ")


def test_state_on_the_host(capsys):
    words = ["--gpus", "16xMI308X+8xMI308X", "--tp", "4", "--pp", "4", "--ep", "4", "--sequence-length", "16384"]
    assert main(["plan", "v4-flash", *words, "--offload-optimizer"]) == 0
    out = capsys.readouterr().out
    assert "state published-bf16 on the host" in out and "\n  on the host: optimizer state, " in out


@pytest.mark.parametrize(
    ("model", "gpus", "code"),
    [
        ("v4-debug", "1xH200", 0),
        ("v4-tiny", "1xH200", 0),
        ("v4-tiny", "H200", 0),
        ("v4-flash", "7xH200", 3),
        ("v4-tiny", "3xMI300X+1xH200", 0),
        ("v4-flash", "1000000xMI355X", 0),
    ],
)
def test_unusual_and_legal(model, gpus, code, capsys):
    assert main(["plan", model, "--gpus", gpus]) == code
    assert capsys.readouterr().out.startswith(f"{model} on ")


def test_a_config_file(tmp_path: Path, capsys):
    file = tmp_path / "config.json"
    tiny = ModelConfig.from_preset("v4-tiny").model_dump()
    file.write_text(json.dumps({"model_type": "undertow", "format_version": 1} | tiny))
    for given in (file, tmp_path):
        assert main(["plan", str(given), "--gpus", "1xH200"]) == 0
        assert main(["plan", str(given), "--gpus", "1xH200", "--serve"]) == 0
    assert "DOES NOT FIT" not in capsys.readouterr().out


ON = ["--gpus", "32xMI355X"]
FIGURES = "bandwidth: 9e12, bf16: 2e15, fp8: 4e15, link: 9e11"
MISTAKES = [
    # layouts
    ([*ON, "--layout", "Et*10|q"], 2, "layout 'Et*10|q', column 7: 'q' is none of"),
    ([*ON, "--layout", "Et*10|t*12|t*12|t*8mL"], 2, "stages 0 to 3: 42 t"),
    ([*ON, "--layout", "t*43mL"], 2, "layout 't*43mL'"),
    ([*ON, "--layout", "Et*43m"], 2, "layout 'Et*43m'"),
    ([*ON, "--layout", "Et*43L"], 2, "layout 'Et*43L'"),
    ([*ON, "--layout", "Et*22||t*21mL"], 2, "layout 'Et*22||t*21mL'"),
    ([*ON, "--layout", "E(t*3"], 2, "layout 'E(t*3', column"),
    ([*ON, "--layout", "E(t)43mL"], 2, "layout 'E(t)43mL', column"),
    ([*ON, "--layout", "Et*x"], 2, "layout 'Et*x', column"),
    ([*ON, "--layout", "Et*0t*43mL"], 2, "layout 'Et*0t*43mL', column"),
    ([*ON, "--layout", "Et*999999999999mL"], 2, "layout 'Et*999999999999mL', column"),
    ([*ON, "--layout", ""], 2, "layout ''"),
    # schedule against layout
    ([*ON, "--layout", "Et*22|t*21mL", "--schedule", "interleaved"], 2, "schedule interleaved with a layout of 2"),
    ([*ON, "--layout", "Et*10|t*12|t*12|t*9mL", "--pp", "8"], 2, "layout 'Et*10|t*12|t*12|t*9mL'"),
    ([*ON, "--layout", "Et*20|t*11|t*12mL", "--schedule", "zbv"], 2, ""),
    ([*ON, "--schedule", "zb-h1", "--recompute", "all"], 2, "schedule zb-h1 splits the backward pass"),
    ([*ON, "--schedule", "gpipe"], 2, "unknown schedule 'gpipe'"),
    # GPU strings
    (["--gpus", "32xMI35X"], 2, "unknown GPU 'MI35X'; did you mean 'MI355X'?"),
    (["--gpus", "0xH200"], 2, "a pool of 0 GPUs; allowed: 1 to 1000000"),
    (["--gpus", "-8xH200"], 2, "'-8xH200' is not a pool; write NxGPU"),
    (["--gpus", f"{10**30}xH200"], 2, "allowed: 1 to 1000000"),
    (["--gpus", "9" * 5000 + "xH200"], 2, "allowed: 1 to 1000000"),
    (["--gpus", "8xH200+"], 2, "'' is not a pool"),
    (["--gpus", "1.5xH200"], 2, "'1.5xH200' is not a pool"),
    (["--gpus", "H200+H200+H200"], 2, "3 pools; allowed: one that trains, or one that trains + one that samples"),
    (["--gpus", ""], 2, "'' is not a pool"),
    ([], 2, "Missing option '--gpus'"),
    # widths and batches
    ([*ON, "--tp", "3"], 2, "tensor 3"),
    ([*ON, "--tp", "0"], 2, "tensor is 0; allowed: at least 1"),
    ([*ON, "--pp", "-1"], 2, "pipeline is -1; allowed: at least 1"),
    ([*ON, "--pp", "64"], 2, "32 GPUs are not a multiple of tensor 1 x pipeline 64"),
    ([*ON, "--ep", "7"], 2, "expert 7 does not divide"),
    ([*ON, "--cp", "3"], 2, "32 GPUs are not a multiple"),
    ([*ON, "--global-batch", "100", "--pp", "4", "--tp", "1"], 2, "batch of 100 sequences is not a multiple"),
    ([*ON, "--global-batch", str(8 * 10**30)], 2, "microbatches on each of 1 pipeline ranks; allowed: 400000 in all"),
    ([*ON, "--micro-batch", "0"], 2, "batch micro_batch is 0; allowed: at least 1"),
    ([*ON, "--sequence-length", "0"], 2, "batch sequence_length is 0; allowed: at least 1"),
    ([*ON, "--sequence-length", str(10**12)], 2, "sequence length 1000000000000 exceeds max_position_embeddings"),
    # recomputation and names
    ([*ON, "--recompute", "99"], 2, "recompute '99': layer 99 is none of this model's"),
    ([*ON, "--recompute", "5-2"], 2, "recompute '5-2': the range 5-2 runs backwards"),
    ([*ON, "--recompute", "first:x"], 2, "recompute 'first:x'"),
    ([*ON, "--recompute", "frist:3"], 2, "recompute 'frist:3'"),
    ([*ON, "--state", "fp7"], 2, "unknown state profile 'fp7'"),
    ([*ON, "--implementation", "tigt"], 2, "unknown implementation 'tigt'; did you mean 'tight'?"),
    # what does not go together
    ([*ON, "--serve", "--fit"], 2, "--serve plans replicas and --fit GPUs for training; give one of them"),
    ([*ON, "--serve", "--tune"], 2, "--tune goes with the plan of one training run, --serve with none; leave one of"),
    ([*ON, "--serve", "--pp", "4"], 2, "--pp is for a training run, --serve plans none"),
    ([*ON, "--weights", "fp8"], 2, "--weights is for a serving plan; add --serve"),
    ([*ON, "--serve", "--weights", "int3"], 2, "unknown weight format 'int3'"),
    ([*ON, "--serve", "--cache", "fp3"], 2, "unknown cache format 'fp3'"),
    ([*ON, "--serve", "--memory-fraction", "1.5"], 2, "memory_fraction is 1.5; allowed: above 0, at most 1"),
    ([*ON, "--serve", "--memory-fraction", "nan"], 2, "memory_fraction is nan; allowed: above 0, at most 1"),
    ([*ON, "--serve", "--tp", "64"], 2, "a replica of tensor 64 and expert 64 needs 64 GPUs, given 32xMI355X"),
    (["--fit", "--gpus", "8xH200+8xH200"], 2, "2 pools; allowed: one, or GPU names without numbers"),
    (["--fit", "--gpus", "H20"], 2, "unknown GPU 'H20'; did you mean 'H200'?"),
    (["--fit", "--tp", "3"], 2, "tensor 3 does not divide num_attention_heads 64"),
    # what does not fit
    (["--gpus", "1xH200"], 3, "v4-flash does not fit 1xH200: a GPU of stage 0 needs"),
    (["--gpus", "64xMI355X+1xH200"], 3, "rollout does not fit 1xH200: on each GPU of a replica of 1, weights"),
]


@pytest.mark.parametrize(("words", "code", "message"), MISTAKES)
def test_mistakes_are_one_sentence(words, code, message, capsys):
    assert main(["plan", "v4-flash", *words]) == code
    error = capsys.readouterr().err
    assert message in error and error.startswith("error: ") and error.count("\n") == 1 and len(error) < 600
    assert "Traceback" not in error


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (f"X1: {{memory: 0, {FIGURES}}}", "gpus.yaml:1: GPU X1: memory is 0; allowed: bytes from 1e9"),
        (f"X1: {{memory: -5, {FIGURES}}}", "memory is -5; allowed: bytes from 1e9"),
        (f"X1: {{memory: lots, {FIGURES}}}", "memory is 'lots'; allowed: bytes from 1e9"),
        (f"X1: {{memory: 1000, {FIGURES}}}", "memory is 1000; allowed: bytes from 1e9 (288 GB are 288e9)"),
        (f"X1: {{memory: .nan, {FIGURES}}}", "allowed: bytes from 1e9"),
        (f"X1: {{memory: [1], {FIGURES}}}", "memory is [1]; allowed: bytes from 1e9"),
        ("X1: {memory: 1e12}", "gpus.yaml:1: GPU X1 lacks bandwidth, bf16, fp8, link"),
        ("X1: 3", "GPU 'X1' is 3; allowed: a mapping of its figures"),
        ("", "gpus.yaml:1: a GPU file is a mapping of keys, but this file holds nothing"),
        ("[[[", "not valid YAML"),
        (b"\x89PNG\r\n\x1a\n\x00\xff", "cannot read this GPU file: it is not UTF-8 text"),
        (None, "cannot read this GPU file: No such file or directory"),
        ("directory", "cannot read this GPU file: Is a directory"),
    ],
)
def test_gpu_files(tmp_path: Path, content, message, capsys):
    file = tmp_path / "gpus.yaml"
    if content == "directory":
        file.mkdir()
    elif content is not None:
        file.write_bytes(content if isinstance(content, bytes) else content.encode())
    assert main(["plan", "v4-flash", "--gpus", "8xX1", "--gpu-file", str(file)]) == 2
    error = capsys.readouterr().err
    assert message in error and error.count("\n") == 1 and "recipe" not in error


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (b"\x00\xff\xfe binary", "not a UTF-8 text"),
        (b"{", "config.json"),
        (b"[]", "config.json"),
        (b"{}", "config.json"),
    ],
)
def test_model_files(tmp_path: Path, content, message, capsys):
    file = tmp_path / "config.json"
    file.write_bytes(content)
    assert main(["plan", str(file), "--gpus", "8xH200"]) == 2
    error = capsys.readouterr().err
    assert message in error and error.count("\n") == 1
