"""Nodes as directory trees of what the kernel tells, from a line `path: content` for each file."""

from pathlib import Path

import pytest

NODES = Path(__file__).parent / "nodes"


@pytest.fixture
def node(tmp_path):
    """`node(name)` is a directory with `sys` and `proc` of that node; `changes` replace text in its lines."""

    def build(name: str, **changes: str) -> Path:
        lines = (NODES / f"{name}.txt").read_text()
        for old, new in changes.items():
            lines = lines.replace(old, new)
        for line in lines.splitlines():
            path, _, content = line.partition(": ")
            place = tmp_path / path
            place.parent.mkdir(parents=True, exist_ok=True)
            place.write_text(content.replace("\\n", "\n") + "\n")
        return tmp_path

    return build
