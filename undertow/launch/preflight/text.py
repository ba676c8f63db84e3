"""A node's preflight as text for a terminal."""

from __future__ import annotations

import textwrap
from collections.abc import Callable, Sequence
from typing import Any

Table = Callable[[list[list[str]]], list[str]]


def preflight_text(facts: dict[str, Any], table: Table, width: int) -> list[str]:
    """Lines on drivers, limits, network, RDMA and variables; `table` aligns rows."""
    drivers = ", ".join(f"{name} {version}" for name, version in facts["drivers"].items()) or "none"
    allowed = facts["limits"]
    lines = [
        f"node {facts['node']}; kernel {facts['kernel']}; GPU drivers: {drivers}",
        f"shared memory {_size(allowed['shared_memory_bytes'], 'none')}, lockable memory "
        f"{_size(allowed['locked_memory_bytes'], 'unlimited')}, open files {allowed['open_files'] or 'unlimited'}",
    ]
    lines += ["", *_interfaces(facts["interfaces"], table), "", *_rdma(facts["rdma"], table), ""]
    return lines + _variables(facts["variables"], table, width) + _wrapped(facts["remarks"], width)


def _interfaces(found: Sequence[dict[str, Any]], table: Table) -> list[str]:
    rows = [["interface", "state", "Gbit/s", "MTU", "IPv4", "what"]]
    for each in found:
        speed = f"{each['speed_mbit'] / 1000:g}" if each["speed_mbit"] else "unknown"
        what = each["kind"] if each["hardware"] else "virtual"
        what += ", default route" if each["default_route"] else ""
        rows.append([each["name"], each["state"], speed, str(each["mtu"] or "?"), each["ipv4"] or "none", what])
    return table(rows) if found else ["no network interface besides the loopback"]


def _rdma(found: Sequence[dict[str, Any]], table: Table) -> list[str]:
    rows = [["RDMA port", "state", "Gbit/s", "link", "interface", "RoCE v2 IPv4 GID", "firmware"]]
    for each in found:
        index = each["roce_index"]
        gid = next((f"{gid['index']}: {gid['ipv4']}" for gid in each["gids"] if gid["index"] == index), "none")
        rate = "unknown" if each["gbit"] is None else f"{each['gbit']:g}"
        name = f"{each['device']}:{each['port']}"
        beside, firmware = each["interface"] or "none", each["firmware"] or "unknown"
        rows.append([name, each["state"], rate, each["link"], beside, gid, firmware])
    return table(rows) if found else ["no RDMA device"]


def _variables(found: Sequence[dict[str, Any]], table: Table, width: int) -> list[str]:
    proposed = [f"export {v['name']}='{v['value']}'" for v in found if v["value"] is not None]
    lines = ["for runs over several nodes (RCCL reads the same names); what you set yourself before a run counts:"]
    lines += [f"  {line}" for line in proposed or ["nothing to set"]]
    reasons = []
    for each in found:
        present = f"; set now to {each['present']}" if each["present"] is not None else ""
        reasons.append(f"{each['name']}: {each['reason']}{present}")
    return lines + _wrapped(reasons, width)


def _wrapped(sentences: Sequence[str], width: int) -> list[str]:
    return [line for text in sentences for line in textwrap.wrap(text, width, subsequent_indent="  ")]


def _size(size: int | None, absent: str) -> str:
    if size is None:
        return absent
    return f"{size / 2**30:,.1f} GiB" if size >= 2**30 else f"{size / 2**20:,.1f} MiB"
