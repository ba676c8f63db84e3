"""GPUs that sample: their replicas, where the memory of one goes, and sequences by length."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from undertow.report.page import Row, table
from undertow.report.plan_table import grid, note
from undertow.report.quantity import both, significant

_MIB = 2**20
_BOUND = (
    "Seconds of a step are those of reading weights and cache from memory, a lower bound: for one sequence, and for "
    "as many as fit."
)


def replicas_section(of: Mapping[str, Any]) -> str:
    """Two tables from `rollout` of the document."""
    widths = f"tensor {of['tensor']}, expert {of['expert']}, data {of['data']}"
    idle = f", {of['idle_gpus']:,} idle" if of["idle_gpus"] else ""
    rows = [
        Row("replicas", f"{of['replicas']:,}", f"{of['gpus_per_replica']:,} GPUs each: {widths}{idle}"),
        Row("memory to use on a GPU", both(of["budget_bytes"])),
        Row("weights", both(of["weights_bytes"]), f"in {of['weights_format'].upper()}"),
        Row("buffers for new weights", both(of["update_bucket_bytes"])),
        Row("room for caches", both(of["cache_room_bytes"]), f"cache in {of['cache_format']}"),
        Row(
            "cache of a sequence",
            f"{of['cache_bytes_per_token']:,.0f} bytes a token",
            f"and {of['cache_bytes_per_sequence'] / _MIB:,.2f} MiB for each sequence",
        ),
        Row("longest context that fits", f"{of['longest_context']:,} tokens"),
        Row(
            "sequences at once",
            f"{of['sequences']:,}",
            f"of {of['sequence_length']:,} tokens{'' if of['fits'] else '; it does not fit'}",
        ),
    ]
    lengths = [
        [
            f"{at['length']:,}",
            significant(at["sequence_bytes"] / _MIB),
            f"{at['sequences']:,}",
            significant(at["flops_per_token"] / 1e9),
            significant(1e3 * at["least_seconds"]),
            "" if at["least_seconds_full"] is None else significant(1e3 * at["least_seconds_full"]),
        ]
        for at in of["lengths"]
    ]
    head = ["tokens", "MiB a sequence", "sequences", "GFLOP a token", "ms a step", "ms, all sequences"]
    return f'<div class="narrow">{table(rows)}</div>{note(_BOUND)}{grid(head, lengths)}'
