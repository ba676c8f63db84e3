"""Files of users are read without waiting for a pipe, and to a bound."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from undertow.config.clusters import read_gpus
from undertow.config.errors import ConfigError
from undertow.config.model import ModelConfig
from undertow.config.reading import read_regular
from undertow.planner.calibration.file import read_calibration, read_measurements

READERS = {
    "GPUs": lambda path: read_gpus(path, {}),
    "calibration": read_calibration,
    "measurements": read_measurements,
    "model": lambda path: ModelConfig.from_json(path),
}


def test_a_file_up_to_its_bound(tmp_path: Path):
    file = tmp_path / "a"
    file.write_bytes(b"12345")
    assert read_regular(file, 5) == b"12345"
    with pytest.raises(OSError, match="it is larger than 4 bytes"):
        read_regular(file, 4)


@pytest.mark.parametrize("reader", READERS)
def test_what_is_no_file_is_refused_at_once(tmp_path: Path, reader):
    pipe, large = tmp_path / "pipe.json", tmp_path / "large.json"
    os.mkfifo(pipe)
    large.write_bytes(b" " * ((1 << 20) + 1))
    for path, told in ((pipe, "no regular file"), (Path("/dev/zero"), "no regular file"), (large, "it is larger than")):
        with pytest.raises(ConfigError) as error:
            READERS[reader](path)
        assert told in str(error.value) and "\n" not in str(error.value)
