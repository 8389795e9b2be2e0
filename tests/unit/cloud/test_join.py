"""Machines that answer become nodes: what is sent to which host, and the error for one that fails."""

import asyncio
import subprocess
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from tests.support.cases import cases
from tests.support.fake_world import World, host_facts, slurm_package, spec_of
from tests.unit.containers.test_image_runner import ALLOWED

from shoal.agent.facts import Cgroup, Cpu, Facts, FileFact
from shoal.agent.loader import COMMAND
from shoal.cloud.providers.api import RentedInstance
from shoal.cloud.service import join as joining
from shoal.cloud.service import join_checks as node_checks
from shoal.cloud.service.context import UNFIT_IMAGE_PREFIX, UNFIT_PREFIX, UNFIT_TYPE_PREFIX
from shoal.cloud.service.join import LiveJoiner
from shoal.cloud.service.membership import without_peers
from shoal.cloud.service.settings import ServiceSettings
from shoal.hosts.api import Result
from shoal.network.addresses import addresses_in, hosts_block
from shoal.network.wireguard import PEERS, Peer, peers_conf, peers_in
from shoal.remote import python_command
from shoal.roles.assembly import assemble
from shoal.roles.current_conf import CGROUP_CONF, HOSTS, SLURM_CONF
from shoal.roles.elastic import PUBLIC_KEY
from shoal.roles.rented import WATCHDOG
from shoal.slurm.conf import cgroup_conf, slurm_conf
from shoal.spec.containers import Containers
from shoal.spec.model import Spec
from shoal_simulators.fake_host import FakeConnector

SPEC = spec_of("""
cluster: reef
controller: {host: {name: c1, address: 10.0.0.1}}
nodesets:
  lab: {hosts: [{name: n1, address: 10.0.0.11}]}
  cloud: {provider: lambda, type: gpu_1x_a10, max: 4, lifetime: 2h, cpus: 4, memory: 15G}
providers: {lambda: {key: env:K}}
""")
ADDRESSES = {"c1": "10.0.0.1", "n1": "10.0.0.11"}
HEALTHY = python_command("probes", "gpus")


def machine(number: int, **changes: Any) -> RentedInstance:
    found = RentedInstance(
        f"i-{number}", "reef", f"cloud{number}", f"t{number}", "up", "active", f"10.0.0.{20 + number}"
    )
    return replace(found, user="ubuntu", created=1_800_000_000.0, **changes)


class Reef:
    """A controller with a cluster in force, and machines that were rented."""

    def __init__(
        self,
        tmp_path: Path,
        *numbers: int,
        joined: tuple[int, ...] = (),
        stale: str = "",
        spec: Spec = SPEC,
        confined: bool = True,
    ) -> None:
        own = {} if confined else {"cgroup": Cgroup()}
        static = {name: host_facts(name, address, modules=("wireguard",), **own) for name, address in ADDRESSES.items()}
        cluster = assemble(spec, static, ADDRESSES)
        known = {**cluster.addresses, **{f"cloud{n}": f"10.0.0.{20 + n}" for n in joined}}
        known |= {stale: "10.0.0.99"} if stale else {}
        texts = {
            SLURM_CONF: slurm_conf(cluster.conf),
            CGROUP_CONF: cgroup_conf(cluster.conf),
            HOSTS: f"# BEGIN shoal members\n{hosts_block(known)}# END shoal members\n",
            PUBLIC_KEY: "ssh-ed25519 AAAA shoal reef\n",
        }
        files = {path: FileFact(text=text) for path, text in texts.items()}
        c1 = replace(static["c1"], files={**static["c1"].files, **files}, packages=slurm_package("22.05.8-4"))
        facts: dict[str, Facts] = {"c1": c1}
        for number in (*numbers, *joined):
            facts[f"cloud{number}"] = host_facts(f"ip-{number}", f"10.0.0.{20 + number}")
        self.world = World(spec, facts)
        self.world.agents["c1"].items[f"file {SLURM_CONF}"] = {
            "kind": "file",
            "path": SLURM_CONF,
            "content": texts[SLURM_CONF],
        }
        self.answers(dict.fromkeys(facts, Result(0)))
        settings = ServiceSettings(spec, {}, "ssh-ed25519 AAAA", tmp_path / "id_ed25519")
        self.known_hosts = tmp_path / "known_hosts"
        self.others: dict[str, RentedInstance | None] = {f"cloud{number}": machine(number) for number in joined}
        self.joiner = LiveJoiner(
            settings,
            lambda: self.others,
            known_hosts=self.known_hosts,
            here=FakeConnector(self.world.hosts["c1"]),
            there=self._there,
        )

    def answers(self, health: Mapping[str, Result]) -> None:
        for name, result in health.items():
            self.world.hosts[name].answers[HEALTHY] = result

    def asked(self, name: str) -> list[str]:
        """The items that a host was brought to."""
        return list(self.world.agents[name].items)

    def item(self, name: str, key: str) -> dict[str, Any]:
        return self.world.agents[name].items[key]

    def members_known_to(self, name: str) -> dict[str, str]:
        """The addresses that a host received, by name."""
        block = self.item(name, "block members in /etc/hosts")["content"]
        return addresses_in(f"# BEGIN shoal members\n{block}# END shoal members\n", "members")

    def _there(self, known_hosts: Path) -> FakeConnector:
        known_hosts.write_text("met\n")
        return self.world.connector


async def test_joined_machine_is_announced_to_controller_and_rented_nodes(tmp_path: Path) -> None:
    reef = Reef(tmp_path, 1, 2, joined=(3,))
    assert await reef.joiner.join({"cloud1": machine(1), "cloud2": machine(2)}) == {"cloud1": "", "cloud2": ""}
    everyone = {**ADDRESSES, "cloud1": "10.0.0.21", "cloud2": "10.0.0.22", "cloud3": "10.0.0.23"}
    assert [reef.members_known_to(name) for name in ("c1", "cloud1", "cloud3")] == [everyone] * 3
    assert "10.0.0.21" in reef.item("c1", "file /etc/shoal/firewall.nft")["content"]
    options = reef.item("cloud1", "file /etc/default/slurmd")["content"]
    assert 'SLURMD_OPTIONS="--conf-server 10.0.0.1:6817 -b -N cloud1"' in options
    assert reef.item("cloud1", "file /etc/hostname")["content"] == "cloud1\n"
    assert str(1_800_000_000 + 7200) in reef.item("cloud1", f"file {WATCHDOG}")["content"]
    assert reef.asked("cloud1")[-1] == "service shoal-watchdog.timer"
    assert "service slurmd" not in reef.asked("cloud3"), "who takes jobs already is told who is new, and no more"
    assert not [key for key in reef.asked("c1") if "slurm" in key and key != f"file {SLURM_CONF}"]


async def test_machines_ready_together_are_announced_together(tmp_path: Path) -> None:
    reef = Reef(tmp_path, 1, 2, 3, 4)
    joins = [reef.joiner.join({f"cloud{number}": machine(number)}) for number in (1, 2, 3, 4)]
    assert await asyncio.gather(*joins) == [{f"cloud{number}": ""} for number in (1, 2, 3, 4)]
    told = [request for request in reef.world.agents["c1"].requests if request["op"] == "apply"]
    assert 1 <= len(told) < 4, "those that were ready while the first one was entered came in with one another"
    for name in ("c1", "cloud1", "cloud4"):
        assert reef.item(name, "block members in /etc/hosts")["content"].count("cloud") == 4


async def test_joining_machine_needs_a_single_login_and_agent(tmp_path: Path) -> None:
    reef = Reef(tmp_path, 1, 2)
    await reef.joiner.join({"cloud1": machine(1), "cloud2": machine(2)})
    for name in ("cloud1", "cloud2"):
        host = reef.world.hosts[name]
        assert (host.connects, host.argvs.count(COMMAND)) == (1, 1)
        assert host.closed


async def test_failed_join_does_not_block_other_machines_and_is_retried(tmp_path: Path) -> None:
    reef = Reef(tmp_path, 1, 2, 3)
    reef.world.agents["cloud2"].failing["service munge"] = "munged did not start"
    joins = [reef.joiner.join({f"cloud{number}": machine(number)}) for number in (1, 2, 3)]
    assert await asyncio.gather(*joins) == [
        {"cloud1": ""},
        {"cloud2": "service munge: munged did not start"},
        {"cloud3": ""},
    ]
    del reef.world.agents["cloud2"].failing["service munge"]
    assert await reef.joiner.join({"cloud2": machine(2)}) == {"cloud2": ""}


async def test_next_join_forgets_a_departed_machine(tmp_path: Path) -> None:
    reef = Reef(tmp_path, 1, stale="cloud4")
    reef.known_hosts.mkdir()
    (reef.known_hosts / "i-4").write_text("met\n")
    assert await reef.joiner.join({"cloud1": machine(1)}) == {"cloud1": ""}
    assert "cloud4" not in reef.item("c1", "block members in /etc/hosts")["content"]
    assert [path.name for path in reef.known_hosts.iterdir()] == ["i-1"]


async def test_departed_machine_is_forgotten_and_unlocated_machine_kept(tmp_path: Path) -> None:
    reef = Reef(tmp_path, joined=(1, 2, 3), stale="cloud4")
    reef.others = {"cloud1": machine(1), "cloud2": None}
    await reef.joiner.remove_departed()
    told = reef.members_known_to("c1")
    assert list(told) == ["c1", "n1", "cloud1", "cloud2"]
    assert reef.members_known_to("cloud1") == told
    assert reef.asked("cloud2") == [] and reef.asked("cloud3") == []
    del reef.world.agents["c1"].items["block members in /etc/hosts"]
    await reef.joiner.remove_departed()
    assert "block members in /etc/hosts" not in reef.asked("c1"), "nothing has changed, and nobody is bothered"


def test_keys_of_departed_machines_are_removed() -> None:
    peers = [Peer(name, name * 8, (f"10.77.0.{number}",)) for number, name in enumerate(("n1", "cloud1", "cloud2"), 2)]
    facts = Facts(files={PEERS: FileFact(text=peers_conf(peers, 51820))})
    assert peers_in(without_peers(facts, {"cloud2", "cloud3"}, 51820).text(PEERS)) == {
        peer.name: peer for peer in peers[:2]
    }
    assert without_peers(facts, {"cloud3"}, 51820) is facts


async def test_machine_keeps_the_features_of_jobs_in_images_that_it_can_run(tmp_path: Path) -> None:
    reef = Reef(tmp_path, 1, 2, 3, spec=SPEC.model_copy(update={"containers": Containers()}))
    for number, arch, result in ((1, "x86_64", Result(0)), (2, "aarch64", Result(0)), (3, "x86_64", Result(1))):
        agent = reef.world.agents[f"cloud{number}"]
        agent.facts = replace(agent.facts, arch=arch)
        reef.world.hosts[f"cloud{number}"].answers[node_checks.MAKE_NAMESPACES] = result
    joined = await reef.joiner.join({f"cloud{number}": machine(number) for number in (1, 2, 3)})
    assert joined == dict.fromkeys(("cloud1", "cloud2", "cloud3"), "")
    assert sorted(reef.world.slurm.updates) == [
        ("nodename=cloud1", "activefeatures=cloud,images,images-amd64"),
        ("nodename=cloud2", "activefeatures=cloud,images"),
        ("nodename=cloud3", "activefeatures=cloud"),
    ]


async def test_join_asks_nothing_about_images_where_no_job_runs_in_one(tmp_path: Path) -> None:
    reef = Reef(tmp_path, 1)
    await reef.joiner.join({"cloud1": machine(1)})
    assert node_checks.MAKE_NAMESPACES not in reef.world.hosts["cloud1"].argvs


@pytest.mark.skipif(not ALLOWED, reason="needs user namespaces")
@cases("limit, status", (10, 0), (0, 1))
def test_machine_without_user_namespaces_is_noticed(limit: int, status: int) -> None:
    line = f'echo {limit} > /proc/sys/user/max_user_namespaces && exec "$@"'
    inside = ("unshare", "--user", "--map-root-user", "sh", "-c", line, "sh")
    tried = subprocess.run((*inside, *node_checks.MAKE_NAMESPACES[-4:]), check=False, capture_output=True, text=True)
    assert (tried.returncode, "unshare failed" in tried.stderr) == (status, status == 1)


async def test_machine_with_broken_gpus_never_starts_slurmd(tmp_path: Path) -> None:
    reef = Reef(tmp_path, 1, 2)
    reef.answers({"cloud1": Result(1, stderr=b"1 GPUs were promised, and there are 0\n")})
    said = await reef.joiner.join({"cloud1": machine(1), "cloud2": machine(2)})
    assert said == {"cloud1": f"{UNFIT_PREFIX}1 GPUs were promised, and there are 0", "cloud2": ""}
    assert "service slurmd" not in reef.asked("cloud1")
    assert "service slurmd" in reef.asked("cloud2")


@cases(
    "facts, said",
    (
        {"cpu": Cpu(cpus=2, cores_per_socket=2)},
        "it has 2 CPUs and nodeset cloud says 4 (set `cpus: 2`, `memory: 15360M` there, or rent a larger type)",
    ),
    (
        {"memory_mb": 8000},
        "it has 8000 MB of memory and nodeset cloud says 15360 MB"
        " (set `cpus: 4`, `memory: 8000M` there, or rent a larger type)",
    ),
    (
        {"cgroup": Cgroup()},
        "Slurm confines jobs with cgroups here, and this machine has no writable cgroups"
        " (rent a type that has them; hosts of a sandbox: delete `cgroups: true`)",
    ),
    (
        {"cgroup": Cgroup(2, ("cpuset", "cpu", "devices"))},
        "Slurm confines jobs with cgroups here, and this machine has no writable memory"
        " (rent a type that has them; hosts of a sandbox: delete `cgroups: true`)",
    ),
)
async def test_machine_that_slurm_would_not_use_is_unfit_before_packages_are_installed(
    tmp_path: Path, facts: dict[str, Any], said: str
) -> None:
    reef = Reef(tmp_path, 1, 2)
    agent = reef.world.agents["cloud1"]
    agent.facts = replace(agent.facts, **facts)
    errors = await reef.joiner.join({"cloud1": machine(1), "cloud2": machine(2)})
    prefix = UNFIT_IMAGE_PREFIX if "cgroup" in facts else UNFIT_TYPE_PREFIX
    assert errors == {"cloud1": f"{prefix}{said}", "cloud2": ""}
    assert not [key for key in reef.asked("cloud1") if key.startswith(("package", "service"))]


async def test_machine_without_cgroups_joins_where_jobs_are_not_confined(tmp_path: Path) -> None:
    reef = Reef(tmp_path, 1, confined=False)
    agent = reef.world.agents["cloud1"]
    agent.facts = replace(agent.facts, cgroup=Cgroup())
    assert await reef.joiner.join({"cloud1": machine(1)}) == {"cloud1": ""}


async def test_unreachable_machine_does_not_delay_the_others(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(joining, "SSH_WAIT_S", 0.0)
    reef = Reef(tmp_path, 1, 2)
    reef.world.hosts["cloud2"].unreachable = True
    said = await reef.joiner.join({"cloud1": machine(1), "cloud2": machine(2)})
    assert said["cloud1"] == ""
    assert said["cloud2"]
    assert not said["cloud2"].startswith(UNFIT_PREFIX), "it may yet answer"


async def test_machine_with_newer_slurm_than_the_controller_is_unfit(tmp_path: Path) -> None:
    reef = Reef(tmp_path, 1)
    agent = reef.world.agents["cloud1"]
    agent.facts = replace(agent.facts, packages=slurm_package("24.11.5-4"))
    said = await reef.joiner.join({"cloud1": machine(1)})
    assert said == {
        "cloud1": f"{UNFIT_IMAGE_PREFIX}Slurm newer than the controller's: "
        "Slurm 24.11.5; the controller c1 has 22.05.8 and talks to 22.05"
    }


async def test_node_unregistered_or_rejected_by_slurm_is_reported(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(node_checks, "REGISTRATION_TIMEOUT_S", 0.01)
    reef = Reef(tmp_path, 1, 2)
    reef.world.slurm.states |= {"cloud1": "IDLE+CLOUD+POWERING_UP", "cloud2": "IDLE+CLOUD+INVALID_REG"}
    reef.world.slurm.reasons["cloud2"] = "gres/gpu count reported lower than configured (0 < 1)"
    assert await reef.joiner.join({"cloud1": machine(1), "cloud2": machine(2)}) == {
        "cloud1": "slurmd has not registered",
        "cloud2": f"{UNFIT_PREFIX}Slurm rejects it: gres/gpu count reported lower than configured (0 < 1)",
    }
