"""Which collectives this process has entered, as torch's own recorder of them tells; nothing is noted for it.

Every process group counts what it is given, for gloo as for NCCL, and the recorder keeps the last entries. Both are
read by private names of torch, here alone.
"""

from __future__ import annotations

import json
from contextlib import suppress
from dataclasses import dataclass
from datetime import timedelta
from typing import Any

import torch._C._distributed_c10d as c10d
from torch.distributed import distributed_c10d

_DUMPS = ("_dump_nccl_trace_json", "_dump_fr_trace_json")  # of NCCL or RCCL, and of the other backends


@dataclass(frozen=True)
class Collective:
    """One exchange: what is done, such as `all_to_all`, in which group, and the how-manieth of the group it is."""

    name: str
    group: str
    number: int

    def __str__(self) -> str:
        return f"{self.name} number {self.number} of {self.group}"


def own_store() -> c10d.Store:
    """The store that the ranks met at, over a connection of its own: waits of others do not hold it up."""
    return distributed_c10d._get_default_store().clone()  # type: ignore[reportAttributeAccessIssue]


def numbers() -> dict[str, int]:
    """How many collectives this rank has entered in its groups, those of one axis together. Cheap enough for every
    second."""
    found = {}
    for group in list(distributed_c10d._world.pg_map):
        with suppress(RuntimeError):  # a backend that does not count
            count = group._get_sequence_number_for_group()  # type: ignore[reportAttributeAccessIssue]
            name = _spelled(group.group_name, group.group_desc)
            found[name] = found.get(name, 0) + count  # dense weights and experts have a pipeline axis each
    return found


def postpone(seconds: float) -> None:
    """Let exchanges of the groups that there are wait for so long before torch itself gives them up, without a name."""
    for group in list(distributed_c10d._world.pg_map):
        distributed_c10d._set_pg_timeout(timedelta(seconds=seconds), group)


def collectives() -> tuple[Collective | None, Collective | None]:
    """The last collective that this rank entered, and the one that it waits in; None where there is none, or where the
    recorder is off. Takes up to a tenth of a second."""
    entries = sorted(_entries(), key=lambda entry: entry.get("time_created_ns", 0))
    waiting = [entry for entry in entries if not entry.get("retired") and entry.get("state") != "completed"]
    return (_collective(entries[-1]) if entries else None), (_collective(waiting[0]) if waiting else None)


def _entries() -> list[dict[str, Any]]:
    found: list[dict[str, Any]] = []
    for name in _DUMPS:
        if dump := getattr(c10d, name, None):
            found += json.loads(dump(True, False)).get("entries", [])
    return found


def _collective(entry: dict[str, Any]) -> Collective:
    number = entry.get("p2p_seq_id" if entry.get("is_p2p") else "collective_seq_id", 0)
    name = entry.get("profiling_name", "an exchange").rpartition(":")[2]
    return Collective(name, _spelled(*entry.get("process_group", ("", ""))), number)


def _spelled(name: str, description: str) -> str:
    """A group as its axis, where it was made for one, else by torch's name."""
    if description == "default_pg":
        return "all ranks"
    if description in ("", "undefined"):
        return f"group {name}"
    return f"group {description.removeprefix('mesh_')}"
