"""Which members reach which, as they say themselves."""

from __future__ import annotations

from tests.unit.plan.fake_world import World, host_facts, lab, spec_of

from shoal.agent.facts import Address, Facts
from shoal.agent.fake import FakeAgent
from shoal.hosts.api import Target
from shoal.hosts.fake import FakeConnector, FakeHost
from shoal.plan.fleet import Fleet
from shoal.plan.pairs import surroundings, unconnected
from shoal.verbs.check import check
from shoal.verbs.context import Context

ADDRESSES = {"c1": "10.0.0.1", "n1": "10.0.0.11", "n2": "10.0.0.12"}
SITES = """
cluster: reef
network: wireguard
controller: {host: {name: c1, address: 10.0.0.1}}
nodesets:
  near: {hosts: [{name: n1, address: 10.0.0.11}]}
  far: {hosts: [{name: f1, address: 192.168.1.5, port: 2222}], site: b}
"""


def silent(world: World, host: str, *addresses: str) -> None:
    world.agents[host].reach |= dict.fromkeys(addresses, "silent")


async def test_pairs_that_connect_are_not_spoken_of() -> None:
    world = lab()
    async with world.fleet() as fleet:
        assert await unconnected(world.spec, ADDRESSES, fleet, ADDRESSES) == []
    asked = [request for request in world.agents["n1"].requests if request["op"] == "reach"]
    assert asked[0]["targets"] == [["10.0.0.1", 6817], ["10.0.0.12", 6818]]


async def test_a_host_that_others_do_not_reach_is_told_with_who_and_why_and_what_to_open() -> None:
    world = lab()
    silent(world, "c1", "10.0.0.12")
    world.agents["n1"].reach["10.0.0.12"] = "No route to host"
    world.agents["n2"].reach["10.0.0.1"] = "refused"  # somebody is there, and that is all that is asked
    async with world.fleet() as fleet:
        findings = await unconnected(world.spec, ADDRESSES, fleet, ADDRESSES)
    assert [str(finding) for finding in findings] == [
        "n2: cannot be reached from c1,n1, found 10.0.0.12 port 6818: no answer, No route to host, open TCP port 6818 "
        "between the hosts, or join them by `network: wireguard`"
    ]


async def test_check_tells_of_pairs_before_there_is_a_cluster() -> None:
    world = lab()
    silent(world, "n1", "10.0.0.1")
    findings = await check(Context(world.spec, connector=world.connector, registry=tuple))
    told = [str(finding) for finding in findings if finding.level == "error"]
    assert told == [
        "c1: cannot be reached from n1, found 10.0.0.1 port 6817: no answer, open TCP port 6817 between the hosts, or "
        "join them by `network: wireguard`"
    ]


def sites(**reach: dict[str, str]) -> tuple[Fleet, dict[str, Facts], dict[str, FakeAgent]]:
    facts = {
        "c1": host_facts("c1", "10.0.0.1"),
        "n1": host_facts(
            "n1", "10.0.0.11", addresses=(Address("eth0", "10.0.0.11", 24), Address("ib0", "10.9.0.1", 24))
        ),
        "f1": host_facts("f1", "192.168.1.5"),
    }
    agents = {name: FakeAgent(fact, reach=reach.get(name, {})) for name, fact in facts.items()}
    hosts = [FakeHost(Target(name), {("python3",): agents[name].play}) for name in facts]
    targets = {name: Target(name, fact.addresses[0].address) for name, fact in facts.items()}
    return Fleet(targets, FakeConnector(*hosts)), facts, agents


async def test_hosts_find_out_where_the_others_answer() -> None:
    nobody = {"192.168.1.5": "silent"}
    fleet, facts, agents = sites(c1=nobody, n1=nobody, f1={"10.0.0.11": "silent", "10.0.0.1": "open"})
    async with fleet:
        found = await surroundings(spec_of(SITES), facts, fleet)
    assert {name: dict(fact.reaches) for name, fact in found.items()} == {
        "c1": {"n1": "10.0.0.11"},
        "n1": {"c1": "10.0.0.1"},
        "f1": {"c1": "10.0.0.1", "n1": "10.9.0.1"},
    }
    asked = next(request for request in agents["c1"].requests if request["op"] == "reach")
    assert ["192.168.1.5", 2222] in asked["targets"]
    assert ["192.168.1.5", 51820] in asked["targets"]


async def test_a_refusal_from_another_site_may_be_a_routers() -> None:
    refused = {"192.168.1.5": "refused", "10.0.0.11": "refused"}
    fleet, facts, _ = sites(c1=refused)
    async with fleet:
        found = await surroundings(spec_of(SITES), facts, fleet)
    assert dict(found["c1"].reaches) == {"n1": "10.0.0.11"}
