"""Standard streams that are closed, full or of a narrow encoding."""

from __future__ import annotations

import os
import subprocess
import sys

import pytest


def shell(line: str, **variables: str) -> subprocess.CompletedProcess[str]:
    command = ["bash", "-c", line.replace("undertow", f"{sys.executable} -m undertow")]
    return subprocess.run(
        command, capture_output=True, text=True, check=False, timeout=60, env={**os.environ, **variables}
    )


def test_closed_output_is_a_failure():
    done = shell("undertow config show pretrain/quickstart >&-")
    assert (done.returncode, done.stderr) == (
        1,
        "error: standard output is closed: send it to a file, or to /dev/null\n",
    )


@pytest.mark.skipif(not os.path.exists("/dev/full"), reason="no /dev/full")
def test_full_device_is_one_line():
    done = shell("undertow config show pretrain/quickstart >/dev/full")
    assert (done.returncode, done.stderr) == (1, "error: writing or reading failed: No space left on device\n")


def test_closed_input_asks_for_a_prompt():
    done = shell("undertow generate somewhere <&-")
    assert done.returncode == 2
    assert done.stderr.startswith("error: no prompt: give --prompt TEXT")
    assert done.stderr.count("\n") == 1


def test_input_that_is_no_text():
    done = shell(r"printf 'a\xff' | undertow generate somewhere", PYTHONIOENCODING="utf-8")
    assert (done.returncode, done.stderr) == (2, "error: standard input is not utf-8 text: byte 0xff at 1\n")


def test_narrow_encoding_is_escaped():
    done = shell("undertow config show pretrain/quickstart out=runs/한", PYTHONIOENCODING="latin-1")
    assert done.returncode == 0
    assert 'out: "runs/\\ud55c"' in done.stdout


def test_an_empty_model_path():
    done = shell("undertow generate '' --prompt x")
    assert (done.returncode, done.stderr) == (2, "error: the model path is empty: give a model directory\n")
