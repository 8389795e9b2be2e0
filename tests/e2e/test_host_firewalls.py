"""Hosts with a firewall of their own, ufw and firewalld: each is reported, with the command that opens its ports.

Run it by hand: it installs packages from the internet.
"""

import re
from collections.abc import Iterator
from typing import Any

import pytest
from tests.e2e.cluster import Cluster
from tests.e2e.existing_hosts import Lent, lent_hosts, spec_text

from shoal.spec.member import Shape

COVERS = "network/firewall roles/base"
pytestmark = [pytest.mark.sandbox, pytest.mark.matrix]

INSTALL = "DEBIAN_FRONTEND=noninteractive apt-get -qq install --no-install-recommends {} >/dev/null 2>&1\n"
UFW = INSTALL.format("ufw") + "ufw default deny incoming && ufw allow 22/tcp && ufw --force enable"
FIREWALLD = INSTALL.format("firewalld dbus netbase") + "systemctl restart firewalld && firewall-cmd --state"


@pytest.fixture(scope="module")
def lent() -> Iterator[Lent]:
    shapes = {name: Shape(memory_mb=512) for name in ("door", "wall", "ring")}
    with lent_hosts("x-walls-made", shapes, "x-walls") as made:
        made.shell("wall", UFW)
        made.shell("ring", FIREWALLD)
        yield made


@pytest.fixture(scope="module")
def cluster(lent: Lent, tmp_path_factory: pytest.TempPathFactory) -> Cluster:
    return Cluster(tmp_path_factory.mktemp("walls"), spec_text("x-walls", lent, "door", ("wall", "ring")))


def warnings(said: Any) -> dict[str, tuple[str, str]]:
    """What was found on each host about firewalls, and the command that was told."""
    firewalls = {}
    for finding in said["findings"]:
        if "firewall" in finding["what"]:
            [command] = re.findall(r"run `([^`]+)` on it", finding["fix"])
            firewalls[finding["host"]] = (finding["found"], command)
    return firewalls


def test_foreign_firewall_is_reported_with_commands_that_open_the_ports(lent: Lent, cluster: Cluster) -> None:
    report = warnings(cluster.json("plan"))
    assert {host: firewall for host, (firewall, _) in report.items()} == {"wall": "ufw", "ring": "firewalld"}
    for host, (_, command) in report.items():
        lent.shell(host, command)
    cluster.file.write_text(cluster.file.read_text() + "firewall: false\n")
    done = cluster.json("up", timeout=600)
    assert done["whole"] and not warnings(done), done
    assert sorted(cluster.on("door", "srun", "-N2", "hostname").split()) == ["ring", "wall"]
    assert cluster.json("up")["unchanged"]
