"""`undertow convert` as a command: what it says, and what it exits with."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from tests.checkpoint.release import tiny, write_release
from undertow.cli import convert, main


@pytest.fixture
def source(tmp_path: Path) -> Path:
    write_release(tmp_path / "source", tiny())
    return tmp_path / "source"


def test_a_conversion_says_what_it_did(source: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    words = ["convert", str(source), str(tmp_path / "made"), "--to", "transformers", "--verify"]
    assert main(words) == 0
    lines = capsys.readouterr().out.splitlines()
    assert lines[0] == f"read {source}: released names"
    assert lines[1].startswith(f"wrote {tmp_path / 'made'}: transformers names, ")
    assert "196 tensors of scales are kept in scales.safetensors" in lines[2]
    assert lines[-1] == "verified: sums and numbers agree with the source"
    assert main(words) == 0
    assert "2 of 2 files were finished before" in capsys.readouterr().out


def test_a_dry_run_writes_nothing(source: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["convert", str(source), str(tmp_path / "made"), "--dtype", "bf16", "--dry-run"]) == 0
    assert f"would write {tmp_path / 'made'}: released names, 308 tensors" in capsys.readouterr().out
    assert [path.name for path in tmp_path.iterdir()] == ["source"]


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["--to", "gguf"], "Invalid value for '--to'"),
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
    assert " MB/s, " in line and line.endswith("s left") and "of 0.00 GB" in line


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
