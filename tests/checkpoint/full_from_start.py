"""Run on a small file system of its own: a conversion that finds the disk full before its first file."""

from __future__ import annotations

import json
import sys
from pathlib import Path

from tests.small_disk import Ballast
from undertow.checkpoint.convert.conversion import convert
from undertow.checkpoint.convert.target import Wish
from undertow.config.errors import UndertowError


def main(disk: Path, source: str) -> None:
    """Print what the conversion said with no page free, and with all of a file system that is too small."""
    ballast, said = Ballast(disk / "ballast"), []
    for full in (True, False):
        ballast.drop()
        if full:
            ballast.leave(0)
        try:
            convert(source, disk / "place", Wish(precision="bf16"))
        except UndertowError as error:
            said.append(str(error))
        assert [path.name for path in disk.iterdir()] == (["ballast"] if full else []), list(disk.iterdir())
    print(json.dumps(said))


if __name__ == "__main__":
    main(Path(sys.argv[1]), sys.argv[2])
