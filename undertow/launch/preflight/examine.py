"""All of a node's preflight as plain values."""

from __future__ import annotations

import platform
from collections.abc import Mapping
from dataclasses import asdict
from pathlib import Path
from typing import Any

from undertow.launch.preflight.network import interfaces
from undertow.launch.preflight.node import drivers, limits, remarks
from undertow.launch.preflight.rdma import Port, ports
from undertow.launch.preflight.variables import variables


def preflight(environment: Mapping[str, str], sys: Path = Path("/sys"), proc: Path = Path("/proc")) -> dict[str, Any]:
    """`node`, `kernel`, `drivers`, `interfaces`, `rdma`, `variables`, `limits` and, in sentences, `remarks`."""
    network, devices, allowed = interfaces(sys, proc), ports(sys), limits()
    return {
        "node": platform.node(),
        "kernel": platform.release(),
        "drivers": drivers(sys, proc),
        "interfaces": [asdict(interface) for interface in network],
        "rdma": [_port(port) for port in devices],
        "variables": [asdict(variable) for variable in variables(network, devices, environment)],
        "limits": allowed,
        "remarks": remarks(allowed, bool(devices)),
    }


def _port(port: Port) -> dict[str, Any]:
    return asdict(port) | {"roce_index": port.roce_index}
