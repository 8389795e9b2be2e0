"""A cluster over a real tailnet (tests/e2e/tailnet.py): hosts join, are expelled and join again; links are measured."""

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
from pathlib import Path

import pytest
from tests.documents import ROOT, commands
from tests.e2e.cluster import LIMIT, kill, read_until
from tests.e2e.tailnet import TAG, needs_programs
from tests.e2e.tailscale_lab import NAMES, NODES, REUSABLE, SANDBOX, SLOW_MBIT, Lab, make_lab, slowest_answer
from tests.sandbox_faults import SandboxFaults

from shoal.local_files import cache_dir
from shoal.remote import program_text
from shoal.roles.tailscale import KEYRING, SOURCE, SURE_LOGOUT
from shoal.sandbox.layout import Layout

COVERS = "network/tailscale roles/tailscale remote/tailnet_join.py remote/link_probe.py verbs/links"
pytestmark = [pytest.mark.sandbox, needs_programs]


@pytest.fixture(scope="module")
def lab(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Lab]:
    with make_lab(tmp_path_factory.mktemp("tailnet")) as made:
        yield made


def test_host_without_the_package_got_its_source_from_up(lab: Lab) -> None:
    assert "signed-by=" in lab.hosts.shell("gpu02", f"cat {SOURCE}")
    assert lab.hosts.shell("gpu02", f"stat -c '%a %U' {SOURCE} {KEYRING}").split() == ["644", "root", "644", "root"]
    assert "100.64." in lab.hosts.shell("gpu02", "tailscale ip -4")


def test_cluster_runs_over_the_addresses_in_the_tailnet(lab: Lab) -> None:
    nodes = lab.tailnet.nodes()
    assert set(nodes) == {*NODES.values()}
    assert all(node["tags"] == [TAG] for node in nodes.values()), "the tags of the key"
    addresses = lab.tailnet.addresses()
    shown = {node["name"]: node["address"] for node in lab.cluster.json("status")["nodes"]}
    assert shown == {name: addresses[NODES[name]] for name in NAMES}
    assert lab.srun("-N3", "hostname") == list(NAMES)
    conf = lab.hosts.shell("desktop", "cat /etc/slurm/slurm.conf")
    assert f"SlurmctldHost=desktop({shown['desktop']})" in conf


@pytest.mark.parametrize("port", [6817, 6818])
def test_slurm_does_not_answer_outside_the_tailnet(lab: Lab, port: int) -> None:
    """This machine is on the hosts' bridge, and is not a member."""
    address = lab.hosts.instances["desktop"].target.address
    with pytest.raises(TimeoutError):
        socket.create_connection((str(address), port), timeout=2).close()


def test_slurm_listens_only_on_the_tailnet_address(lab: Lab) -> None:
    addresses = {node["name"]: node["address"] for node in lab.cluster.json("status")["nodes"]}
    assert listening(lab, "desktop") == {f"{addresses['desktop']}:6817", f"{addresses['desktop']}:6818"}
    for name in ("gpu01", "gpu02"):
        assert listening(lab, name) == {f"{addresses[name]}:6818"}


def listening(lab: Lab, name: str) -> set[str]:
    """Where Slurm's daemons listen on a host."""
    lines = lab.hosts.shell(name, "ss -ltnH '( sport = :6817 or sport = :6818 )'").splitlines()
    return {line.split()[3] for line in lines}


def test_daemon_started_before_the_tailnet_waits_for_its_address(lab: Lab) -> None:
    lab.hosts.shell("gpu01", "systemctl stop slurmd tailscaled; systemctl start --no-block slurmd")
    try:
        waits = "systemctl is-active slurmd; pgrep -f '[a]ddress show to' || true"
        lab.cluster.wait("it waits", lambda: len(lab.hosts.shell("gpu01", waits, status=None).split()) > 1)
        assert lab.hosts.shell("gpu01", "systemctl is-active slurmd", status=None).strip() == "activating"
    finally:
        lab.hosts.shell("gpu01", "systemctl start tailscaled")
    lab.cluster.wait("it listens", lambda: len(listening(lab, "gpu01")) == 1)
    three = "timeout 60 srun -N3 hostname 2> /dev/null | sort | xargs"
    lab.cluster.wait("jobs run", lambda: lab.hosts.shell("desktop", three, status=None).split() == list(NAMES))


def test_auth_key_is_not_on_the_hosts_after_they_join(lab: Lab) -> None:
    for name in NAMES:
        output = lab.hosts.shell(
            name, f"grep -rlF {lab.cluster.env['TS_AUTHKEY']} /etc /var /run /tmp /root /home 2> /dev/null || true"
        )
        assert output == "", f"{name}: {output}"


def test_idle_member_is_not_reported_as_relayed(lab: Lab) -> None:
    # A daemon that has just started shows its relay until packets have found the direct path.
    lab.hosts.shell("desktop", "systemctl restart tailscaled")

    def is_back() -> bool:
        return '"BackendState": "Running"' in lab.hosts.shell("desktop", "tailscale status --json", status=None)

    lab.cluster.wait("it is back", is_back)
    ways = {member["name"]: member["way"] for member in lab.cluster.json("status")["tailnet"]["members"]}
    assert "relayed" not in ways.values(), ways
    assert "through a relay" not in lab.cluster.shoal("check", status=None).stdout
    lab.cluster.wait("jobs run", lab.runs_on_all)
    ways = {member["name"]: member["way"] for member in lab.cluster.json("status")["tailnet"]["members"]}
    assert ways == dict.fromkeys(NAMES, "direct")


def test_relayed_link_is_reported_and_works(lab: Lab) -> None:
    chain = "chain out {\ntype filter hook output priority 0\nmeta l4proto udp drop\n}"
    lab.hosts.shell("gpu02", f"nft -f - <<'END'\ntable inet blocked {{\n{chain}\n}}\nEND\n")
    try:
        lab.cluster.wait("it is relayed", lambda: "gpu02 relayed by home, slowly" in lab.cluster.shoal("status").stdout)
        assert "gpu02: the controller reaches it through a relay" in lab.cluster.shoal("check", status=None).stdout
        lab.cluster.wait("jobs run", lab.runs_on_all)
    finally:
        lab.hosts.shell("gpu02", "nft delete table inet blocked")
    lab.cluster.wait("it is direct", lambda: "relayed" not in lab.cluster.shoal("status").stdout)


def test_expiring_key_is_reported_and_rotation_keeps_slurm_answering(lab: Lab) -> None:
    before = lab.tailnet.nodes()
    soon = time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime(time.time() + 3.5 * 86400))
    lab.tailnet.expire(NODES["gpu01"], soon)

    def expiring() -> list[tuple[str, str]]:
        findings = lab.cluster.json("check", status=None)["findings"]
        return [(finding["host"], finding["found"]) for finding in findings if "expires soon" in finding["what"]]

    told = f"tailscale status --json | grep -c '{soon[:13]}' || true"
    lab.cluster.wait("the host hears of it", lambda: int(lab.hosts.shell("gpu01", told)) > 0)
    assert expiring() == [("gpu01", "in 3 days")]
    assert "the key of gpu01 expires in 3 days" in lab.cluster.shoal("status").stdout

    rotated: list[dict[str, list[str]]] = []
    during = slowest_answer(lab, lambda: rotated.extend(lab.cluster.json("keys", "rotate", "tailscale")["rotated"]))
    print(f"slowest answer of Slurm during a rotation: {during:.2f} s")
    assert [sorted(rotation["hosts"]) for rotation in rotated] == [sorted(NAMES)]
    assert lab.runs_on_all(), "no link is lost afterwards"
    after = lab.tailnet.nodes()
    assert {name: node["ip_addresses"] for name, node in after.items()} == {
        name: node["ip_addresses"] for name, node in before.items()
    }
    assert all(after[name]["node_key"] != before[name]["node_key"] for name in before), "every host has a new key"
    lab.tailnet.keep(NODES["gpu01"])  # a login does not change what the administrator of a Headscale has set


def expel(lab: Lab) -> None:
    """End the key of gpu02, where it is in the tailnet."""
    state = "tailscale status --json --peers=false | grep BackendState"
    if '"Running"' in lab.hosts.shell("gpu02", state):
        lab.tailnet.expire(NODES["gpu02"])
        lab.cluster.wait("it is out", lambda: "NeedsLogin" in lab.hosts.shell("gpu02", state, status=None))


def test_expired_host_is_reported_and_joins_again(lab: Lab) -> None:
    expel(lab)
    address = lab.tailnet.addresses()[NODES["gpu02"]]
    findings = lab.cluster.json("check", status=None)["findings"]
    assert ("gpu02", "error", "is not in the tailnet") in {
        (finding["host"], finding["level"], finding["what"]) for finding in findings
    }
    assert lab.cluster.json("up")["whole"]
    assert lab.tailnet.addresses()[NODES["gpu02"]] == address


def test_rejected_key_is_reported_by_up_and_is_nowhere(lab: Lab) -> None:
    expel(lab)
    lab.tailnet.revoke_key(lab.set_key(*REUSABLE))
    refused = lab.cluster.json("up", status=None)["failures"]["gpu02"]
    assert "expired" in refused["message"] and "has expired or was revoked" in refused["fix"]
    assert lab.cluster.env["TS_AUTHKEY"] not in json.dumps(refused)
    assert lab.hosts.shell("gpu02", "find /etc/shoal -name 'tailscale.key*'") == "", "no key stays behind"


@pytest.fixture
def outside(lab: Lab) -> None:
    """gpu02 is out of the tailnet, until the test of the single-use key. `join` runs there alone what `up` runs."""
    expel(lab)


def join(lab: Lab, key: str, *flags: str, host: str = "gpu02") -> str:
    """What the program that joins a host prints; nothing when it has joined. It does not wait long for a server."""
    program = program_text("tailnet_join").replace("UNREACHABLE_TIMEOUT_S = 15", "UNREACHABLE_TIMEOUT_S = 3")
    up = f"--hostname={NODES[host]} --reset --force-reauth --login-server={lab.tailnet.url} {' '.join(flags)}"
    script = (
        f"cat > /root/key <<'END'\n{key}\nEND\ncat > /root/join.py <<'END'\n{program}\nEND\n"
        f"python3 /root/join.py {lab.tailnet.url} /root/key false {up}; "
        "rm /root/join.py; test ! -e /root/key || echo the key is left"
    )
    text = lab.hosts.shell(host, script)
    assert key not in text and "/root/key" not in text and "the key is left" not in text, text
    return text


def test_expired_key_is_named(lab: Lab, outside: None) -> None:
    key = lab.tailnet.create_key("--reusable", "--expiration", "1s", "--tags", TAG)
    time.sleep(1.5)
    text = join(lab, key)
    assert "expired" in text.splitlines()[0] and "has expired or was revoked" in text


def forged_key(lab: Lab) -> str:
    """Of the form of a key, and made by no server."""
    key = lab.tailnet.create_key(*REUSABLE)
    return key[:-8] + ("A" * 8 if not key.endswith("A" * 8) else "B" * 8)


def test_key_of_no_server_is_named(lab: Lab, outside: None) -> None:
    text = join(lab, forged_key(lab))
    assert lab.tailnet.url in text.splitlines()[-1] and "`network.login_server`" in text, text


def test_used_key_is_named(lab: Lab, outside: None) -> None:
    single = lab.tailnet.create_key("--expiration", "24h", "--tags", TAG)
    assert join(lab, single) == ""
    expel(lab)
    text = join(lab, single)
    assert "already used" in text.splitlines()[0] and "for a single host" in text, text


def test_tags_that_the_server_does_not_permit_are_explained(lab: Lab, outside: None) -> None:
    lab.tailnet.delete(NODES["gpu02"])  # of a node that it has, the server ignores the tags
    text = join(lab, lab.tailnet.create_key(*REUSABLE), "--advertise-tags=tag:other")
    assert "tags" in text.splitlines()[0] and "`tagOwners`" in text, text


def test_unreachable_server_and_untrusted_certificate_are_named(lab: Lab, outside: None) -> None:
    key = forged_key(lab)  # tailscaled goes on trying, and would join later with a good one
    own = "/usr/local/share/ca-certificates"
    trust = "update-ca-certificates --fresh > /dev/null && systemctl restart tailscaled"  # it reads them once
    lab.hosts.shell("gpu02", f"mkdir /root/trusted && mv {own}/*.crt /root/trusted && {trust}")
    try:
        text = join(lab, key)
    finally:
        lab.hosts.shell("gpu02", f"mv /root/trusted/*.crt {own} && rmdir /root/trusted && {trust}")
    assert f"the certificate of {lab.tailnet.url} is not trusted" in text and "update-ca-certificates" in text
    lab.tailnet.stop()
    try:
        text = join(lab, key)
    finally:
        lab.tailnet.start()
    assert f"cannot reach {lab.tailnet.url}: " in text and "start the control server" in text


def test_single_use_key_brings_one_host_in(lab: Lab, outside: None) -> None:
    lab.set_key("--expiration", "24h", "--tags", TAG)
    assert lab.cluster.json("up")["whole"]
    assert lab.runs_on_all()
    lab.set_key(*REUSABLE)


def test_deleted_host_is_reported_and_up_brings_it_back(lab: Lab) -> None:
    before = lab.tailnet.nodes()[NODES["gpu01"]]["id"]
    lab.tailnet.delete(NODES["gpu01"])

    others = ("desktop", "gpu02")

    def is_seen() -> bool:
        return any(NODES["gpu01"] in lab.hosts.shell(name, "tailscale status --json") for name in others)

    lab.cluster.wait("no other host sees it", lambda: not is_seen())
    findings = lab.cluster.json("check", status=None)["findings"]
    assert ("gpu01", "error") in {(finding["host"], finding["level"]) for finding in findings}
    shown = lab.cluster.shoal("up").stdout
    assert "no changes" not in shown, shown
    assert lab.tailnet.nodes()[NODES["gpu01"]]["id"] != before
    assert listening(lab, "gpu01") == {f"{lab.tailnet.addresses()[NODES['gpu01']]}:6818"}
    assert lab.runs_on_all()
    assert lab.cluster.json("up")["unchanged"]


def test_cluster_and_later_up_need_neither_key_nor_control_server(lab: Lab) -> None:
    key = lab.cluster.env.pop("TS_AUTHKEY")
    lab.tailnet.stop()
    try:
        assert lab.cluster.json("up")["unchanged"]
        assert lab.runs_on_all()
        assert lab.cluster.json("status")["tailnet"]["state"] == "Running"
    finally:
        lab.tailnet.start()
        lab.cluster.env["TS_AUTHKEY"] = key


@pytest.mark.matrix  # tests/e2e/test_cluster.py and test_wireguard.py reboot hosts daily
def test_members_are_back_after_a_reboot_of_controller_and_node(lab: Lab) -> None:
    for name in ("gpu01", "desktop"):
        asyncio.run(SandboxFaults(cache_dir()).reboot(SANDBOX, name))
    lab.cluster.wait("jobs run", lab.runs_on_all)


# ---- links


@pytest.fixture
def slow(lab: Lab) -> Iterator[None]:
    """gpu02 behind a line of a few Mbit/s, both ways."""
    layout = Layout(cache_dir(), SANDBOX)
    limit = ["root", "tbf", "rate", f"{SLOW_MBIT}mbit", "burst", "16kb", "latency", "100ms"]
    out = ["tc", "qdisc"], ["dev", layout.link(layout.hosts()["gpu02"])]
    inside = ["ip", "netns", "exec", layout.namespace("gpu02"), "tc", "qdisc"], ["dev", "eth0"]
    for command, device in (out, inside):
        subprocess.run([*command, "replace", *device, *limit], check=True, timeout=LIMIT)
    try:
        yield
    finally:
        for command, device in (out, inside):
            subprocess.run([*command, "del", *device, "root"], check=True, timeout=LIMIT)


def test_slow_link_is_reported_and_excluded_from_multi_node_jobs(lab: Lab, slow: None) -> None:
    report = lab.cluster.json("bench", "links")
    speeds = {(link["source"], link["target"]): link["mbit"] for link in report["links"]}
    assert report["whole"] and len(speeds) == 6
    fast = min(speeds["desktop", "gpu01"], speeds["gpu01", "desktop"])
    assert all(speed < 3 * SLOW_MBIT for pair, speed in speeds.items() if "gpu02" in pair), speeds
    assert fast > 5 * 3 * SLOW_MBIT, speeds
    assert report["groups"] == [["desktop", "gpu01"], ["gpu02"]]
    assert lab.cluster.json("up")["whole"]
    topology = lab.hosts.shell("desktop", "cat /etc/slurm/topology.conf")
    assert "SwitchName=near-desktop Nodes=desktop,gpu01" in topology and "SwitchName=near-gpu02 Nodes=gpu02" in topology
    assert lab.srun("-N2", "hostname") == ["desktop", "gpu01"]
    assert lab.srun("-N1", "-w", "gpu02", "hostname") == ["gpu02"]


def test_documented_commands_run(lab: Lab) -> None:
    environment = {**lab.cluster.env, "PATH": f"{Path(sys.executable).parent}:{os.environ['PATH']}"}
    output = {}
    for line in (line for block in commands(ROOT / "docs/tailscale.md") for line in block):
        done = subprocess.run(
            ["bash", "-c", line],
            cwd=lab.cluster.file.parent,
            env=environment,
            capture_output=True,
            text=True,
            timeout=LIMIT,
        )
        assert done.returncode == 0, f"{line}\n{done.stdout}\n{done.stderr}"
        output[line] = done.stdout
    assert len(output) == 3
    shown = output["shoal bench links"]
    assert "bandwidth from row to column" in shown and "\x1b[" not in shown
    if "no host is far from the others" in shown:  # a busy machine may have held one of them up
        assert lab.cluster.json("up")["whole"]
        assert lab.srun("-N3", "hostname") == list(NAMES)


def test_no_link_probe_remains_after_ctrl_c(lab: Lab) -> None:
    purpose = program_text("link_probe").strip('"').split(":")[0]  # the text of the program is one of its arguments
    programs = f"pgrep -f '[{purpose[0]}]{purpose[1:]}' || true"
    running = lab.cluster.background("bench", "links", "--seconds", "30")
    try:
        lab.cluster.wait("it measures", lambda: lab.hosts.shell("gpu01", programs) != "")
        running.send_signal(signal.SIGINT)
        assert running.wait(timeout=120) == 130
    finally:
        with contextlib.suppress(ProcessLookupError):
            kill(running)
    for name in NAMES:
        lab.cluster.wait("it is gone", lambda name=name: lab.hosts.shell(name, programs) == "")


# ---- the end: what comes now changes the hosts for good


def test_host_without_tun_joins_with_userspace_networking(lab: Lab) -> None:
    lab.hosts.shell("gpu02", f"{SURE_LOGOUT}; systemctl stop tailscaled; umount /dev/net/tun; rm /dev/net/tun")
    plan = lab.cluster.json("plan", status=None)
    assert ("gpu02", "file /etc/shoal/tailscaled.env") in {
        (change["host"], change["what"]) for change in plan["changes"]
    }
    # Slurm on that host has no way to the others, and `up` would wait for it without end.
    joining = lab.cluster.background("up")
    try:
        read_until(joining, "preparation")
    finally:
        kill(joining)
    status = json.loads(lab.hosts.shell("gpu02", "tailscale status --json"))
    assert (status["BackendState"], status["TUN"]) == ("Running", False)
    assert "--tun=userspace-networking" in lab.hosts.shell(
        "gpu02", "systemctl show -p ExecStart tailscaled; pgrep -af tailscaled"
    )


def test_down_logs_the_hosts_out(lab: Lab) -> None:
    lab.cluster.shoal("down", "--yes", "--force")
    # The server keeps listing hosts with tags until somebody deletes them.
    lab.cluster.wait("they are out", lambda: not any(node.get("online") for node in lab.tailnet.nodes().values()))
    for name in NAMES:
        ours = "find /etc/shoal /etc/systemd/system/tailscaled.service.d -type f 2> /dev/null || true"
        assert lab.hosts.shell(name, ours) == ""
        assert lab.hosts.shell(name, "systemctl is-active tailscaled || true").strip() == "inactive"


def test_ephemeral_host_leaves_nothing_behind(lab: Lab) -> None:
    for node in lab.tailnet.nodes():
        lab.tailnet.delete(node)
    lab.hosts.shell("gpu01", "systemctl start tailscaled")
    assert join(lab, lab.tailnet.create_key("--ephemeral", "--expiration", "24h"), host="gpu01") == ""
    [node] = lab.tailnet.nodes().values()
    assert not node.get("tags")
    lab.hosts.shell("gpu01", SURE_LOGOUT)
    lab.cluster.wait("the server forgets it", lambda: not lab.tailnet.nodes())
