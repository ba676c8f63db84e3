"""A node as text."""

from dataclasses import asdict

from tests.launch.preflight.addresses import ADDRESSES
from undertow.cli.doctor import _columns
from undertow.launch.preflight.network import interfaces
from undertow.launch.preflight.rdma import ports
from undertow.launch.preflight.text import preflight_text
from undertow.launch.preflight.variables import variables

LIMITS = {"shared_memory_bytes": 2**34, "locked_memory_bytes": None, "open_files": 1024}


def _lines(place) -> list[str]:
    network, devices = interfaces(place / "sys", place / "proc", ADDRESSES.get), ports(place / "sys")
    facts = {
        "node": "node1",
        "kernel": "6.8",
        "drivers": {"nvidia": "570.86.15"},
        "interfaces": [asdict(each) for each in network],
        "rdma": [asdict(port) | {"roce_index": port.roce_index} for port in devices],
        "variables": [asdict(v) for v in variables(network, devices, {"NCCL_IB_GID_INDEX": "1"})],
        "limits": LIMITS,
        "remarks": ["a remark"],
    }
    return preflight_text(facts, _columns, 100)


def test_a_node_with_rdma(node):
    lines = _lines(node("eight_mlx5"))
    assert lines[:2] == [
        "node node1; kernel 6.8; GPU drivers: nvidia 570.86.15",
        "shared memory 16.0 GiB, lockable memory unlimited, open files 1024",
    ]
    rows = [line.split() for line in lines]
    assert ["ens0np0", "up", "400", "4200", "10.1.0.5", "ethernet"] in rows
    assert ["eth0", "up", "25", "1500", "10.0.0.5", "ethernet,", "default", "route"] in rows
    assert ["mlx5_7:1", "ACTIVE", "400", "Ethernet", "ens7np0", "3:", "10.1.7.5", "28.39.3004"] in rows
    assert "  export NCCL_SOCKET_IFNAME='=eth0'" in lines and "  export NCCL_IB_GID_INDEX='3'" in lines
    assert "; set now to 1" in " ".join(lines) and lines[-1] == "a remark"


def test_a_node_without_rdma(node):
    lines = _lines(node("ethernet_alone"))
    assert "no RDMA device" in lines and not any("export NCCL_IB" in line for line in lines)
