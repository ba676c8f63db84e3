"""A disk that fills up while a conversion writes costs the file at work alone."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from tests import small_disk
from tests.checkpoint.release import tiny, write_release
from undertow.checkpoint.convert.conversion import convert
from undertow.checkpoint.convert.target import Wish
from undertow.cli import main


@pytest.mark.skipif(not small_disk.possible(), reason="no file system may be mounted here")
@pytest.mark.parametrize("options", [[], ["--dtype", "bf16"]], ids=["copied", "converted"])
def test_full_in_the_middle_of_a_file(options: list[str], tmp_path: Path) -> None:
    source, whole, disk = tmp_path / "source", tmp_path / "whole", tmp_path / "disk"
    write_release(source, tiny())
    report = convert(source, whole, Wish(precision="bf16" if options else None), dry_run=True)
    words = ["--shard-bytes", str(report.size * 2 // 5), *options]  # three files
    assert main(["convert", str(source), str(whole), *words]) == 0
    disk.mkdir()
    result = small_disk.on_small_disk("tests.checkpoint.filling_disk", disk, "48m", str(source), str(whole), *words)
    assert result.returncode == 0, result.stderr
    *said, last = result.stderr.splitlines()
    line = (
        f"error: {disk / 'place'}: cannot be written (No space left on device); what is finished is kept, the same "
        "command goes on from there"
    )
    assert said == [line] * 3
    files = sorted(path.name for path in whole.glob("*.safetensors"))
    for found in json.loads(last):
        before = [name for name in files if name < found["at"]]
        assert found["kept"] == before and found["code"] == 1
        assert found["there"] == [".place.converting", ".place.journal"]
    assert len({found["at"] for found in json.loads(last)}) == 3
