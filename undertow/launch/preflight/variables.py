"""Variables of NCCL, RCCL and gloo that follow from a node's network, each with its reason."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from undertow.launch.preflight.network import Interface
from undertow.launch.preflight.rdma import Port

_AUTOMATIC = "NCCL 2.21 and later chooses by itself where it is not set"


@dataclass(frozen=True)
class Variable:
    """A proposal: `value` None where none is needed or none is right; `present` is what the environment has."""

    name: str
    value: str | None
    reason: str
    present: str | None = None


def variables(interfaces: Sequence[Interface], ports: Sequence[Port], environment: Mapping[str, str]) -> list[Variable]:
    """What to set before a run over several nodes. RCCL reads the same names."""
    meeting, why = _meeting(interfaces)
    chosen, which = _devices(ports)
    index, because = _gid_index(chosen)
    proposals = [
        Variable("NCCL_SOCKET_IFNAME", meeting and f"={meeting}", why),
        Variable("GLOO_SOCKET_IFNAME", meeting, why),
        Variable("NCCL_IB_HCA", f"={','.join(map(str, chosen))}" if chosen else None, which),
        Variable("NCCL_IB_GID_INDEX", None if index is None else str(index), because),
    ]
    return [Variable(v.name, v.value, v.reason, environment.get(v.name)) for v in proposals]


def _meeting(interfaces: Sequence[Interface]) -> tuple[str | None, str]:
    """The interface that processes meet over, and exchange by sockets if there is nothing better."""
    usable = [i for i in interfaces if i.state in ("up", "unknown") and i.ipv4 and (i.hardware or i.default_route)]
    if not usable:
        return None, "no interface is up with an IPv4 address: ranks of one node still meet, over the loopback"
    best = max(usable, key=lambda i: (i.default_route, i.speed_mbit or 0))
    if best.default_route:
        return best.name, f"up, {best.ipv4}, has the default route"
    speed = f"{best.speed_mbit / 1000:g} Gbit/s" if best.speed_mbit else "of unknown speed"
    return best.name, f"up, {best.ipv4}, {speed}; none has the default route, others are no faster"


def _devices(ports: Sequence[Port]) -> tuple[list[Port], str]:
    """The active ports of the highest rate and of the link that most of these have."""
    active = [port for port in ports if port.active]
    if not ports:
        return [], "no RDMA device: nodes exchange over sockets, which is slow for more than a trial"
    if not active:
        return [], f"no port of {', '.join(map(str, ports))} is active: look at cables, switch and driver"
    fastest = max(port.gbit or 0 for port in active)
    found = [port for port in active if (port.gbit or 0) == fastest]
    links = [port.link for port in found]
    link = max(sorted(set(links)), key=links.count)
    found = [port for port in found if port.link == link]
    told = f"{len(found)} active of {fastest:g} Gbit/s, {link}"
    out = [f"{port} ({_why_not(port, fastest, link)})" for port in ports if port not in found]
    return found, f"{told}; left out: {', '.join(out)}" if out else told


def _why_not(port: Port, fastest: float, link: str) -> str:
    if not port.active:
        return port.state
    return port.link if port.gbit == fastest and port.link != link else f"{port.gbit or 0:g} Gbit/s"


def _gid_index(ports: Sequence[Port]) -> tuple[int | None, str]:
    """The index that names the RoCE v2 IPv4 address on every port."""
    if not ports:
        return None, "no RDMA device in use"
    if ports[0].link != "Ethernet":
        return None, f"not needed on {ports[0].link}"
    if without := [str(port) for port in ports if port.roce_index is None]:
        return None, f"no RoCE v2 IPv4 address on {', '.join(without)}: give their interfaces one"
    indices = {str(port): port.roce_index for port in ports}
    if len(set(indices.values())) > 1:
        told = ", ".join(f"{port} {index}" for port, index in indices.items())
        return None, f"the RoCE v2 IPv4 address has no common index ({told}); {_AUTOMATIC}"
    return ports[0].roce_index, f"RoCE v2 with an IPv4 address on every port; {_AUTOMATIC}"
