"""Run as a program: several ranks save together, and one of them ends at a moment, or the disk is full.

Ranks are forked from a process that has imported all they need, so that many moments take little time.
"""

from __future__ import annotations

import json
import os
import signal
import sys
import time
from collections.abc import Callable
from datetime import timedelta
from pathlib import Path

import torch
import torch.distributed as dist

from tests.parallel.checkpoints import Run
from tests.small_disk import Ballast
from undertow.checkpoint.agreement import Agreement
from undertow.checkpoint.training import Progress, latest_checkpoint
from undertow.checkpoint.writer import CheckpointWriter
from undertow.config.errors import UndertowError

LAYOUT, RANKS = "EP2 x FSDP2", 4
FINE, TOLD, BROKEN = 0, 17, 18
LIMIT = 60.0  # seconds for the ranks to end


def count_events(stop_at: int | None) -> list[int]:
    """Count from now on what writing asks of the system, of files and of other ranks; end by a kill at one of them."""
    seen = [0]

    def counted(function: Callable) -> Callable:
        def call(*given, **named):
            if seen[0] == stop_at:
                os.kill(os.getpid(), signal.SIGKILL)
            seen[0] += 1
            return function(*given, **named)

        return call

    for name in ("pwrite", "fsync", "pread", "rename", "replace", "open"):
        setattr(os, name, counted(getattr(os, name)))
    Agreement.exchange = counted(Agreement.exchange)  # type: ignore[method-assign]
    return seen


def save(rank: int, folder: Path, step: int, meeting: Path, stop_at: int | None) -> tuple[int, int]:
    """Save a checkpoint beside the training; how it ended, and how many events there were."""
    torch.set_num_threads(1)
    store = dist.FileStore(str(meeting), RANKS)
    dist.init_process_group("gloo", store=store, rank=rank, world_size=RANKS, timeout=timedelta(seconds=LIMIT))
    run = Run(LAYOUT, True)
    try:
        with CheckpointWriter(folder, None, None, lambda path: None, run.mesh) as writer:
            seen = count_events(stop_at)
            writer.save(run.model, run.optimizer, Progress(step, 300, {"epoch": 1}))
    except UndertowError as error:
        print(f"rank {rank}: {error}", file=sys.stderr)
        return TOLD, 0
    return FINE, seen[0]


def all_ranks(folder: Path, step: int, victim: int | None = None, stop_at: int | None = None) -> tuple[list[int], int]:
    """Save with all ranks, forked from here; how each ended, and the events that the victim had."""
    meeting, counts = folder.parent / f"meeting-{time.monotonic_ns()}", folder.parent / "count"
    children = []
    for rank in range(RANKS):
        child = os.fork()
        if child == 0:
            code = BROKEN
            try:
                code, events = save(rank, folder, step, meeting, stop_at if rank == victim else None)
                if rank == victim:
                    counts.write_text(str(events))
            finally:
                os._exit(code)
        children.append(child)
    codes, until = [], time.monotonic() + LIMIT
    for child in children:
        while not (found := os.waitpid(child, os.WNOHANG))[0]:
            if time.monotonic() > until:
                raise AssertionError(f"a rank is silent after {LIMIT:g} s")
            time.sleep(0.01)
        codes.append(os.waitstatus_to_exitcode(found[1]))
    return codes, int(counts.read_text()) if counts.exists() else 0


def check_latest(folder: Path, steps: tuple[int, ...]) -> int:
    """Load the latest checkpoint in this process; its step, which must be one of `steps`."""
    path = latest_checkpoint(folder)
    assert path is not None
    run = Run("one process", False)
    progress = run.load(path)
    assert run.differences() == [] and progress.step in steps, (progress, run.differences()[:3])
    return progress.step


def killed(folder: Path, victim: int, moments: int) -> list[dict]:
    """Kill a rank at so many moments, evenly over its events; what happened at each."""
    assert all_ranks(folder, 3)[0] == [FINE] * RANKS
    codes, events = all_ranks(folder, 4, victim)
    assert codes == [FINE] * RANKS and events > 20
    found, last = [], 4
    for i in range(moments):
        step = last + 1
        begun = time.monotonic()
        codes, _ = all_ranks(folder, step, victim, int((i + 0.5) * events / moments))
        took = time.monotonic() - begun
        assert codes[victim] == -signal.SIGKILL
        named = (folder / f"step-{step}").exists()
        latest = check_latest(folder, (last, step))
        others = [code for rank, code in enumerate(codes) if rank != victim]
        assert named or others == [TOLD] * (RANKS - 1), (codes, named)
        found.append({"event": int((i + 0.5) * events / moments), "named": named, "latest": latest, "took": took})
        last = step + 1
        assert all_ranks(folder, last)[0] == [FINE] * RANKS and check_latest(folder, (last,)) == last
        assert not [path.name for path in folder.iterdir() if path.name.startswith(".")]
    return found


def full(folder: Path) -> list[dict]:
    """Save where the disk has no room for it."""
    assert all_ranks(folder, 3)[0] == [FINE] * RANKS
    ballast = Ballast(folder.parent / "ballast")
    ballast.leave(60)
    codes, _ = all_ranks(folder, 4)
    assert codes == [TOLD] * RANKS and check_latest(folder, (3,)) == 3
    assert sorted(path.name for path in folder.iterdir()) == ["latest", "step-3"]
    ballast.drop()
    assert all_ranks(folder, 5)[0] == [FINE] * RANKS
    return [{"latest": check_latest(folder, (5,))}]


if __name__ == "__main__":
    place = Path(sys.argv[1]) / "checkpoints"
    print(json.dumps(full(place) if sys.argv[2] == "full" else killed(place, int(sys.argv[2]), int(sys.argv[3]))))
