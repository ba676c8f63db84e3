"""Run on a small file system of its own: saves that meet a full disk at each of their files in turn."""

from __future__ import annotations

import json
import sys
from pathlib import Path

from tests.checkpoint.runs import CURSOR, learned, loaded, same, state_of
from tests.engine.bytelevel import tokenizer
from tests.small_disk import PAGE, Ballast
from undertow.checkpoint.training import Progress, latest_checkpoint, save_checkpoint
from undertow.checkpoint.writer import CheckpointWriter
from undertow.config.errors import UndertowError

WRITTEN = ("model.safetensors", "optimizer.safetensors", "config.json", "progress.json")


def pages(path: Path) -> int:
    return -(-path.stat().st_size // PAGE)


def main(disk: Path) -> None:
    """Print, by the number of free pages, what the save said."""
    folder, ballast = disk / "checkpoints", Ballast(disk / "ballast")
    before = learned(seed=1)
    kept, state = save_checkpoint(folder, *before, Progress(1, 100, CURSOR), tokenizer()), state_of(*before)
    order = [*WRITTEN, *sorted({p.name for p in kept.iterdir()} - set(WRITTEN), reverse=True)]
    room, said = 0, {}
    model, optimizer = learned(seed=2)
    for name in order:
        room += pages(kept / name)
        ballast.leave(room - 1)
        writer = CheckpointWriter(folder, tokenizer(), 1, lambda path: None)
        writer.save(model, optimizer, Progress(2, 200, CURSOR))
        try:
            writer.wait()
            said[name] = "written"
        except UndertowError as error:
            said[name] = f"{error.exit_code} {error}"
        assert latest_checkpoint(folder) == kept and same(loaded(kept)[1], state), name
        assert sorted(p.name for p in folder.iterdir()) == ["latest", "step-1"], name
    ballast.leave(room)  # for the files, not for the new `latest`
    try:
        save_checkpoint(folder, model, optimizer, Progress(2, 200, CURSOR), tokenizer())
    except UndertowError as error:
        said["latest"] = f"{error.exit_code} {error}"
    assert latest_checkpoint(folder) == kept and same(loaded(kept)[1], state)
    assert same(loaded(folder / "step-2")[1], state_of(model, optimizer)), "complete, though not the latest"
    assert sorted(p.name for p in folder.iterdir()) == ["latest", "step-1", "step-2"]
    ballast.drop()
    last = save_checkpoint(folder, model, optimizer, Progress(2, 200, CURSOR), tokenizer())
    assert latest_checkpoint(folder) == last and same(loaded(last)[1], state_of(model, optimizer))
    assert sorted(p.name for p in folder.iterdir()) == ["latest", "step-1", "step-2"]
    print(json.dumps(said))


if __name__ == "__main__":
    main(Path(sys.argv[1]))
