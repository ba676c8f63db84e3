"""Network interfaces of this node, as the kernel lists them under /sys/class/net."""

from __future__ import annotations

import fcntl
import socket
import struct
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

_LOOPBACK, _INFINIBAND = 772, 32  # ARPHRD_LOOPBACK, ARPHRD_INFINIBAND of linux/if_arp.h
_GET_ADDRESS = 0x8915  # SIOCGIFADDR of linux/sockios.h


@dataclass(frozen=True)
class Interface:
    """One interface. `speed_mbit` is None where the driver tells none; `hardware` is false for bridges, tunnels and
    pairs of containers, true for bonds; `default_route` says that what has no route of its own leaves by it."""

    name: str
    state: str
    speed_mbit: int | None
    mtu: int | None
    kind: str
    hardware: bool
    ipv4: str | None
    default_route: bool


def ipv4_of(name: str) -> str | None:
    """First IPv4 address of an interface, None if it has none."""
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as endpoint, suppress(OSError):
        request = struct.pack("256s", name.encode()[:15])
        return socket.inet_ntoa(fcntl.ioctl(endpoint.fileno(), _GET_ADDRESS, request)[20:24])
    return None


def interfaces(
    sys: Path = Path("/sys"), proc: Path = Path("/proc"), address: Callable[[str], str | None] = ipv4_of
) -> list[Interface]:
    """All interfaces but the loopback, by name."""
    leaving, found = _default_routes(proc), []
    for place in sorted((sys / "class/net").glob("*")):
        kind = number(place / "type")
        if kind is None or kind == _LOOPBACK:
            continue
        speed = number(place / "speed")
        found.append(
            Interface(
                place.name,
                text(place / "operstate") or "unknown",
                speed if speed and speed > 0 else None,
                number(place / "mtu"),
                "infiniband" if kind == _INFINIBAND else "ethernet" if kind == 1 else "other",
                (place / "device").exists() or (place / "bonding").exists(),
                address(place.name),
                place.name in leaving,
            )
        )
    return found


def _default_routes(proc: Path) -> set[str]:
    lines = (text(proc / "net/route") or "").splitlines()[1:]
    fields = [line.split() for line in lines]
    return {field[0] for field in fields if len(field) > 7 and field[1] == field[7] == "00000000"}


def text(path: Path) -> str | None:
    """What a file of the kernel says, None where it is not there or refuses to be read."""
    try:
        return path.read_text(errors="replace").strip()
    except OSError:
        return None


def number(path: Path) -> int | None:
    """The same as an integer."""
    try:
        return int(text(path) or "")
    except ValueError:
        return None
