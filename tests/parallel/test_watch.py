"""Ranks that sleep, stop, die or fail: what the others say, and with what code they end."""

import multiprocessing
import os
import re
import signal
import sys
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from datetime import timedelta
from multiprocessing.connection import Connection
from typing import NamedTuple

import pytest
import torch
import torch.distributed as dist

from undertow.config.errors import InputError, UndertowError
from undertow.parallel.watch import watched

TIMEOUT = 3.0
LONGER = {"dies": 6.0, "fails": 20.0, "slow": 5.0}
BOUND = TIMEOUT + 12.0  # seconds from the beginning of a case on a busy machine
pytestmark = [pytest.mark.multi, pytest.mark.xdist_group("watch")]


def _exchange(group: dist.ProcessGroup) -> None:
    dist.all_reduce(torch.ones(4), group=group)


def _meet(rank: int, world: int, port: int) -> dist.ProcessGroup:
    store = dist.TCPStore("127.0.0.1", port, is_master=False)
    dist.init_process_group("gloo", store=store, rank=rank, world_size=world, timeout=timedelta(seconds=60))
    return dist.new_group(group_desc="mesh_expert")


def _rank(rank: int, world: int, port: int, pipe: Connection, what: str, timeout: float) -> None:
    torch.set_num_threads(1)
    group, steps = _meet(rank, world, port), [0]
    dist.barrier()
    try:
        with watched(timeout, lambda: steps[0], tell=lambda sentence: pipe.send((rank, sentence))):
            if (rank, what) == (1, "slow"):
                _compute(1.3 * timeout)
            for _ in range(4):
                _exchange(group)
                steps[0] += 1
            pipe.send((rank, "ready"))
            if rank == (0 if what == "first stops" else 1):
                time.sleep(1.5)  # until a beat has told of step 5
                _misbehave(what, timeout)
            _exchange(group)
            if what == "crossed":
                dist.all_reduce(torch.ones(1), group=[group, dist.group.WORLD][rank])
    except UndertowError as error:
        pipe.send((rank, str(error)))
        sys.exit(error.exit_code)


def _compute(seconds: float) -> None:
    until = time.monotonic() + seconds
    while time.monotonic() < until:
        sum(range(1000))


def _misbehave(what: str, timeout: float) -> None:
    if what == "sleeps":
        time.sleep(600)
    elif what == "slow":
        time.sleep(0.3 * timeout)
    elif what in ("stops", "first stops"):
        os.kill(os.getpid(), signal.SIGSTOP)
    elif what == "dies":
        os.kill(os.getpid(), signal.SIGKILL)
    elif what == "fails":
        raise InputError("train.steps 0: allowed: at least 1; give more")


class Outcome(NamedTuple):
    """What ranks said, their exit codes, and the seconds until all were at an end."""

    said: list[tuple[int, str]]
    codes: list[int | None]
    seconds: float


def _run(what: str, world: int = 2) -> Outcome:
    store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    context = multiprocessing.get_context("forkserver")
    pipes = [context.Pipe(duplex=False) for _ in range(world)]
    given = [(rank, world, store.port, pipes[rank][1], what, LONGER.get(what, TIMEOUT)) for rank in range(world)]
    ranks = [context.Process(target=_rank, args=arguments) for arguments in given]
    for process in ranks:
        process.start()
    for _, theirs in pipes:
        theirs.close()
    assert [ours.recv() for ours, _ in pipes] == [(rank, "ready") for rank in range(world)]
    begun = time.monotonic()
    for process in ranks:
        process.join(BOUND)
    seconds, codes = time.monotonic() - begun, [process.exitcode for process in ranks]
    for process in ranks:
        process.kill()
        process.join()
    return Outcome([sentence for ours, _ in pipes for sentence in _rest(ours)], codes, seconds)


def _rest(pipe: Connection) -> Iterator[tuple[int, str]]:
    with suppress(EOFError):
        while True:
            yield pipe.recv()


@pytest.fixture(scope="module")
def outcomes() -> dict[str, Outcome]:
    """Four cases at a time: they wait more than they work."""
    multiprocessing.get_context("forkserver").set_forkserver_preload(["undertow.parallel.watch", __name__])
    ranks = {"slow": 2, "sleeps": 3, "stops": 2, "dies": 2, "crossed": 2, "fails": 2, "first stops": 2}
    with ThreadPoolExecutor(4) as pool:
        return dict(zip(ranks, pool.map(_run, ranks.keys(), ranks.values()), strict=True))


def test_a_rank_that_sleeps_is_named_with_the_collective_that_the_others_wait_in(outcomes):
    said, codes, seconds = outcomes["sleeps"]
    assert codes == [1, 1, 1] and seconds < BOUND
    ((rank, sentence),) = said
    assert rank == 0
    head, others, mend = sentence.split("; ")
    assert head.startswith("rank 1 of 3 did not move for 3 s, outside any collective: in step 5, ")
    assert head.endswith(", after all_reduce number 4 of group expert")
    assert others.startswith("ranks 0, 2 wait in all_reduce number 5 of group expert, step 5, ")
    assert mend == "lengthen parallel.timeout, 3 s, if that may take longer"


def test_a_stopped_rank_is_named(outcomes):
    said, codes, seconds = outcomes["stops"]
    assert codes == [1, -signal.SIGKILL] and seconds < BOUND
    ((rank, sentence),) = said
    assert rank == 0
    lost = r"rank 1 of 2 gave no sign of life for [2-5] s: stopped, dead or cut off; last seen in step 5, "
    assert re.match(lost, sentence)
    assert "4 of group expert; rank 0 waits in all_reduce number 5 of group expert" in sentence


def test_the_next_rank_judges_where_the_first_is_silent(outcomes):
    said, codes, seconds = outcomes["first stops"]
    assert codes == [-signal.SIGKILL, 1] and seconds < BOUND + TIMEOUT
    ((rank, sentence),) = said
    assert rank == 1
    assert sentence.startswith("rank 0 of 2 gave no sign of life for ")
    assert "; rank 1 waits in all_reduce number 5 of group expert" in sentence


def test_a_dead_rank_is_named(outcomes):
    said, codes, seconds = outcomes["dies"]
    assert codes == [1, -signal.SIGKILL] and seconds < BOUND
    ((rank, sentence),) = said
    assert rank == 0
    assert re.match(r"rank 1 of 2 gave no sign of life for [3-6] s: .*; last seen in step 5, ", sentence)


def test_ranks_that_wait_for_each_other_are_named(outcomes):
    said, codes, _ = outcomes["crossed"]
    assert codes == [1, 1]
    ((_, sentence),) = said
    assert sentence.startswith("all ranks wait for each other for 3 s: rank 0 waits in all_reduce number 6 of group ex")
    assert "; rank 1 waits in all_reduce number 2 of all ranks, step 5" in sentence


def test_the_error_of_a_rank_ends_the_others_without_a_word(outcomes):
    said, codes, _ = outcomes["fails"]
    assert codes == [2, 2]
    assert said == [(1, "train.steps 0: allowed: at least 1; give more")]


def test_a_slow_rank_is_waited_for_and_one_that_computes_before_its_first_step(outcomes):
    assert outcomes["slow"][:2] == ([], [0, 0])
