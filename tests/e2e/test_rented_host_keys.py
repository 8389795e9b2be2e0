"""Host keys of rented machines for real, on WireGuard: given at boot, replaced at the join, and no other is accepted.

A container joins first: it must not keep a machine from joining after it.
"""

from __future__ import annotations

import json
import re
import shlex
import urllib.request
from collections.abc import Iterator

import pytest
from tests.e2e.cluster import Cluster
from tests.e2e.simulated_clouds import UNFINISHED, Cloud, bill, printed, renting, state, submit

from shoal.local_files import cache_dir
from shoal.sandbox.layout import Layout

COVERS = "cloud/service/machine_keys cloud/service/join cloud/service/boot network/wireguard remote/boot_machine.sh"
pytestmark = [pytest.mark.sandbox, pytest.mark.timeout(1500)]

NAME = "el-keys"
KEYS = {"sandbox": "sk-e2e-0123456789abcdef", "runpod": "rp-e2e-0123456789abcdef"}
SPEC = f"""\
cluster: {NAME}
network: wireguard
controller: {{provider: sandbox, memory: 1G}}
providers:
  acme: {{kind: sandbox, url: "URL-OF-sandbox", key: "env:SANDBOX_KEY"}}
  runpod: {{url: "URL-OF-runpod", key: "env:RUNPOD_KEY"}}
nodesets:
  vms: {{provider: acme, type: cpu, max: 2, idle: 10m, cpus: 1, memory: 1G}}
  pods: {{provider: runpod, type: NVIDIA A40, region: EU-RO-1, max: 1, cpus: 1, memory: 1G, gpus: 1, idle: 10m}}
"""
PUBLIC = "/etc/ssh/ssh_host_ed25519_key.pub"


@pytest.fixture(scope="module")
def rented(tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[Cluster, dict[str, str]]]:
    clouds = [Cloud(kind, key) for kind, key in KEYS.items()]
    with renting(tmp_path_factory.mktemp("keys"), SPEC, *clouds) as made:
        yield made


def expected_key(cluster: Cluster, node: str) -> str:
    """The host key that the ledger has for the newest machine of a node."""
    read = "import sqlite3, sys; print(*sqlite3.connect(sys.argv[1]).execute(sys.argv[2], sys.argv[3:]).fetchone())"
    query = "SELECT host_key FROM rentals WHERE node = ? ORDER BY intended_at DESC"
    return cluster.on("controller", "python3", "-c", read, "/var/lib/shoal/elastic/ledger.db", query, node).strip()


def boot_keys() -> list[str]:
    """The boot scripts that the clouds got, as they stored them."""
    directory = Layout(cache_dir(), NAME).dir / "simulators"
    return [path.read_text() for path in directory.glob("*.json")]


def test_container_and_machine_join_one_after_the_other(rented: tuple[Cluster, dict[str, str]]) -> None:
    cluster, urls = rented
    nodes = cluster.on("controller", "sinfo", "-h", "-N", "-o", "%N %P").split()
    assert {"pods1", "vms1", "vms2"} <= set(nodes)
    pod = cluster.on("controller", "sbatch", "--parsable", "-w", "pods1", "-p", "pods", "--wrap=true").strip()
    cluster.wait("the container's job ends", lambda: state(cluster, pod) not in UNFINISHED, seconds=600)
    assert state(cluster, pod) == "COMPLETED"
    job = submit(cluster, "vms1", f"cut -d ' ' -f 2 {PUBLIC}")
    cluster.wait("the machine's job ends", lambda: state(cluster, job) not in UNFINISHED, seconds=600)
    assert state(cluster, job) == "COMPLETED"
    [own] = printed(cluster, job)
    assert expected_key(cluster, "vms1") == f"ssh-ed25519 {own}", "the one that it made at the join"
    assert not [script for script in boot_keys() if own in script], "nobody else had its private half"
    log = cluster.on("controller", "journalctl", "-u", "shoal-elastic", "--no-pager")
    assert "PRIVATE KEY" not in log
    assert not bill(urls["sandbox"])["machines"][0]["ended"], "both are joined"


def shorten_timeout(cluster: Cluster) -> None:
    """The service as it is, but it waits for the right key for 15 s and not for three minutes."""
    unit = cluster.on("controller", "systemctl", "cat", "shoal-elastic")
    [python] = re.findall(r"^ExecStart=(\S+) -m shoal.elastic$", unit, re.MULTILINE)
    program = (
        "from shoal.cloud.service import join; join.OTHER_KEY_TIMEOUT_S = 15.0; import shoal.elastic as e; e.main()"
    )
    lines = f'[Service]\nExecStart=\nExecStart={python} -c "{program}"\n'
    place = "/run/systemd/system/shoal-elastic.service.d"
    write = f"mkdir -p {place}; printf %s {shlex.quote(lines)} > {place}/short.conf; systemctl daemon-reload"
    cluster.on("controller", "sh", "-c", f"{write}; systemctl restart shoal-elastic")


def test_machine_with_another_host_key_is_rejected_and_released(rented: tuple[Cluster, dict[str, str]]) -> None:
    cluster, urls = rented
    url = urls["sandbox"]
    shorten_timeout(cluster)
    before = {one["id"] for one in bill(url)["machines"]}
    faults = json.dumps([{"kind": "other-host-key", "times": -1}]).encode()
    with urllib.request.urlopen(urllib.request.Request(f"{url}/_simulator/faults", faults, method="PUT"), timeout=30):
        pass
    job = submit(cluster, "vms2", "hostname")

    def rejected() -> bool:
        return any(one["ended"] for one in bill(url)["machines"] if one["id"] not in before)

    cluster.wait("the machine is released", rejected, seconds=500)
    log = cluster.on("controller", "journalctl", "-u", "shoal-elastic", "--no-pager")
    assert "shows another host key than the one that the machine got at boot" in log
    assert state(cluster, job) != "COMPLETED"
    cluster.on("controller", "scancel", job)
