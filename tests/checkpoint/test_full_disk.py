"""A disk that fills up in the middle of a save costs that save alone."""

import json
import re
import resource

import pytest

from tests import small_disk
from tests.checkpoint.runs import CURSOR, learned
from undertow.checkpoint.training import Progress, latest_checkpoint, save_checkpoint
from undertow.config.errors import UndertowError

LINE = r"1 \S+/step-2: the checkpoint cannot be written \(.*No space left on device.*\); earlier ones are intact"


@pytest.mark.skipif(not small_disk.possible(), reason="no file system may be mounted here")
def test_full_at_any_file_of_a_checkpoint(tmp_path):
    result = small_disk.on_small_disk("tests.checkpoint.full_disk", tmp_path, "16m")
    assert result.returncode == 0, result.stderr
    said = json.loads(result.stdout)
    assert list(said) == [
        *("model.safetensors", "optimizer.safetensors", "config.json", "progress.json"),
        *("tokenizer_config.json", "tokenizer.json", "latest"),
    ]
    for name, line in said.items():
        assert re.fullmatch(LINE, line), (name, line)


def test_a_file_that_may_not_grow(tmp_path):
    kept = save_checkpoint(tmp_path, *learned(), Progress(1, 100, CURSOR))
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (100_000, hard))
    try:
        with pytest.raises(UndertowError, match=r"step-2: the checkpoint cannot be written \(.*File too large"):
            save_checkpoint(tmp_path, *learned(), Progress(2, 200, CURSOR))
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
    assert latest_checkpoint(tmp_path) == kept
    assert sorted(path.name for path in tmp_path.iterdir()) == ["latest", "step-1"]
