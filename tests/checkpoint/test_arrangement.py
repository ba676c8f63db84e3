"""Who writes which rows of what file: each row once, by one who holds it, and none is forgotten."""

from __future__ import annotations

import pytest
import torch
from safetensors.torch import load_file

from undertow.checkpoint.arrangement import Holding, arrange
from undertow.checkpoint.header import read_header
from undertow.checkpoint.joint import _write
from undertow.config.errors import UndertowError

ORDER = ("a", "b")
WHOLE = {
    ("model", "a"): torch.arange(20.0).view(5, 4),
    ("model", "b"): torch.arange(6, dtype=torch.int64),
    ("optimizer", "a/moment"): torch.arange(20).view(5, 4).to(torch.bfloat16),
    ("optimizer", "a/step"): torch.tensor(3.0),
    ("optimizer", "random/cpu"): torch.arange(7, dtype=torch.uint8),
}
TYPES = {torch.float32: "F32", torch.bfloat16: "BF16", torch.int64: "I64", torch.uint8: "U8"}


def holding(key, first=0, rows=None):
    whole = WHOLE[key]
    shape = tuple(whole.shape)
    return Holding(*key, TYPES[whole.dtype], first, (shape[0] if shape else 1) if rows is None else rows, shape)


def three_ranks():
    """`a` and its moment lie in uneven parts, the third rank has none of them; the rest is on all."""
    repeated = [holding(key) for key in WHOLE if key[1] in ("b", "a/step")]
    parts = [("model", "a"), ("optimizer", "a/moment")]
    return [
        [holding(key, *rows) for key in parts] + repeated + ([holding(("optimizer", "random/cpu"))] if first else [])
        for first, rows in ((True, (0, 3)), (False, (3, 2)), (False, (5, 0)))
    ]


@pytest.mark.parametrize(("shard_bytes", "files"), [(10**9, 2), (1, 5)])
def test_ranks_fill_the_files(tmp_path, shard_bytes, files):
    found = arrange(three_ranks(), ORDER, shard_bytes)
    assert len(found.files) == files and len(found.indices) == (2 if files > 2 else 0)
    for name, (head, size) in found.files.items():
        (tmp_path / name).write_bytes(head + bytes(size - len(head)))
        read_header(tmp_path / name)
    held = {0: slice(0, 3), 1: slice(3, 5), 2: slice(5, 5)}
    for rank, tasks in enumerate(found.tasks):
        parts = {key: whole[held[rank]] if whole.dim() == 2 else whole for key, whole in WHOLE.items()}
        _write(tmp_path, tasks, {(task.stem, task.name): parts[task.stem, task.name] for task in tasks})
    read = {}
    for name in found.files:
        read |= {
            (name.partition("-")[0].partition(".")[0], key): value for key, value in load_file(tmp_path / name).items()
        }
    assert read.keys() == WHOLE.keys() and all(torch.equal(read[key], WHOLE[key]) for key in WHOLE)
    assert found.optimizer == ["a/moment", "a/step", "random/cpu"]


def test_what_all_hold_is_written_once_by_who_has_least():
    tasks = arrange(three_ranks(), ORDER).tasks
    names = [sorted(task.name for task in each) for each in tasks]
    assert names == [["a", "a/moment", "random/cpu"], ["a", "a/moment", "a/step"], ["b"]]


@pytest.mark.parametrize(
    ("ranks", "said"),
    [
        ([[holding(("model", "a"), 0, 2), holding(("model", "b"))]], r"a: the ranks hold 2 of 5 rows"),
        (
            [[holding(("model", "a"), 0, 2), holding(("model", "a"), 3, 2), holding(("model", "b"))]],
            "up to 2 and from 3",
        ),
        (
            [[holding(("model", "a"), 0, 3), holding(("model", "a"), 2, 3), holding(("model", "b"))]],
            "up to 3 and from 2",
        ),
        ([[holding(("model", "a"))]], r"1 tensors \(b\) are held by no rank"),
        (
            [[holding(("model", "a"))], [holding(("model", "a"))._replace(dtype="F64")]],
            "a: rank 1 holds F64 of .5, 4., another rank F32",
        ),
    ],
)
def test_rows_that_nobody_or_two_would_write(ranks, said):
    with pytest.raises(UndertowError, match=said):
        arrange(ranks, ORDER)
