"""Rented machines in a real tailnet: a job starts them, the controller joins them, and they leave it with the job."""

from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path

import pytest
from tests.e2e.cluster import Cluster
from tests.e2e.existing_hosts import Lent, lent_hosts
from tests.e2e.simulated_clouds import IMPATIENT, UNFINISHED, Cloud, asleep, ended, printed, simulated, state, submit
from tests.e2e.tailnet import Tailnet, needs_programs, tailnet

from shoal.roles.tailscale import CONTROLLER_KEY
from shoal.spec.member import Shape

COVERS = "network/tailscale roles/tailscale remote/tailnet_join.py cloud/service/join"
pytestmark = [needs_programs, pytest.mark.sandbox, pytest.mark.matrix, pytest.mark.timeout(900)]

NAME = "tr-reef"
MACHINES = "{provider: acme, type: cpu, max: 2, idle: 20s, cpus: 1, memory: 1G}"
PODS = "{provider: acme, type: NVIDIA A40, region: EU-RO-1, max: 1, idle: 20s, cpus: 1, memory: 2G, gpus: 1}"


@dataclass
class Reef:
    cluster: Cluster
    lent: Lent
    tailnet: Tailnet
    url: str


def key_of(reef: Reef) -> str:
    return reef.cluster.env["TS_AUTHKEY"]


@pytest.fixture(scope="module")
def reef(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Reef]:
    with renting(
        tmp_path_factory.mktemp("tailnet"), NAME, Cloud("sandbox", "sk-e2e-0123456789abcdef"), MACHINES
    ) as made:
        yield made


@contextmanager
def renting(directory: Path, name: str, cloud: Cloud, nodeset: str) -> Iterator[Reef]:
    """A cluster of one host in a tailnet that rents nodes called `cloud1` and so on."""
    made_as = f"of-{name}"
    with ExitStack() as stack:
        lent = stack.enter_context(lent_hosts(made_as, {"controller": Shape(memory_mb=1024)}, name))
        network = stack.enter_context(tailnet(made_as))
        network.publish(lent, "controller")
        url = stack.enter_context(simulated(made_as, cloud))
        text = (
            f"cluster: {name}\n"
            f"network: {{kind: tailscale, auth_key: env:TS_AUTHKEY, login_server: {network.url}}}\n"
            f"controller: {{host: {lent.entry('controller')}, user: shoal, identity: {lent.identity}}}\n"
            f'providers: {{acme: {{kind: {cloud.kind}, url: "{url}", key: "env:{cloud.variable}"}}}}\n'
            f"nodesets: {{cloud: {nodeset}}}\n"
        )
        cluster = Cluster(directory, text)
        cluster.name = made_as  # by which its hosts are found
        # The server removes ephemeral nodes that log out; of others it keeps a record.
        key = network.create_key("--reusable", "--ephemeral", "--expiration", "24h")
        cluster.env |= {"TS_AUTHKEY": key, cloud.variable: cloud.key}
        try:
            assert cluster.json("up")["whole"]
            lent.shell("controller", IMPATIENT)
            yield Reef(cluster, lent, network, url)
        finally:
            cluster.shoal("down", "--force", "--yes", status=None)


def members(reef: Reef) -> dict[str, str]:
    return reef.tailnet.addresses()


def test_job_starts_machines_that_join_the_tailnet_and_compute_there(reef: Reef) -> None:
    assert set(members(reef)) == {f"{NAME}-controller"}
    listens = r"ss -ltnH 'sport = :6818' | awk '{print \$4}'"
    left = f"grep -rl '[h]{key_of(reef)[1:]}' /etc /var /run /tmp /root 2> /dev/null || true"
    job = submit(reef.cluster, "cloud[1-2]", f'srun sh -c "hostname; {listens}; {left}"')
    reef.cluster.wait("it is over", lambda: state(reef.cluster, job) not in UNFINISHED, seconds=400)
    joined = members(reef)
    assert state(reef.cluster, job) == "COMPLETED", printed(reef.cluster, job)
    assert set(joined) == {f"{NAME}-{name}" for name in ("controller", "cloud1", "cloud2")}
    rented = {name: joined[f"{NAME}-{name}"] for name in ("cloud1", "cloud2")}
    arguments = [*rented, *(f"{address}:6818" for address in rented.values())]
    assert sorted(printed(reef.cluster, job)) == sorted(arguments), "they listen there alone, and the secret is gone"
    shown = reef.lent.shell("controller", "scontrol -o show nodes")
    rules = reef.lent.shell("controller", "nft list table inet shoal")
    for address in rented.values():
        assert f"NodeAddr={address} " in shown and address in rules


def test_released_machines_log_out_and_their_addresses_leave_the_firewall(reef: Reef) -> None:
    gone = members(reef).keys() - {f"{NAME}-controller"}
    addresses = [members(reef)[name] for name in gone]
    reef.cluster.wait("they are given back", lambda: ended(reef.url), seconds=240)
    reef.cluster.wait("they have left", lambda: set(members(reef)) == {f"{NAME}-controller"}, seconds=240)
    rules = "nft list table inet shoal; cat /etc/hosts"
    reef.cluster.wait(
        "they are forgotten", lambda: not [a for a in addresses if a in reef.lent.shell("controller", rules)], 240
    )
    reef.cluster.wait("all nodes sleep", lambda: asleep(reef.cluster), seconds=240)


def test_tailnet_secret_on_the_controller_is_readable_only_by_root(reef: Reef) -> None:
    assert reef.lent.shell("controller", f"cat {CONTROLLER_KEY}; stat -c ' %U %a' {CONTROLLER_KEY}").split() == [
        *(key_of(reef), "root", "600")
    ]
    look = f"grep -rl {key_of(reef)} / --exclude-dir=proc --exclude-dir=sys --exclude-dir=shared 2> /dev/null || true"
    output = reef.lent.shell("controller", f"for user in slurm nobody; do runuser -u $user -- sh -c '{look}'; done")
    assert output == ""
    report = reef.lent.shell("controller", "journalctl; cat /proc/[0-9]*/cmdline; true")
    assert "shoal-elastic" in report and key_of(reef) not in report


def test_later_up_needs_no_secret_and_keeps_the_controller_copy(reef: Reef) -> None:
    secret = reef.cluster.env.pop("TS_AUTHKEY")
    try:
        assert reef.cluster.json("up")["whole"]
    finally:
        reef.cluster.env["TS_AUTHKEY"] = secret
    assert reef.lent.shell("controller", f"cat {CONTROLLER_KEY}") == secret


def test_container_computes_through_its_tunnel_without_joining_the_tailnet(tmp_path: Path) -> None:
    cloud = Cloud("runpod", "rp-e2e-0123456789abcdef", ("--boot-seconds", "1"))
    with renting(tmp_path, "tr-pods", cloud, PODS) as made:
        job = "timeout 300 sbatch --wait --parsable --gpus=1 -o /dev/null --wrap 'srun true'"
        done = made.lent.shell("controller", job).split()[0]
        assert state(made.cluster, done) == "COMPLETED"
        assert set(members(made)) == {"tr-pods-controller"}
        assert made.lent.shell("controller", f"test ! -e {CONTROLLER_KEY} && echo none").strip() == "none"
