"""Interfaces, RDMA ports, drivers and limits of nodes."""

from tests.launch.preflight.addresses import ADDRESSES
from undertow.launch.preflight.network import Interface, interfaces
from undertow.launch.preflight.node import drivers, limits, remarks
from undertow.launch.preflight.rdma import Gid, ports


def test_interfaces_of_a_node_with_rdma(node):
    place = node("eight_mlx5")
    found = {each.name: each for each in interfaces(place / "sys", place / "proc", ADDRESSES.get)}
    assert list(found) == ["docker0", *(f"ens{i}np0" for i in range(8)), "eth0"]
    assert found["eth0"] == Interface("eth0", "up", 25000, 1500, "ethernet", True, "10.0.0.5", True)
    assert found["ens3np0"] == Interface("ens3np0", "up", 400000, 4200, "ethernet", True, "10.1.3.5", False)
    assert found["docker0"] == Interface("docker0", "down", None, 1500, "ethernet", False, None, False)


def test_ports_of_a_node_with_rdma(node):
    found = ports(node("eight_mlx5") / "sys")
    assert [str(port) for port in found] == [f"mlx5_{i}:1" for i in range(8)]
    port = found[6]
    assert (port.state, port.active, port.gbit, port.link) == ("ACTIVE", True, 400.0, "Ethernet")
    assert (port.interface, port.firmware, port.roce_index) == ("ens6np0", "28.39.3004", 3)
    assert len(port.gids) == 4
    assert port.gids[3] == Gid(3, "0000:0000:0000:0000:0000:ffff:0a01:0605", "RoCE v2", "ens6np0", "10.1.6.5")
    assert port.gids[1].ipv4 is None and port.gids[2].kind == "IB/RoCE v1"


def test_devices_are_in_the_order_of_their_numbers(node):
    found = ports(node("eight_mlx5", mlx5_2="mlx5_10") / "sys")
    assert [port.device for port in found][-2:] == ["mlx5_7", "mlx5_10"]


def test_a_node_without_rdma(node):
    place = node("ethernet_alone")
    assert ports(place / "sys") == []
    found = {each.name: each for each in interfaces(place / "sys", place / "proc", ADDRESSES.get)}
    assert found["eth1"] == Interface("eth1", "down", None, 1500, "ethernet", True, None, False)
    assert not found["eth0"].default_route and not found["veth1a"].hardware


def test_a_directory_without_anything(tmp_path):
    assert interfaces(tmp_path, tmp_path) == [] and ports(tmp_path) == [] and drivers(tmp_path, tmp_path) == {}


def test_drivers(node, tmp_path):
    place = node("eight_mlx5")
    assert drivers(place / "sys", place / "proc") == {"nvidia": "570.86.15"}
    place = node("ethernet_alone")
    assert drivers(place / "sys", tmp_path / "none") == {"amdgpu": "6.12.12"}


def test_limits_of_this_node(tmp_path):
    assert limits(tmp_path / "none")["shared_memory_bytes"] is None
    assert (limits(tmp_path)["shared_memory_bytes"] or 0) > 2**20
    assert limits()["open_files"] is None or limits()["open_files"] > 0


def test_what_is_too_little_is_said():
    plenty = {"shared_memory_bytes": 2**34, "locked_memory_bytes": None}
    assert remarks(plenty, rdma=True) == []
    little = {"shared_memory_bytes": 64 * 2**20, "locked_memory_bytes": 8 * 2**20}
    shared = (
        "/dev/shm has 64 MiB: NCCL may fail between processes of one node; start the container with --ipc=host or "
        "--shm-size=16g"
    )
    locked = "a process may lock 8.0 MiB: RDMA needs more; set ulimit -l unlimited, in a container --ulimit memlock=-1"
    assert remarks(little, rdma=True) == [shared, locked]
    assert remarks(little, rdma=False) == [shared]
    assert remarks({**plenty, "shared_memory_bytes": None}, rdma=False)[0].startswith("/dev/shm is not there")
