"""A LAN that the members share with other machines: `check` warns, and one line in the file makes it WireGuard.

The attack is a neighbour that takes over a member's address: an address of a member that is sent from elsewhere.
"""

from __future__ import annotations

from collections.abc import Iterator

import pytest
from tests.e2e.cluster import Cluster, running

pytestmark = [pytest.mark.sandbox, pytest.mark.timeout(1200)]

SPEC = """\
cluster: el-lan
network: lan
controller: {provider: sandbox, memory: 1G}
nodesets:
  lab: {provider: sandbox, count: 1, memory: 1G}
"""
SLURMCTLD, SLURMD = 6817, 6818
CONNECT = """\
import socket, sys
try:
    socket.create_connection((sys.argv[1], int(sys.argv[2])), timeout=5).close()
    print("open")
except OSError:
    print("closed")
"""


@pytest.fixture(scope="module")
def cluster(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Cluster]:
    with running(tmp_path_factory.mktemp("lan"), SPEC) as made:
        yield made


def warnings(cluster: Cluster) -> list[str]:
    """What `check` warns of, about the network."""
    findings = cluster.json("check")["findings"]
    return [one["found"] for one in findings if one["level"] == "warning" and "network segment" in one["what"]]


def connect(cluster: Cluster, target: str, port: int) -> str:
    """Whether a port of a host answers the controller."""
    return cluster.on("controller", "python3", "-c", CONNECT, target, str(port)).strip()


def test_check_warns_of_a_stranger_in_the_lan(cluster: Cluster) -> None:
    assert warnings(cluster) == [], "members and the router are no strangers"
    address = str(cluster.instances()["lab1"].address)
    stranger = f"{address.rpartition('.')[0]}.250"
    route = cluster.on("controller", "ip", "-o", "route", "get", address).split()
    device = route[route.index("dev") + 1]
    cluster.on("controller", "ip", "neigh", "replace", stranger, "lladdr", "02:00:00:00:00:fa", "dev", device)
    assert warnings(cluster) == [f"{stranger} beside controller"]
    assert connect(cluster, address, SLURMD) == "open"


def test_wireguard_on_the_same_lan_closes_the_members_addresses(cluster: Cluster) -> None:
    cluster.edit("network: lan", "network: wireguard")
    assert cluster.json("up")["whole"]
    assert warnings(cluster) == []
    assert cluster.on("controller", "timeout", "60", "srun", "--immediate=30", "-w", "lab1", "hostname") == "lab1\n"
    peers = cluster.on("controller", "wg", "show", "shoal0", "endpoints")
    address = str(cluster.instances()["lab1"].address)
    assert f"{address}:51820" in peers, "directly, over the LAN"
    assert connect(cluster, address, SLURMD) == "closed"
    assert connect(cluster, "lab1", SLURMD) == "open", "its name leads to its address on the network"
