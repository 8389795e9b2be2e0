"""Two sites on separate subnets, the far one behind NAT, connected only by WireGuard.

The tests share one cluster and run in the order of this file.
"""

import os
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
from tests.documents import ROOT, commands
from tests.e2e.cluster import LIMIT, ON_DEBIAN_12, SLOWNESS, Cluster, kill, running
from tests.e2e.torch_env import give_torch

from shoal.remote.agent.network import reach

COVERS = (
    "network/wireguard network/links network/addresses roles/wireguard plan/rotation_wireguard verbs/links "
    "remote/link_probe.py"
)
pytestmark = pytest.mark.sandbox

SPEC = """\
cluster: wg-sites
network: wireguard
controller: {provider: sandbox, memory: 1G}
nodesets:
  near: {provider: sandbox, count: 1, memory: 1G}
  fish: {provider: sandbox, count: 2, memory: 1G, site: b}
"""
DDP = """\
import socket
import torch
import torch.distributed as dist
from shoal.train import init, parallelize

run = init()
torch.manual_seed(run.env.rank)
model = parallelize(torch.nn.Linear(8, 8), "ddp")
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
for _ in range(5):
    optimizer.zero_grad()
    model(torch.randn(4, 8)).square().mean().backward()
    optimizer.step()
weights = [torch.empty(8, 8) for _ in range(run.env.world_size)]
dist.all_gather(weights, next(model.parameters()).detach())
assert all(torch.equal(weights[0], other) for other in weights)
print(socket.gethostname(), "has the same weights")
"""
HOSTS = ("controller", "near1", "fish1", "fish2")
SRUN = ("timeout", str(60 * SLOWNESS), "srun", f"--immediate={30 * SLOWNESS}")


@pytest.fixture(scope="module")
def cluster(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Cluster]:
    with running(tmp_path_factory.mktemp("wireguard"), SPEC) as made:
        yield made


def names(text: str) -> list[str]:
    return sorted(text.split())


def works(cluster: Cluster, node: str) -> bool:
    srun = f"timeout {20 * SLOWNESS} srun --immediate={10 * SLOWNESS}"
    return cluster.ssh("controller", f"{srun} -w {node} hostname").stdout == f"{node}\n"


def sessions(cluster: Cluster) -> dict[str, tuple[int, int, int]]:
    """The controller's sessions by the peer's address: the last handshake, and the bytes received and sent."""
    sessions_by_address = {}
    for line in cluster.on("controller", "wg", "show", "shoal0", "dump").splitlines()[1:]:
        _, _, _, allowed, handshake, received, sent, _ = line.split("\t")
        sessions_by_address[allowed.partition("/")[0]] = (int(handshake), int(received), int(sent))
    return sessions_by_address


def since(cluster: Cluster, host: str) -> str:
    """When the network of a host came up."""
    return cluster.on(host, "systemctl", "show", "-p", "ActiveEnterTimestampMonotonic", "shoal-wireguard")


def every_pair_connects(cluster: Cluster) -> None:
    assert [finding for finding in cluster.json("check")["findings"] if finding["level"] == "error"] == []


def test_second_up_has_no_changes_and_every_pair_connects(cluster: Cluster) -> None:
    again = cluster.json("up")
    assert (again["changed"], again["unready"]) == ([], [])
    every_pair_connects(cluster)


def test_up_keeps_a_working_link_when_probes_fail(cluster: Cluster) -> None:
    rule = f"ip daddr {cluster.instances()['near1'].address} tcp dport {{ 22, 51820 }} drop"
    chain = f"chain output {{ type filter hook output priority filter; {rule}; }}"
    cluster.on("fish2", "nft", f"table inet silence {{ {chain}; }}")
    try:
        assert cluster.json("up")["changed"] == []
    finally:
        cluster.on("fish2", "nft", "delete table inet silence")


def test_host_names_and_node_addresses_are_on_the_network(cluster: Cluster) -> None:
    report = cluster.on("fish1", "getent", "ahostsv4", *HOSTS)
    for number, host in enumerate(HOSTS, 1):
        assert f"10.77.0.{number} " in report
        assert cluster.on(host, "getent", "ahostsv4", host).split()[0] == f"10.77.0.{number}"
    assert "NodeAddr=10.77.0.3" in cluster.on("controller", "scontrol", "show", "node", "fish1")


def test_jobs_run_inside_a_site_by_default_and_across_sites_on_request(cluster: Cluster) -> None:
    inside = cluster.on("controller", *SRUN, "-N2", "hostname")
    assert names(inside) == ["fish1", "fish2"]
    assert names(cluster.on("fish1", *SRUN, "-w", "near1", "hostname")) == ["near1"]
    refused = cluster.ssh("controller", "timeout 30 srun -N3 hostname")
    assert refused.returncode != 0
    assert "no site has 3 nodes; a job that may span sites says how many: --switches=2" in refused.stderr
    across = cluster.on("controller", *SRUN, "-N3", "--switches=2", "hostname")
    assert names(across) == ["fish1", "fish2", "near1"]


def test_documented_command_spans_the_sites(cluster: Cluster) -> None:
    [[command]] = commands(ROOT / "docs/network.md")
    (cluster.file.parent / "train.py").write_text("import socket\nprint('I am', socket.gethostname())\n")
    environment = {**cluster.env, "PATH": f"{Path(sys.executable).parent}:{os.environ['PATH']}"}
    done = subprocess.run(
        ["bash", "-c", command], cwd=cluster.file.parent, env=environment, capture_output=True, text=True, timeout=LIMIT
    )
    assert done.returncode == 0, f"{done.stdout}\n{done.stderr}"
    assert all(f"I am {host}" in done.stdout for host in ("near1", "fish1", "fish2"))


def test_mpi_gets_the_interface_and_a_missing_mpirun_is_explained(
    cluster: Cluster, monkeypatch: pytest.MonkeyPatch
) -> None:
    """tests/e2e/test_mpi.py, in the matrix set, has Open MPI itself."""
    monkeypatch.chdir(cluster.file.parent)
    variables = ("OMPI_MCA_btl_tcp_if_include", "OMPI_MCA_oob_tcp_if_include", "UCX_NET_DEVICES")
    Path("mpi.py").write_text(f"import os\nprint(*map(os.environ.get, {variables}))\n")
    result = cluster.json("run", "--wait", "-N2", "--launcher", "pmix", "mpi.py")
    assert [line["text"] for line in result["lines"] if line["rank"] >= 0] == ["shoal0 shoal0 shoal0"] * 2, result
    error = cluster.shoal("run", "--wait", "-N2", "--launcher", "mpirun", "mpi.py", status=1).stderr
    assert "no mpirun of Open MPI on fish1,fish2" in error and "openmpi-bin" in error


@pytest.mark.matrix
@ON_DEBIAN_12
def test_ddp_job_trains_inside_a_site_by_default_and_across_sites_on_request(cluster: Cluster) -> None:
    packages = give_torch(cluster.name)
    (cluster.file.parent / "ddp.py").write_text(DDP)
    for arguments, hosts in (((), {"fish1", "fish2"}), (("--switches", "2"), {"near1", "fish1", "fish2"})):
        nodes = ("-N", str(len(hosts)), *arguments, "--export", f"PYTHONPATH={packages}")
        done = subprocess.run(
            cluster.line("run", *nodes, "--wait", "ddp.py"),
            cwd=cluster.file.parent, env=cluster.env, capture_output=True, text=True, timeout=LIMIT,
        )  # fmt: skip
        assert done.returncode == 0, f"{done.stdout}\n{done.stderr}"
        assert {host for host in HOSTS if f"{host} has the same weights" in done.stdout} == hosts, done.stdout


def test_each_host_has_its_own_private_key_readable_only_by_root(cluster: Cluster) -> None:
    key, peers = "/etc/shoal/wireguard.key", "/etc/shoal/wireguard-peers.conf"
    texts = {host: cluster.on(host, "sh", "-c", f"stat -c '%a %U' {key}; cat {key} {peers}") for host in HOSTS}
    private = {host: text.splitlines()[1] for host, text in texts.items()}
    assert len(set(private.values())) == len(HOSTS)
    for host, text in texts.items():
        assert text.splitlines()[0] == "600 root"
        assert not any(private[other] in text for other in HOSTS if other != host)


def test_slurm_listens_only_on_the_network_and_is_closed_from_outside(cluster: Cluster) -> None:
    listening = {
        "controller": cluster.on("controller", "ss", "-ltnH", "sport = :6817"),
        "fish1": cluster.on("fish1", "ss", "-ltnH", "sport = :6818"),
    }
    assert listening["controller"].split()[3] == "10.77.0.1:6817"
    assert listening["fish1"].split()[3] == "10.77.0.3:6818"
    # This machine is on the bridges of both sites and is no member.
    addresses = [str(target.address) for target in cluster.instances().values()]
    targets: list[list[object]] = [[address, port] for address in addresses for port in (6817, 6818, 60001)]
    assert set(reach(targets, 3.0)) == {"silent"}
    assert reach([[address, 22] for address in addresses], 60.0) == ["open"] * len(addresses)


@pytest.mark.matrix
def test_new_address_of_a_host_is_followed(cluster: Cluster) -> None:
    target = cluster.instances()["near1"]
    assert target.address
    site = target.address.rpartition(".")[0]
    old, new = target.address, f"{site}.200"
    # Else the kernel takes the second address away with the first.
    cluster.on("near1", "sh", "-c", "echo 1 > /proc/sys/net/ipv4/conf/eth0/promote_secondaries")
    cluster.on("near1", "ip", "address", "add", f"{new}/24", "dev", "eth0")
    move = "ip address {} {}/24 dev eth0; ip route replace default via {}.1; ping -c1 -w60 controller"
    try:
        assert at(cluster, new, move.format("delete", old, site)) == 0
        assert f"{new}:51820" in cluster.on("controller", "wg", "show", "shoal0", "endpoints")
        assert works(cluster, "near1")
    finally:
        at(cluster, new, move.format("add", old, site))
    cluster.on("near1", "ip", "address", "delete", f"{new}/24", "dev", "eth0")
    cluster.on("near1", "ping", "-c1", "-w60", "controller")


def at(cluster: Cluster, address: str, command: str) -> int:
    """A command on the host that has this address; its status."""
    options = ["-o", "StrictHostKeyChecking=no", "-o", "UserKnownHostsFile=/dev/null", "-o", "ConnectTimeout=10"]
    identity = str(cluster.instances()["near1"].identity)
    return subprocess.run(
        ["ssh", "-q", *options, "-i", identity, f"root@{address}", command], timeout=120 * SLOWNESS
    ).returncode


def test_lost_nat_state_is_restored_before_slurm_marks_nodes_down(cluster: Cluster) -> None:
    # Linux forgets whatever it translated to an address that goes away: the machine's own on the controller's site.
    address = str(cluster.instances()["controller"].address).rpartition(".")[0] + ".1"
    [link] = [line.split()[1] for line in ip("-4", "-o", "address").splitlines() if f" {address}/" in line]
    before = cluster.on("controller", "wg", "show", "shoal0", "endpoints")
    ip("address", "delete", f"{address}/24", "dev", link)
    ip("address", "add", f"{address}/24", "dev", link)
    assert names(cluster.on("controller", *SRUN, "-N2", "hostname")) == ["fish1", "fish2"]
    assert cluster.on("controller", "wg", "show", "shoal0", "endpoints") != before


def test_hosts_behind_nat_reconnect_to_a_hub_after_its_wireguard_dies(cluster: Cluster) -> None:
    before = since(cluster, "controller")
    cluster.on("controller", "systemctl", "kill", "--signal=KILL", "shoal-wireguard")
    cluster.wait("it is started again", lambda: since(cluster, "controller") != before)
    # Without a sign of life WireGuard would wait until its session is two minutes old.
    cluster.on("controller", "ping", "-c1", "-w60", "fish1")
    cluster.on("controller", "ping", "-c1", "-w60", "fish2")
    assert works(cluster, "fish1")


def test_host_without_its_interface_sends_no_network_traffic_elsewhere(cluster: Cluster) -> None:
    counted = """
nft -f - << 'END'
table inet leak {
    chain out { type filter hook output priority 0; ip daddr 10.77.0.0/16 oifname != "shoal0" counter; }
}
END
systemctl stop shoal-wireguard
ip route get 10.77.0.1
ping -c1 -w5 10.77.0.1
systemctl start shoal-wireguard
nft list table inet leak; nft delete table inet leak
"""
    output = cluster.ssh("fish1", f"{{ {counted} }} 2>&1").stdout
    assert "No route to host" in output and "Destination Host Unreachable" not in output, output
    assert "packets 0 bytes 0" in output, output
    cluster.wait("fish1 runs jobs again", lambda: works(cluster, "fish1"))


def ip(*arguments: str) -> str:
    """The command `ip` on the machine that the sandbox is on."""
    return subprocess.run(["ip", *arguments], check=True, capture_output=True, text=True, timeout=60).stdout


def test_members_join_and_leave_while_the_others_keep_their_sessions(cluster: Cluster) -> None:
    stay = ("controller", "near1", "fish1", "fish2")
    old, up_since = sessions(cluster), {host: since(cluster, host) for host in stay}
    cluster.edit("fish: {provider: sandbox, count: 2", "fish: {provider: sandbox, count: 3")
    assert cluster.json("up")["whole"]
    assert names(cluster.on("controller", *SRUN, "-N3", "hostname")) == ["fish1", "fish2", "fish3"]
    more = sessions(cluster)
    assert more.keys() == {*old, "10.77.0.5"}
    cluster.edit("fish: {provider: sandbox, count: 3", "fish: {provider: sandbox, count: 2")
    assert cluster.json("up")["removed"] == ["fish3"]
    less = sessions(cluster)
    assert less.keys() == old.keys()
    for address, (handshake, received, sent) in old.items():
        # A session that is started again has counters that start again.
        assert less[address][0] >= handshake
        assert less[address][1] >= more[address][1] >= received
        assert less[address][2] >= more[address][2] >= sent
    assert {host: since(cluster, host) for host in stay} == up_since


@pytest.mark.matrix  # test_lost_nat_state and test_tunnel_containers.py cut connections daily
def test_disconnected_site_reconnects(cluster: Cluster) -> None:
    for host in ("fish1", "fish2"):
        cluster.fault("cut", host)
    try:
        assert works(cluster, "near1")
        assert cluster.ssh("controller", "ping -c1 -W2 fish1").returncode != 0
    finally:
        for host in ("fish1", "fish2"):
            cluster.fault("heal", host)
    for host in ("fish1", "fish2"):
        cluster.wait(f"{host} runs jobs again", lambda host=host: works(cluster, host))


@pytest.mark.matrix  # the hub is rebooted daily
def test_rebooted_host_reconnects(cluster: Cluster) -> None:
    cluster.fault("reboot", "fish1")
    cluster.wait("fish1 runs jobs again", lambda: works(cluster, "fish1"))
    assert cluster.json("up")["changed"] == []


def test_hosts_behind_nat_reconnect_to_a_rebooted_hub(cluster: Cluster) -> None:
    cluster.fault("reboot", "controller")
    for host in ("near1", "fish1"):
        cluster.wait(f"{host} runs jobs again", lambda host=host: works(cluster, host))


KEY, KEYS = "/etc/shoal/wireguard.key", "cat /etc/shoal/wireguard.pub; wg show shoal0 public-key; wg show shoal0 peers"


def keys(cluster: Cluster) -> set[str]:
    """The public keys of all hosts. Each host's interface has the host's own, and as peers those of the others."""
    fields_by_host = {host: cluster.on(host, "sh", "-c", KEYS).split() for host in cluster.instances()}
    own = {host: fields[0] for host, fields in fields_by_host.items()}
    for host, (written, used, *peers) in fields_by_host.items():
        assert written == used
        assert sorted(peers) == sorted(key for other, key in own.items() if other != host)
    return set(own.values())


def job_from_options(cluster: Cluster, job: str) -> str:
    return cluster.on("controller", "scontrol", "show", "job", job)


def test_all_keys_rotate_while_a_job_runs_across_sites(cluster: Cluster) -> None:
    old = keys(cluster)
    wait = "srun sh -c 'touch /shared/on-$(hostname); while [ ! -e /shared/release ]; do sleep 0.2; done; hostname'"
    batch = ("sbatch", "--parsable", "-N3", "--switches=2", "-o/shared/out", f"--wrap={wait}")
    job = cluster.on("controller", *batch).strip()
    everywhere = [f"/shared/on-{host}" for host in ("fish1", "fish2", "near1")]
    cluster.wait("the job runs", lambda: bool(cluster.on("controller", "ls", *everywhere)))
    [report] = cluster.json("keys", "rotate", "wireguard")["rotated"]
    assert (sorted(report["hosts"]), report["finished"]) == (sorted(cluster.instances()), False)
    assert not keys(cluster) & old
    every_pair_connects(cluster)
    cluster.on("controller", "touch", "/shared/release")
    cluster.wait("the job has ended", lambda: "JobState=COMPLETED" in job_from_options(cluster, job))
    assert names(cluster.on("controller", "cat", "/shared/out")) == ["fish1", "fish2", "near1"]
    assert cluster.json("up")["changed"] == []


def test_next_rotation_finishes_a_killed_rotation(cluster: Cluster) -> None:
    old = keys(cluster)
    rotating = cluster.background("keys", "rotate", "wireguard")
    # There while new keys are being put in place, until all hosts were seen to use them. Looked at from outside,
    # where it takes no time.
    mark = cluster.provider.cache / f"sandbox/{cluster.name}/hosts/controller/upper/etc/shoal/wireguard.rotating"
    end = time.monotonic() + LIMIT
    while not mark.exists():
        assert rotating.poll() is None and time.monotonic() < end
        time.sleep(0.005)
    kill(rotating)
    [report] = cluster.json("keys", "rotate", "wireguard")["rotated"]
    assert report["finished"]
    assert len(keys(cluster)) == len(HOSTS) and not keys(cluster) & old
    assert cluster.on("fish1", "sh", "-c", f"ls {KEY}*").split() == [KEY]
    every_pair_connects(cluster)
    assert names(cluster.on("controller", *SRUN, "-N3", "--switches=2", "hostname")) == ["fish1", "fish2", "near1"]
