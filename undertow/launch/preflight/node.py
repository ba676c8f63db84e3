"""What a node lets processes have, and which drivers it runs."""

from __future__ import annotations

import os
import re
import resource
from pathlib import Path
from typing import Any

from undertow.launch.preflight.network import text

SHARED = 2**30
"""Bytes of /dev/shm below which processes of one node may fail to exchange; containers often have 64 MiB."""


def drivers(sys: Path = Path("/sys"), proc: Path = Path("/proc")) -> dict[str, str]:
    """Version of each GPU driver that is loaded, by its name."""
    found = {}
    if told := re.search(r"Kernel Module.*?(\d+\.[\d.]*\d)", text(proc / "driver/nvidia/version") or ""):
        found["nvidia"] = told[1]
    if (sys / "module/amdgpu").exists():
        found["amdgpu"] = text(sys / "module/amdgpu/version") or "of the kernel"
    return found


def limits(shared: Path = Path("/dev/shm")) -> dict[str, int | None]:
    """Bytes of shared memory, bytes that a process may lock, and files it may open; None is without limit, or, for
    shared memory, none there."""
    try:
        found = os.statvfs(shared)
        size = found.f_blocks * found.f_frsize
    except OSError:
        size = None
    return {
        "shared_memory_bytes": size,
        "locked_memory_bytes": _soft(resource.RLIMIT_MEMLOCK),
        "open_files": _soft(resource.RLIMIT_NOFILE),
    }


def _soft(which: int) -> int | None:
    limit = resource.getrlimit(which)[0]
    return None if limit == resource.RLIM_INFINITY else limit


def remarks(limits: dict[str, Any], rdma: bool) -> list[str]:
    """What is too little, with the mend, a sentence each."""
    found = []
    shared, locked = limits["shared_memory_bytes"], limits["locked_memory_bytes"]
    if shared is None:
        found.append("/dev/shm is not there: NCCL needs it between processes of one node; mount a tmpfs")
    elif shared < SHARED:
        found.append(
            f"/dev/shm has {shared / 2**20:,.0f} MiB: NCCL may fail between processes of one node; start the container "
            "with --ipc=host or --shm-size=16g"
        )
    if rdma and locked is not None:
        found.append(
            f"a process may lock {locked / 2**20:,.1f} MiB: RDMA needs more; set ulimit -l unlimited, in a container "
            "--ulimit memlock=-1"
        )
    return found
