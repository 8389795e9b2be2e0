"""A cluster whose hosts meet in a tailnet: joined, watched, thrown out and let in again; and its links measured.

Where the hosts can have the real programs is for `tests/e2e/tailnet.py` to say; the name of every test says which of
the two ran.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest
from tests.documents import ROOT, commands
from tests.e2e.cluster import LIMIT, Cluster, kill, read_until
from tests.e2e.lent import Lent, lent_hosts
from tests.e2e.tailnet import StandIn, Tailnet, headscale, real_programs
from tests.sandbox_faults import SandboxFaults

from shoal.remote import program_text
from shoal.sandbox.layout import Layout, cache_dir
from shoal.spec.member import Shape

pytestmark = pytest.mark.sandbox

MADE_AS, CLUSTER = "ts-tailnet", "ts-reef"
NAMES = ("desktop", "gpu01", "gpu02")
"""As on the page docs/tailscale.md."""
SLOW_MBIT = 2


@dataclass
class Reef:
    """The cluster, its hosts, and the administrator of the tailnet."""

    cluster: Cluster
    lent: Lent
    tailnet: Tailnet

    def srun(self, *words: str, status: int | None = 0) -> list[str]:
        return sorted(self.lent.shell("desktop", f"srun {' '.join(words)}", status=status).split())


@pytest.fixture(scope="module", params=["real" if real_programs() else "stand-in"])
def reef(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Reef]:
    with contextlib.ExitStack() as stack:
        lent = stack.enter_context(lent_hosts(MADE_AS, {name: Shape(memory_mb=512) for name in NAMES}, CLUSTER))
        tailnet = StandIn(MADE_AS) if request.param == "stand-in" else stack.enter_context(headscale(MADE_AS))
        print(f"Tailscale here is {tailnet.programs}")
        for name in NAMES:
            tailnet.install(lent, name)
        reach = f"user: shoal, identity: {lent.identity}"
        text = (
            f"cluster: {CLUSTER}\n"
            f"network: {{kind: tailscale, auth_key: env:TS_AUTHKEY, tags: [slurm]{tailnet.more}}}\n"
            f"controller: {{host: {lent.entry('desktop')}, compute: true, {reach}}}\n"
            f"nodesets:\n  lab: {{hosts: [{lent.entry('gpu01')}, {lent.entry('gpu02')}], {reach}}}\n"
        )
        cluster = Cluster(tmp_path_factory.mktemp("tailnet"), text)
        cluster.env["TS_AUTHKEY"] = tailnet.key
        assert cluster.json("up", timeout=600)["whole"]
        yield Reef(cluster, lent, tailnet)


def test_hosts_join_and_the_cluster_runs_over_their_addresses_there(reef: Reef) -> None:
    addresses = {node["hostname"]: node["ip"] for node in reef.tailnet.nodes().values()}
    assert set(addresses) == {f"{CLUSTER}-{name}" for name in NAMES}
    nodes = {node["name"]: node["address"] for node in reef.cluster.json("status")["nodes"]}
    assert nodes == {name: addresses[f"{CLUSTER}-{name}"] for name in NAMES}
    assert reef.srun("-N3", "hostname") == list(NAMES)
    conf = reef.lent.shell("desktop", "cat /etc/slurm/slurm.conf")
    assert f"SlurmctldHost=desktop({nodes['desktop']})" in conf


@pytest.mark.parametrize("port", [6817, 6818])
def test_slurm_does_not_answer_who_is_not_in_the_tailnet(reef: Reef, port: int) -> None:
    """This machine is on the hosts' bridge, and no member."""
    address = reef.lent.instances["desktop"].target.address
    with pytest.raises(TimeoutError):
        socket.create_connection((str(address), port), timeout=2).close()


def test_slurm_listens_at_the_address_in_the_tailnet_and_at_no_other(reef: Reef) -> None:
    addresses = {node["name"]: node["address"] for node in reef.cluster.json("status")["nodes"]}
    assert listening(reef, "desktop") == {f"{addresses['desktop']}:6817", f"{addresses['desktop']}:6818"}
    for name in ("gpu01", "gpu02"):
        assert listening(reef, name) == {f"{addresses[name]}:6818"}


def listening(reef: Reef, name: str) -> set[str]:
    """Where Slurm's daemons listen on a host."""
    lines = reef.lent.shell(name, "ss -ltnH '( sport = :6817 or sport = :6818 )'").splitlines()
    return {line.split()[3] for line in lines}


def test_a_daemon_that_starts_before_the_tailnet_waits_for_its_address(reef: Reef) -> None:
    reef.lent.shell("gpu01", "systemctl stop slurmd tailscaled; systemctl start --no-block slurmd")
    try:
        waits = "systemctl is-active slurmd; pgrep -f '[a]ddress show to' || true"
        reef.cluster.wait("it waits", lambda: len(reef.lent.shell("gpu01", waits, status=None).split()) > 1)
        assert reef.lent.shell("gpu01", "systemctl is-active slurmd", status=None).strip() == "activating"
    finally:
        reef.lent.shell("gpu01", "systemctl start tailscaled")
    reef.cluster.wait("it listens", lambda: len(listening(reef, "gpu01")) == 1)
    three = "timeout 60 srun -N3 hostname 2> /dev/null | sort | xargs"
    reef.cluster.wait("jobs run", lambda: reef.lent.shell("desktop", three, status=None).split() == list(NAMES))


def test_once_hosts_are_in_it_up_needs_no_key_and_changes_nothing(reef: Reef) -> None:
    key = reef.cluster.env.pop("TS_AUTHKEY")
    try:
        assert reef.cluster.json("up")["unchanged"]
    finally:
        reef.cluster.env["TS_AUTHKEY"] = key


def test_the_key_is_nowhere_on_the_hosts_once_they_have_joined(reef: Reef) -> None:
    for name in NAMES:
        found = reef.lent.shell(
            name, f"grep -rlF {reef.tailnet.key} /etc /var /run /tmp /root /home 2> /dev/null || true"
        )
        assert found == "", f"{name}: {found}"


def test_status_tells_direct_from_relayed(reef: Reef) -> None:
    ways = {member["name"]: member["way"] for member in reef.cluster.json("status")["tailnet"]["members"]}
    assert ways == dict.fromkeys(NAMES, "direct")
    reef.tailnet.relay(f"{CLUSTER}-gpu02", True)
    try:
        assert "gpu02 relayed by fra, slowly" in reef.cluster.shoal("status").stdout
        assert "gpu02: the controller reaches it through a relay" in reef.cluster.shoal("check", status=None).stdout
    finally:
        reef.tailnet.relay(f"{CLUSTER}-gpu02", False)


def test_a_key_that_ends_soon_is_found_and_rotated_on_all_hosts_by_one_command(reef: Reef) -> None:
    before = reef.tailnet.nodes()
    soon = time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime(time.time() + 3.5 * 86400))
    reef.tailnet.expire(f"{CLUSTER}-gpu01", soon)
    findings = reef.cluster.json("check", status=None)["findings"]
    expiring = [(one["host"], one["found"]) for one in findings if "expires soon" in one["what"]]
    assert expiring == [("gpu01", "in 3 days")]
    assert "the key of gpu01 expires in 3 days" in reef.cluster.shoal("status").stdout
    rotated = reef.cluster.json("keys", "rotate", "tailscale")["rotated"]
    assert [sorted(one["hosts"]) for one in rotated] == [sorted(NAMES)]
    after = reef.tailnet.nodes()
    assert {name: node["ip"] for name, node in after.items()} == {name: node["ip"] for name, node in before.items()}
    assert all(after[name]["key"] != before[name]["key"] for name in before), "every host has a new key"
    assert not after[f"{CLUSTER}-gpu01"]["expires"]
    assert reef.srun("-N3", "hostname") == list(NAMES)


def test_a_host_that_is_thrown_out_is_found_and_let_in_again(reef: Reef) -> None:
    address = reef.tailnet.nodes()[f"{CLUSTER}-gpu02"]["ip"]
    reef.tailnet.throw_out(f"{CLUSTER}-gpu02")
    findings = reef.cluster.json("check", status=None)["findings"]
    assert ("gpu02", "error", "is not in the tailnet") in {(one["host"], one["level"], one["what"]) for one in findings}

    reef.tailnet.revoke(True)
    refused = reef.cluster.json("up", status=None)["failures"]["gpu02"]
    assert "invalid key: unable to validate API key" in refused["message"] and reef.tailnet.key not in json.dumps(
        refused
    )
    assert refused["fix"].startswith("create a new auth key for `network.auth_key`")
    assert reef.lent.shell("gpu02", "find /etc/shoal -name 'tailscale.key*'") == "", "no key stays behind"

    reef.tailnet.revoke(False)
    assert reef.cluster.json("up")["whole"]
    assert reef.tailnet.nodes()[f"{CLUSTER}-gpu02"]["ip"] == address
    assert reef.srun("-N3", "hostname") == list(NAMES)


def test_a_host_that_comes_into_the_tailnet_at_another_address_is_followed(reef: Reef) -> None:
    before = reef.tailnet.nodes()[f"{CLUSTER}-gpu01"]["ip"]
    reef.tailnet.forget(f"{CLUSTER}-gpu01")
    assert reef.cluster.json("up")["whole"]
    after = reef.tailnet.nodes()[f"{CLUSTER}-gpu01"]["ip"]
    assert after != before
    assert listening(reef, "gpu01") == {f"{after}:6818"}
    assert reef.srun("-N3", "hostname") == list(NAMES)
    assert reef.cluster.json("up")["unchanged"]


def test_after_a_reboot_of_the_controller_and_a_node_all_is_back_by_itself(reef: Reef) -> None:
    for name in ("gpu01", "desktop"):
        asyncio.run(SandboxFaults(cache_dir()).reboot(MADE_AS, name))
    three = "timeout 60 srun -N3 hostname 2> /dev/null | sort | xargs"
    wanted = " ".join(NAMES)
    reef.cluster.wait("jobs run", lambda: reef.lent.shell("desktop", three, status=None).strip() == wanted)


# ---- links


@pytest.fixture
def slow(reef: Reef) -> Iterator[None]:
    """gpu02 behind a line of a few Mbit/s, both ways."""
    layout = Layout(cache_dir(), MADE_AS)
    limit = ["root", "tbf", "rate", f"{SLOW_MBIT}mbit", "burst", "16kb", "latency", "100ms"]
    out = ["tc", "qdisc"], ["dev", layout.link(layout.hosts()["gpu02"])]
    inside = ["ip", "netns", "exec", layout.namespace("gpu02"), "tc", "qdisc"], ["dev", "eth0"]
    for words, device in (out, inside):
        subprocess.run([*words, "replace", *device, *limit], check=True, timeout=LIMIT)
    try:
        yield
    finally:
        for words, device in (out, inside):
            subprocess.run([*words, "del", *device, "root"], check=True, timeout=LIMIT)


def test_a_slow_link_shows_as_slow_and_keeps_jobs_among_the_others(reef: Reef, slow: None) -> None:
    found = reef.cluster.json("bench", "links")
    speeds = {(link["source"], link["target"]): link["mbit"] for link in found["links"]}
    assert found["whole"] and len(speeds) == 6
    fast = min(speeds["desktop", "gpu01"], speeds["gpu01", "desktop"])
    assert all(speed < 3 * SLOW_MBIT for pair, speed in speeds.items() if "gpu02" in pair), speeds
    assert fast > 5 * 3 * SLOW_MBIT, speeds
    assert found["groups"] == [["desktop", "gpu01"], ["gpu02"]]
    assert reef.cluster.json("up")["whole"]
    topology = reef.lent.shell("desktop", "cat /etc/slurm/topology.conf")
    assert "SwitchName=near-desktop Nodes=desktop,gpu01" in topology and "SwitchName=near-gpu02 Nodes=gpu02" in topology
    assert reef.srun("-N2", "hostname") == ["desktop", "gpu01"]
    assert reef.srun("-N1", "-w", "gpu02", "hostname") == ["gpu02"]


def test_the_commands_of_the_page_run_as_they_stand(reef: Reef) -> None:
    environment = {**reef.cluster.env, "PATH": f"{Path(sys.executable).parent}:{os.environ['PATH']}"}
    said = {}
    for line in (line for block in commands(ROOT / "docs/tailscale.md") for line in block):
        done = subprocess.run(
            ["bash", "-c", line],
            cwd=reef.cluster.file.parent,
            env=environment,
            capture_output=True,
            text=True,
            timeout=LIMIT,
        )
        assert done.returncode == 0, f"{line}\n{done.stdout}\n{done.stderr}"
        said[line] = done.stdout
    assert len(said) == 3
    shown = said["shoal bench links"]
    assert "bandwidth from row to column" in shown and "\x1b[" not in shown
    if "no host is far from the others" in shown:  # a busy machine may have held one of them up
        assert reef.cluster.json("up")["whole"]
        assert reef.srun("-N3", "hostname") == list(NAMES)


def test_after_ctrl_c_no_measuring_program_is_left(reef: Reef) -> None:
    purpose = program_text("link_probe").strip('"').split(":")[0]  # the text of the program is one of its arguments
    programs = f"pgrep -f '[{purpose[0]}]{purpose[1:]}' || true"
    running = reef.cluster.background("bench", "links", "--seconds", "30")
    try:
        reef.cluster.wait("it measures", lambda: reef.lent.shell("gpu01", programs) != "")
        running.send_signal(signal.SIGINT)
        assert running.wait(timeout=120) == 130
    finally:
        with contextlib.suppress(ProcessLookupError):
            kill(running)
    for name in NAMES:
        reef.cluster.wait("it is gone", lambda name=name: reef.lent.shell(name, programs) == "")


# ---- the end: what comes now changes the hosts for good


def test_a_host_without_tun_joins_with_a_network_stack_of_its_own(reef: Reef) -> None:
    reef.lent.shell("gpu02", "tailscale logout; systemctl stop tailscaled; umount /dev/net/tun; rm /dev/net/tun")
    found = reef.cluster.json("plan", status=None)
    assert ("gpu02", "file /etc/shoal/tailscaled.env") in {(one["host"], one["what"]) for one in found["changes"]}
    # Slurm on that host has no way to the others, and `up` would wait for it without end.
    joining = reef.cluster.background("up")
    try:
        read_until(joining, "preparation")
    finally:
        kill(joining)
    status = json.loads(reef.lent.shell("gpu02", "tailscale status --json"))
    assert (status["BackendState"], status["TUN"]) == ("Running", False)
    assert "--tun=userspace-networking" in reef.lent.shell(
        "gpu02", "systemctl show -p ExecStart tailscaled; pgrep -af tailscaled"
    )


def test_down_takes_the_hosts_out_of_the_tailnet(reef: Reef) -> None:
    reef.cluster.shoal("down", "--yes", "--force")
    assert not [name for name in reef.tailnet.nodes() if name.startswith(CLUSTER)]
    for name in NAMES:
        ours = "find /etc/shoal /etc/systemd/system/tailscaled.service.d -type f 2> /dev/null || true"
        assert reef.lent.shell(name, ours) == ""
        assert reef.lent.shell(name, "systemctl is-active tailscaled || true").strip() == "inactive"
