"""RDMA devices of this node and their ports, as the kernel lists them under /sys/class/infiniband."""

from __future__ import annotations

import re
from dataclasses import dataclass
from pathlib import Path

from undertow.launch.preflight.network import text

_NO_GID = "0000:0000:0000:0000:0000:0000:0000:0000"
_MAPPED = "0000:0000:0000:0000:0000:ffff:"  # an IPv4 address in a GID


@dataclass(frozen=True)
class Gid:
    """An entry of a port's table of addresses: `kind` is `IB/RoCE v1` or `RoCE v2`, `ipv4` the address in it if it has
    one, `interface` the network interface that it belongs to."""

    index: int
    gid: str
    kind: str
    interface: str | None
    ipv4: str | None


@dataclass(frozen=True)
class Port:
    """A port of a device: `link` is `InfiniBand` or `Ethernet`, `gbit` its rate in Gbit/s, `interface` the network
    interface beside it."""

    device: str
    port: int
    state: str
    gbit: float | None
    link: str
    interface: str | None
    firmware: str | None
    gids: tuple[Gid, ...]

    @property
    def active(self) -> bool:
        """Whether it can be used."""
        return self.state == "ACTIVE"

    @property
    def roce_index(self) -> int | None:
        """The first index of a routable IPv4 address over Ethernet, None on InfiniBand or without one."""
        return next((g.index for g in self.gids if g.kind == "RoCE v2" and g.ipv4 and self.link == "Ethernet"), None)

    def __str__(self) -> str:
        return f"{self.device}:{self.port}"


def ports(sys: Path = Path("/sys")) -> list[Port]:
    """Every port of every device, in the order of their numbers."""
    places = (sys / "class/infiniband").glob("*/ports/*")
    return sorted(
        (_port(place) for place in places), key=lambda p: ([*map(_natural, re.split(r"(\d+)", p.device))], p.port)
    )


def _natural(part: str) -> tuple[int, str]:
    return (int(part), "") if part.isdigit() else (-1, part)


def _port(place: Path) -> Port:
    device = place.parent.parent
    gids = _gids(place)
    beside = sorted(child.name for child in (device / "device/net").glob("*"))
    interface = next((gid.interface for gid in gids if gid.interface), beside[0] if beside else None)
    rate = re.match(r"[\d.]+", text(place / "rate") or "")
    return Port(
        device.name,
        int(place.name),
        (text(place / "state") or "unknown").rpartition(":")[2].strip(),
        float(rate[0]) if rate else None,
        text(place / "link_layer") or "unknown",
        interface,
        text(device / "fw_ver"),
        gids,
    )


def _gids(port: Path) -> tuple[Gid, ...]:
    found = []
    for place in (port / "gids").glob("*"):
        gid = text(place)
        if gid is None or gid == _NO_GID:
            continue
        kind, beside = text(port / "gid_attrs/types" / place.name), text(port / "gid_attrs/ndevs" / place.name)
        found.append(Gid(int(place.name), gid, kind or "unknown", beside, _ipv4(gid)))
    return tuple(sorted(found, key=lambda gid: gid.index))


def _ipv4(gid: str) -> str | None:
    if not gid.startswith(_MAPPED):
        return None
    return ".".join(str(byte) for byte in bytes.fromhex(gid.removeprefix(_MAPPED).replace(":", "")))
