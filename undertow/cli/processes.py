"""Processes of one run on this machine: started, watched and ended by torch's own launcher, used as a library."""

from __future__ import annotations

import logging
import os
import signal
import sys
import uuid
from collections.abc import Sequence

import typer

INTERRUPTED = 130
_GRACE = "600"
"""Seconds that an interrupted run may take for its last step and checkpoint before it is killed."""


def start(words: Sequence[str], processes: int) -> None:
    """Run `undertow WORDS` in so many processes, ranks of one run, and return when all have ended well.

    Raises `typer.Exit` with the code of the rank that failed first, or with 130 after Ctrl-C or SIGTERM, which every
    process gets. What a rank met it has told itself; one that a signal ended is named here.
    """
    os.environ.setdefault("TORCH_ELASTIC_SHUTDOWN_TIMEOUT", _GRACE)
    # Each process would take all cores for itself.
    os.environ.setdefault("OMP_NUM_THREADS", str(max(1, (os.cpu_count() or 1) // processes)))
    from torch.distributed.elastic.multiprocessing.api import SignalException
    from torch.distributed.elastic.multiprocessing.errors import ChildFailedError
    from torch.distributed.launcher.api import LaunchConfig, elastic_launch

    for name in [each for each in logging.root.manager.loggerDict if each.startswith("torch.distributed.elastic")]:
        logging.getLogger(name).setLevel(logging.CRITICAL)
    config = LaunchConfig(
        min_nodes=1,
        max_nodes=1,
        nproc_per_node=processes,
        run_id=uuid.uuid4().hex,
        rdzv_backend="c10d",
        rdzv_endpoint="localhost:0",
        max_restarts=0,
    )
    try:
        elastic_launch(config, sys.executable)("-u", "-m", "undertow", *words)
    except ChildFailedError as error:
        raise typer.Exit(code_of({each.local_rank: each.exitcode for each in error.failures.values()})) from None
    except SignalException:
        raise typer.Exit(INTERRUPTED) from None


def code_of(codes: dict[int, int]) -> int:
    """The exit code of a run whose ranks ended with these; a rank that a signal ended is told."""
    # SIGTERM, and 130 after it, come from the launcher, once another has failed.
    ended = {rank: code for rank, code in sorted(codes.items()) if code < 0 and -code != signal.SIGTERM}
    for rank, code in ended.items():
        print(f"error: rank {rank} was ended by {signal.Signals(-code).name}", file=sys.stderr)
    told = [code for code in codes.values() if code > 0 and code != INTERRUPTED]
    if told or ended:
        return told[0] if told else 1
    return INTERRUPTED if INTERRUPTED in codes.values() else 1
