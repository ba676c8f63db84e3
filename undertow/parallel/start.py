"""The start and the end of a run over processes: they meet, and tell each other what one of them knows."""

from __future__ import annotations

import sys
import traceback
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from datetime import timedelta

import torch
import torch.distributed as dist

from undertow.config.errors import UndertowError
from undertow.config.world import World
from undertow.parallel.recorder import own_store

PATIENCE = 10.0
"""Seconds that a rank waits for the one that tells an error."""


@contextmanager
def met(world: World) -> Iterator[None]:
    """Within the block the processes of `world` are the ranks of torch's default group; they meet where torchrun said.

    What lies on a GPU goes over NCCL (RCCL), what lies in host memory over gloo. An error that leaves the block is told
    by `tell_error`, unless it was, and ends the process with its code. The group then stays as it is, for to end it
    would wait for ranks that are gone.
    """
    on_gpu = world.local_ranks <= torch.cuda.device_count()  # the same on every rank of a machine
    if on_gpu:
        torch.cuda.set_device(world.local_rank)
    backend = "cpu:gloo,cuda:nccl" if on_gpu else "gloo"
    try:
        dist.init_process_group(backend, rank=world.rank, world_size=world.ranks)
    except dist.DistError as error:
        said = str(error).partition("\n")[0]
        raise UndertowError(f"{world}: the ranks could not meet at MASTER_ADDR and MASTER_PORT: {said}") from None
    try:
        yield
    except BrokenPipeError:  # nobody reads on: no fault of the run
        raise
    except Exception as error:
        tell_error(error)
        raise SystemExit(getattr(error, "exit_code", UndertowError.exit_code)) from error
    dist.destroy_process_group()


def tell_error(error: Exception) -> None:
    """Print an error of this rank, naming it, unless one was told; what is no `UndertowError` as a traceback.

    Returns when one is told: the launcher ends all ranks as soon as one of them has ended.
    """
    store = own_store()
    if store.add("failed", 1) > 1:
        with suppress(dist.DistError):  # who tells it is gone
            store.wait(["told"], timedelta(seconds=PATIENCE))
        return
    rank, said = f"rank {dist.get_rank()} of {dist.get_world_size()}", str(error)
    if isinstance(error, UndertowError):
        print(f"error: {said if said.startswith('rank') else f'{rank}: {said}'}", file=sys.stderr, flush=True)
    else:
        print("".join((f"{rank}:\n", *traceback.format_exception(error))), file=sys.stderr, flush=True)
    store.set("told", "")


def tell(text: str | None) -> str | None:
    """What rank 0 calls this with, on every rank."""
    told = torch.tensor(list(b"" if text is None else b"." + text.encode()), dtype=torch.uint8)
    size = torch.tensor([len(told)])
    dist.broadcast(size, 0)
    told = told if dist.get_rank() == 0 else torch.empty(int(size), dtype=torch.uint8)
    if not len(told):
        return None
    dist.broadcast(told, 0)
    return bytes(told.tolist())[1:].decode()


def everyone(text: str) -> list[str]:
    """What each rank calls this with, in their order, on every rank."""
    told = torch.tensor(list(text.encode()), dtype=torch.uint8)
    sizes = list(torch.empty(dist.get_world_size(), 1, dtype=torch.int64).unbind())
    dist.all_gather(sizes, torch.tensor([len(told)]))
    most = int(max(sizes))
    padded = torch.zeros(most, dtype=torch.uint8)
    padded[: len(told)] = told
    found = list(torch.empty(len(sizes), most, dtype=torch.uint8).unbind())
    dist.all_gather(found, padded)
    return [bytes(each[: int(size)].tolist()).decode() for each, size in zip(found, sizes, strict=True)]


def anyone(says: bool) -> bool:
    """Whether any rank says so, the same on every rank."""
    said = torch.tensor([says], dtype=torch.uint8)
    dist.all_reduce(said, dist.ReduceOp.MAX)
    return bool(said)
