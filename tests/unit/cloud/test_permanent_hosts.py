"""Permanent hosts learn of rented nodes from the rental service, and joins do not wait for that."""

from dataclasses import replace
from pathlib import Path

import pytest
from tests.support.fake_world import host_facts
from tests.unit.cloud.test_join import ADDRESSES, Reef, machine
from tests.unit.cloud.test_join_isolation import PODS, PodReef

from shoal.agent.document import Block
from shoal.agent.facts import Facts, FileFact
from shoal.cloud.service import join as joining
from shoal.cloud.service.membership import permanent_targets
from shoal.hosts.api import Target
from shoal.network.tunnel import AUTHORIZED, HOST_KEYS
from shoal.network.wireguard import PEERS
from shoal.roles.assembly import assemble
from shoal.roles.component import Cluster, Stage
from shoal.roles.elastic import PUBLIC_KEY, ElasticComponent
from shoal.roles.node_logins import KNOWN_HOSTS
from shoal.spec.member import Member

N1_KEY = "ssh-ed25519 AAAAC3NzaC1lZDI1NTE5AAAAIJ0pkqJmTqgMUhUvdFwDGXbAgFXSNbUsTQoBo1SJbpT1"
BLOCK = f"block members in {KNOWN_HOSTS}"
OWN_LINES = "# BEGIN shoal rental service\nold\n# END shoal rental service\n"


def with_permanent_host(reef: Reef) -> Reef:
    """The same, where n1 answers and the controller has its host key."""
    lines = f"# BEGIN shoal members\nn1,10.0.0.11 {N1_KEY}\n# END shoal members\n"
    c1 = reef.world.agents["c1"]
    c1.facts = replace(c1.facts, files={**c1.facts.files, KNOWN_HOSTS: FileFact(text=lines)})
    for name in ("cloud1", "cloud2"):
        if agent := reef.world.agents.get(name):
            key = {HOST_KEYS[0]: FileFact(text=f"ssh-ed25519 AAAA{name} root@{name}\n")}
            agent.facts = replace(agent.facts, files={**agent.facts.files, **key})
    PodReef.add(reef, "n1", host_facts("n1", "10.0.0.11", modules=("wireguard",)))  # type: ignore[arg-type]
    return reef


async def test_permanent_host_gets_names_firewall_and_host_keys_of_rented_nodes(tmp_path: Path) -> None:
    reef = with_permanent_host(Reef(tmp_path, 1, 2))
    assert await reef.joiner.join({"cloud1": machine(1)}) == {"cloud1": ""}
    assert reef.asked("n1") == [], "a join does not wait for permanent hosts"
    assert reef.joiner.members_changed.is_set()
    await reef.joiner.update_permanent_hosts()
    assert reef.members_known_to("n1") == {**ADDRESSES, "cloud1": "10.0.0.21"}
    assert "10.0.0.21" in reef.item("n1", "file /etc/shoal/firewall.nft")["content"]
    assert "cloud1,10.0.0.21 ssh-ed25519 AAAAcloud1\n" in reef.item("n1", BLOCK)["content"]
    assert not [key for key in reef.asked("n1") if "slurm" in key or "package" in key]

    reef.world.agents["n1"].items.clear()
    await reef.joiner.update_permanent_hosts()
    assert reef.asked("n1") == [], "nothing has changed since"
    assert await reef.joiner.join({"cloud2": machine(2)}) == {"cloud2": ""}
    await reef.joiner.update_permanent_hosts()
    assert "cloud2" in reef.members_known_to("n1")


async def test_permanent_host_keeps_its_wireguard_peers(tmp_path: Path) -> None:
    reef = with_permanent_host(PodReef(tmp_path, 1))
    assert await reef.joiner.join({"cloud1": machine(1)}) == {"cloud1": ""}
    await reef.joiner.update_permanent_hosts()
    assert "cloud1" in reef.item("n1", BLOCK)["content"]
    assert f"file {PEERS}" not in reef.asked("n1"), "it reaches rented nodes through the hub"


async def test_unreachable_permanent_host_blocks_no_join_and_is_tried_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    reef = with_permanent_host(Reef(tmp_path, 1))
    host = reef.world.connector.hosts.pop("n1")
    assert await reef.joiner.join({"cloud1": machine(1)}) == {"cloud1": ""}
    reef.others = {"cloud1": machine(1)}
    await reef.joiner.update_permanent_hosts()
    reef.world.connector.hosts["n1"] = host
    await reef.joiner.update_permanent_hosts()
    assert reef.asked("n1") == [], "it is not tried at once"
    now = joining.time.monotonic()
    monkeypatch.setattr(joining.time, "monotonic", lambda: now + joining.UPDATE_RETRY_S)
    await reef.joiner.update_permanent_hosts()
    assert "cloud1" in reef.members_known_to("n1")


def cluster_of(**files: dict[str, str]) -> Cluster:
    def facts(name: str) -> Facts:
        texts = {path: FileFact(text=text) for path, text in files.get(name, {}).items()}
        found = host_facts(name, ADDRESSES[name], modules=("wireguard",))
        return replace(found, files={**found.files, **texts})

    return assemble(PODS, {name: facts(name) for name in ADDRESSES}, ADDRESSES)


def access(cluster: Cluster, name: str) -> list[str]:
    member: Member = next(one for one in cluster.members if one.name == name)
    items = ElasticComponent().documents(cluster, member).get(Stage.BASE, ())
    return [item.content for item in items if isinstance(item, Block) and item.path == AUTHORIZED]


def test_permanent_host_is_reached_as_root_with_its_recorded_host_key() -> None:
    cluster = cluster_of(c1={KNOWN_HOSTS: f"# BEGIN shoal members\nn1,10.77.0.2 {N1_KEY}\n# END shoal members\n"})
    target = Target("n1", cluster.addresses["n1"], 22, "root", host_key=N1_KEY)
    assert permanent_targets(cluster) == {"n1": target}
    assert permanent_targets(cluster_of()) == {}, "a host without a known key is left to `shoal up`"


def test_permanent_host_accepts_the_service_from_the_controller_only() -> None:
    cluster = cluster_of(c1={PUBLIC_KEY: "ssh-ed25519 AAAA shoal reef\n"})
    address = cluster.addresses["c1"]
    assert access(cluster, "n1") == [f'restrict,from="{address}" ssh-ed25519 AAAA shoal reef\n']
    assert access(cluster, "c1") == []


def test_former_access_of_the_service_is_removed() -> None:
    key = {PUBLIC_KEY: "ssh-ed25519 AAAA shoal reef\n"}
    assert access(cluster_of(c1={**key, AUTHORIZED: OWN_LINES}), "c1") == [""], "the controller was a node before"
    assert access(cluster_of(n1={AUTHORIZED: OWN_LINES}), "n1") == [""], "the service has no key"
