"""A standing gang of ranks: processes that start once, talk over gloo and run the functions that are sent to them.

Starting Python and torch costs seconds a rank, a function on a gang that stands costs milliseconds.
"""

from __future__ import annotations

import faulthandler
import multiprocessing
import os
import pickle
import re
import signal
import time
import traceback
from collections.abc import Callable
from datetime import timedelta
from multiprocessing.connection import Connection, wait
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import torch
import torch.distributed as dist

STARTS = 120.0  # seconds that the ranks may take to import torch and to find each other on a busy machine
SERVED = 40  # functions that the ranks carry out: the groups that these make keep threads, hundreds after a while
GRACE = 2.0  # seconds that the others have to answer once a rank has failed


class RankError(AssertionError):
    """A rank raised, died or was silent; the message begins with its number."""


def _serve(rank: int, world: int, port: int, pipe: Connection, stack: str) -> None:
    torch.set_num_threads(1)
    store = dist.TCPStore("127.0.0.1", port, is_master=False, timeout=timedelta(seconds=STARTS))
    with open(stack, "w") as file:
        faulthandler.register(signal.SIGUSR1, file=file, all_threads=False)
        while True:
            try:
                message = pipe.recv_bytes()
            except EOFError:
                return
            try:
                answer = (True, _carry_out(message, rank, world, store))
                sent = pickle.dumps(answer)
            except Exception:
                sent = pickle.dumps((False, traceback.format_exc()))
            pipe.send_bytes(sent)


def _carry_out(message: bytes, rank: int, world: int, store: dist.Store) -> Any:
    function, arguments, keywords = pickle.loads(message)
    if function is not None:
        return function(*arguments, **keywords)
    if dist.is_initialized():
        dist.destroy_process_group()
    # A name of its own for each gathering: what an interrupted function left unpaired is never read.
    fresh = dist.PrefixStore(f"gathering {arguments[0]}", store)
    dist.init_process_group("gloo", store=fresh, rank=rank, world_size=world, timeout=timedelta(seconds=STARTS))
    return rank


class Gang:
    """`world` ranks, started at the first `run`; after a failure the next `run` finds them in order again."""

    def __init__(self, world: int):
        self.world = world
        self._folder = TemporaryDirectory(prefix="gang-")
        self._store: dist.TCPStore | None = None
        self._processes: list[Any] = []
        self._pipes: list[Connection] = []
        self._gatherings, self._gathered, self._served = 0, False, 0

    def run(self, function: Callable[..., Any], *arguments: Any, seconds: float = 180.0, **keywords: Any) -> list[Any]:
        """What `function(*arguments, **keywords)` returns on each rank, in their order.

        The function is found by its name in its module, arguments and results are copied. Raises `RankError` with the
        traceback of the rank that failed first, for a rank that died, and for ranks silent for longer than `seconds`.
        """
        if self._served >= SERVED:
            self.close()
        self._served += 1
        if not self._processes:
            self._start()
        if not self._gathered:
            self._gatherings += 1
            self._everyone((None, (self._gatherings,), {}), STARTS)
            self._gathered = True
        return self._everyone((function, arguments, keywords), seconds)

    @property
    def pids(self) -> list[int]:
        """Process numbers of the ranks that stand."""
        return [process.pid for process in self._processes]

    def _start(self) -> None:
        self._store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
        spawn = multiprocessing.get_context("spawn")
        for rank in range(self.world):
            ours, theirs = spawn.Pipe()
            arguments = (rank, self.world, self._store.port, theirs, self._stack(rank))
            process = spawn.Process(target=_serve, args=arguments, daemon=True)
            process.start()
            theirs.close()
            self._processes.append(process)
            self._pipes.append(ours)

    def _stack(self, rank: int) -> str:
        return os.path.join(self._folder.name, f"rank{rank}.stack")

    def _everyone(self, message: tuple[Any, ...], seconds: float) -> list[Any]:
        sent = pickle.dumps(message)
        for rank, pipe in enumerate(self._pipes):
            try:
                pipe.send_bytes(sent)
            except OSError:
                self._fail(self._death(rank))
        answers: dict[int, Any] = {}
        failure, until = "", time.monotonic() + seconds
        while len(answers) < self.world:
            waiting = [pipe for rank, pipe in enumerate(self._pipes) if rank not in answers]
            ready = wait(waiting, max(0.0, until - time.monotonic()))
            if not ready:
                self._fail(failure or self._silence(answers, seconds))
            for pipe in ready:
                rank = self._pipes.index(pipe)
                try:
                    fine, answers[rank] = pickle.loads(pipe.recv_bytes())
                except (EOFError, OSError):
                    self._fail("\n".join(filter(None, (self._death(rank), failure))))
                if not fine and not failure:
                    failure, until = f"rank {rank} of {self.world} raised\n{answers[rank]}", time.monotonic() + GRACE
        if failure:
            self._gathered = False
            raise RankError(failure)
        return [answers[rank] for rank in range(self.world)]

    def _fail(self, failure: str) -> None:
        self.close()
        raise RankError(failure)

    def _death(self, rank: int) -> str:
        self._processes[rank].join(GRACE)
        return f"rank {rank} of {self.world} died with exit code {self._processes[rank].exitcode}"

    def _silence(self, answers: dict[int, Any], seconds: float) -> str:
        """Who did not answer and where they are: those that wait in a collective come last, they wait for others."""
        late = [rank for rank in range(self.world) if rank not in answers]
        for rank in late:
            os.kill(self._processes[rank].pid, signal.SIGUSR1)
        stacks, until = [Path(self._stack(rank)) for rank in late], time.monotonic() + GRACE
        while time.monotonic() < until and not all(stack.stat().st_size for stack in stacks):
            time.sleep(0.05)
        time.sleep(0.1)  # a stack is written in pieces
        places = {rank: _place(stack.read_text()) for rank, stack in zip(late, stacks, strict=True)}
        late.sort(key=lambda rank: places[rank].startswith("waits"))
        told = "; ".join(f"rank {rank} of {self.world} {places[rank]}" for rank in late)
        return f"no answer within {seconds:g} s: {told}"

    def close(self) -> None:
        """End the ranks; a later `run` starts others."""
        for pipe in self._pipes:
            pipe.close()
        for process in self._processes:
            process.kill()
        for process in self._processes:
            process.join()
        self._processes, self._pipes, self._store, self._gathered, self._served = [], [], None, False, 0


def _place(stack: str) -> str:
    frames = re.findall(r'File "(.+)", line (\d+) in (\S+)', stack)
    if not frames:
        return "is silent, outside Python or stopped"
    ours = next((frame for frame in frames if "/torch/" not in frame[0]), frames[-1])
    where = f"{ours[2]} ({os.path.basename(ours[0])}:{ours[1]})"
    inside = [frame for frame in frames if "/torch/distributed/" in frame[0]]
    return f"waits in {inside[0][2]}, called by {where}" if inside else f"is silent in {where}"
