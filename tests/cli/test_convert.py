"""`undertow convert` as a command: what it says, and what it exits with."""

from __future__ import annotations

import os
import re
import signal
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from tests.checkpoint.release import tiny, write_release
from undertow.checkpoint.directory import load_model
from undertow.cli import convert, main
from undertow.config.errors import InputError


@pytest.fixture
def source(tmp_path: Path) -> Path:
    write_release(tmp_path / "source", tiny())
    return tmp_path / "source"


def test_a_conversion_says_what_it_did(source: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    words = ["convert", str(source), str(tmp_path / "made"), "--to", "transformers", "--verify"]
    assert main(words) == 0
    lines = capsys.readouterr().out.splitlines()
    assert lines[0] == f"read {source}: released names"
    assert re.fullmatch(r"wrote .*/made: transformers names, \d+ tensors, 11\.89 MB in 2 files", lines[1])
    assert "196 tensors of scales are kept in scales.safetensors" in lines[2]
    assert lines[-1] == "verified: sums and numbers agree with the source"
    for extra in ([], ["--dry-run"]):
        assert main([*words, *extra]) == 0
        again = capsys.readouterr().out
        assert f"\nfinished already: {tmp_path / 'made'}: transformers names, " in again
        assert "wrote" not in again and "would write" not in again and "finished before" not in again


def test_kept_scales_may_be_deleted(source: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    words, made = ["convert", str(source), str(tmp_path / "made"), "--dtype", "bf16"], tmp_path / "made"
    assert main(words) == 0
    scales = (made / "scales.safetensors").read_bytes()
    (made / "scales.safetensors").unlink()
    subprocess.run(["sha256sum", "--quiet", "-c", "SHA256SUMS"], cwd=made, check=True)
    for extra in ([], ["--verify"], ["--dry-run"]):
        capsys.readouterr()
        assert main([*words, *extra]) == 0
        said = capsys.readouterr().out
        assert f"finished already: {made}: " in said and "are kept" not in said
        assert "\nscales.safetensors is gone: the way back makes new scales, whose bytes may differ\n" in said
    (made / "scales.safetensors").write_bytes(bytes([scales[0] ^ 1]) + scales[1:])
    assert main(words) == 0
    assert "196 tensors of scales are kept" in capsys.readouterr().out
    assert main([*words, "--verify"]) == 1
    assert "/made/scales.safetensors: its SHA-256 is " in capsys.readouterr().err


def test_sizes_are_in_the_unit_that_shows_them() -> None:
    assert [convert._size(count) for count in (0, 4_560_000, 999_990_000, 10**9, 160_123_000_000)] == [
        "0.00 MB", "4.56 MB", "999.99 MB", "1.00 GB", "160.12 GB",
    ]  # fmt: skip


def test_another_shard_size_than_that_of_a_finished_target_is_named(
    source: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    words = ["convert", str(source), str(tmp_path / "made")]
    assert main([*words, "--shard-bytes", "100000"]) == 0
    before = {path: path.stat().st_mtime_ns for path in (tmp_path / "made").iterdir()}
    capsys.readouterr()
    assert main([*words, "--shard-bytes", "200000"]) == 2
    assert capsys.readouterr().err == (
        f"error: {tmp_path / 'made'}: holds a conversion with another --shard-bytes, which cut its files otherwise; "
        "give what it was made with, or name a new directory\n"
    )
    assert before == {path: path.stat().st_mtime_ns for path in (tmp_path / "made").iterdir()}
    assert main([*words, "--shard-bytes", "100000"]) == 0
    assert "finished already" in capsys.readouterr().out


def test_only_what_changes_is_called_rounded(source: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    plain, back, fp8, changed = (str(tmp_path / name) for name in ("plain", "back", "fp8", "changed"))
    assert main(["convert", str(source), plain, "--dtype", "bf16"]) == 0
    assert main(["convert", plain, back, "--dtype", "fp4", "--dry-run"]) == 0
    assert "196 tensors may be rounded: their new type holds fewer bits" in capsys.readouterr().out
    assert main(["convert", plain, back, "--dtype", "fp4"]) == 0
    assert "rounded" not in capsys.readouterr().out
    file = tmp_path / "plain" / "model-00001-of-00001.safetensors"
    tensors = load_file(file)
    tensors["layers.0.attn.wq_a.weight"][0, 0] = 1.2345678
    save_file(tensors, file)
    for _ in range(2):  # the second time it is finished already
        assert main(["convert", plain, changed, "--dtype", "fp4"]) == 0
        assert "\n1 tensors are rounded: their new type holds fewer bits\n" in capsys.readouterr().out
    assert main(["convert", str(source), fp8, "--dtype", "fp8"]) == 0
    assert "rounded" not in capsys.readouterr().out


@pytest.mark.parametrize("name", ["loop", "dangling", "model.pt"])
def test_a_source_that_is_no_directory(name: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "loop").symlink_to("loop")
    (tmp_path / "dangling").symlink_to("elsewhere")
    torch.save({"embed.weight": torch.ones(2)}, tmp_path / "model.pt")
    said = {
        "loop": "is a loop of symbolic links; a model directory",
        "dangling": "is a symbolic link to elsewhere, which is absent; a model directory",
        "model.pt": "is a pickle; pickles are never read, since they can run programs; load it with what wrote it and",
    }[name]
    for words in (["convert", str(tmp_path / name), str(tmp_path / "made")], ["convert", str(tmp_path / name), "x"]):
        assert main(words) == 2
        output = capsys.readouterr().err
        assert f"error: {tmp_path / name}: {said}" in output and output.count("\n") == 1
    with pytest.raises(InputError, match=said.partition(";")[0]):
        load_model(tmp_path / name)


def test_a_target_that_is_a_loop(source: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "loop").symlink_to("loop")
    assert main(["convert", str(source), str(tmp_path / "loop")]) == 2
    assert "is a loop of symbolic links; name a new directory" in capsys.readouterr().err
    assert sorted(path.name for path in tmp_path.iterdir()) == ["loop", "source"]


def test_a_dry_run_writes_nothing(source: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["convert", str(source), str(tmp_path / "made"), "--dtype", "bf16", "--dry-run"]) == 0
    assert f"would write {tmp_path / 'made'}: released names, 308 tensors" in capsys.readouterr().out
    assert [path.name for path in tmp_path.iterdir()] == ["source"]


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["--to", "gguf"], "Invalid value for '--to'"),
        (["--dtype", "int4"], "error: Invalid value for '--dtype': 'int4' is not one of 'fp32', 'bf16', "),
        (["--dtype", "fp8", "--to", "undertow"], "FP8 and FP4 have released names alone"),
        (["--shard-bytes", "0"], "shard size 0"),
    ],
)
def test_wrong_options(
    words: list[str], message: str, source: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["convert", str(source), str(tmp_path / "made"), *words]) == 2
    output = capsys.readouterr()
    assert message in output.err and output.err.count("\n") == 1
    assert [path.name for path in tmp_path.iterdir()] == ["source"]


def test_log_lines_where_there_is_no_terminal(
    source: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(convert, "_LINE", 0.0)
    assert main(["convert", str(source), str(tmp_path / "made"), "--shard-bytes", "100000"]) == 0
    line = capsys.readouterr().err.splitlines()[-1]
    assert " MB/s, " in line and line.endswith("s left") and re.search(r" of \d+\.\d\d MB, ", line)


def test_a_request_to_end_keeps_what_is_finished(source: Path, tmp_path: Path) -> None:
    program = (
        "import os, signal, sys\n"
        "from undertow.checkpoint.convert import writing\n"
        "from undertow.cli import main\n"
        "made, write = [], writing.write_file\n"
        "from undertow.checkpoint.convert import conversion\n"
        "def after_three(*words):\n"
        "    if len(made) == 3: os.kill(os.getpid(), signal.SIGTERM)\n"
        "    made.append(1)\n"
        "    return write(*words)\n"
        "conversion.write_file = after_three\n"
        "sys.exit(main(['convert', *sys.argv[1:], '--shard-bytes', '50000']))\n"
    )
    words = [str(source), str(tmp_path / "made")]
    done = subprocess.run([sys.executable, "-c", program, *words], capture_output=True, text=True, env=os.environ)
    assert done.returncode == 130 and "the same command goes on" in done.stderr and "Traceback" not in done.stderr
    assert main(["convert", *words, "--shard-bytes", "50000", "--verify"]) == 0
    assert signal.getsignal(signal.SIGTERM) is signal.SIG_DFL
