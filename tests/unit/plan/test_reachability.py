"""Which members reach which, as their agents report it."""

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from tests.support.cases import cases
from tests.support.fake_world import LAB, World, host_facts, lab, spec_of

from shoal.agent.facts import Address, Facts, FileFact
from shoal.hosts.api import Result, Target
from shoal.network.wireguard import PEERS, PUBLIC_KEY, Peer, peers_conf
from shoal.plan.connections import Fleet
from shoal.plan.reachability import HANDSHAKE_MAX_AGE_S, PAIR_TIMEOUT_S, add_reachability, unreachable_findings
from shoal.spec.finding import Finding
from shoal.verbs.check import check
from shoal.verbs.context import Context
from shoal_simulators.fake_host import FakeAgent, FakeConnector, FakeHost

FOUND = {"c1": {"n1": "10.0.0.11"}, "n1": {"c1": "10.0.0.1"}, "f1": {"c1": "10.0.0.1", "n1": "10.9.0.1"}}
NAT = {"192.168.1.5": "silent"}
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


async def test_reachable_pairs_give_no_finding() -> None:
    world = lab()
    async with world.fleet() as fleet:
        assert await unreachable_findings(world.spec, ADDRESSES, fleet, ADDRESSES) == []
    asked = [request for request in world.agents["n1"].requests if request["op"] == "reach"]
    assert asked[0]["targets"] == [["10.0.0.1", 6817], ["10.0.0.12", 6818]]


async def test_unreachable_host_is_reported_with_sources_cause_and_port() -> None:
    world = lab()
    silent(world, "c1", "10.0.0.12")
    world.agents["n1"].reach["10.0.0.12"] = "No route to host"
    world.agents["n2"].reach["10.0.0.1"] = "refused"  # a host answers, which is enough
    async with world.fleet() as fleet:
        findings = await unreachable_findings(world.spec, ADDRESSES, fleet, ADDRESSES)
    assert [str(finding) for finding in findings] == [
        "n2: cannot be reached from c1,n1, found 10.0.0.12 port 6818: no answer, No route to host, open TCP ports "
        "6817, 6818, 60001-63000 between the hosts (jobs use others, too), or join them by `network: wireguard`"
    ]


class Listening(FakeAgent):
    """An agent that records the hosts it should reach, in one list for all agents; no answer the first `deaf` times."""

    asked: list[tuple[str, list[str]]]
    deaf = 0

    def _answer(self, request: dict[str, Any]) -> list[dict[str, Any]]:
        events = super()._answer(request)
        if request["op"] == "reach" and request["targets"]:
            self.asked.append((self.facts.hostname, [address for address, _ in request["targets"]]))
            if self.deaf:
                self.deaf -= 1
                events[0]["answers"] = ["silent"] * len(request["targets"])
        return events


async def over_wireguard(*, deaf: int) -> tuple[list[Finding], list[tuple[str, list[str]]]]:
    """The result for three hosts, the last of which is `deaf` that many times; and the order of the queries."""
    world = lab(LAB + "network: wireguard\n")
    asked: list[tuple[str, list[str]]] = []
    for name, host in world.hosts.items():
        agent = Listening(world.agents[name].facts)
        agent.asked, agent.deaf = asked, deaf if name == "n2" else 0
        host.answers = {**host.answers, ("python3",): agent.play}
    async with world.fleet() as fleet:
        return await unreachable_findings(world.spec, ADDRESSES, fleet, ADDRESSES), asked


async def test_wireguard_pairs_are_probed_in_both_directions_in_turn() -> None:
    findings, asked = await over_wireguard(deaf=0)
    assert findings == [] and sorted(asked[:2]) == [("c1", ["10.0.0.11", "10.0.0.12"]), ("n1", ["10.0.0.12"])]
    assert sorted(asked[2:]) == [("n1", ["10.0.0.1"]), ("n2", ["10.0.0.11", "10.0.0.1"])]


async def test_silent_wireguard_pair_is_retried_and_then_reported() -> None:
    findings, asked = await over_wireguard(deaf=1)
    assert (findings, asked[4:]) == ([], [("n2", ["10.0.0.11", "10.0.0.1"])])
    findings, asked = await over_wireguard(deaf=2)
    assert [(finding.host, finding.what) for finding in findings] == [
        ("c1", "cannot be reached from n2"),
        ("n1", "cannot be reached from n2"),
    ]


async def test_check_reports_pairs_before_the_cluster_exists() -> None:
    world = lab()
    silent(world, "n1", "10.0.0.1")
    findings = await check(Context(world.spec, connector=world.connector, registry=tuple))
    [told] = [finding for finding in findings if finding.level == "error"]
    assert str(told).startswith("c1: cannot be reached from n1, found 10.0.0.1 port 6817: no answer, open TCP ports")


def sites(**reach: dict[str, str]) -> tuple[dict[str, Facts], dict[str, FakeAgent]]:
    infiniband = (Address("eth0", "10.0.0.11", 24), Address("ib0", "10.9.0.1", 24))
    facts = {
        "c1": host_facts("c1", "10.0.0.1"),
        "n1": host_facts("n1", "10.0.0.11", addresses=infiniband),
        "f1": host_facts("f1", "192.168.1.5"),
    }
    return facts, {name: FakeAgent(fact, reach=reach.get(name, {})) for name, fact in facts.items()}


async def reached(facts: dict[str, Facts], agents: Mapping[str, FakeAgent], shakes: Any = None) -> dict[str, Any]:
    """Who reaches whom. A host without an agent does not answer; `shakes` is WireGuard's output."""
    shell = {} if shakes is None else {("sh", "-c"): shakes}
    hosts = [
        FakeHost(Target(name), {("python3",): agents[name].play, **shell})
        if name in agents
        else FakeHost(Target(name), unreachable=True)
        for name in facts
    ]
    targets = {name: Target(name, fact.addresses[0].address) for name, fact in facts.items()}
    async with Fleet(targets, FakeConnector(*hosts)) as fleet:
        found = await add_reachability(spec_of(SITES), facts, fleet)
    return {name: dict(fact.reaches) for name, fact in found.items()}


async def test_hosts_probe_the_addresses_of_the_others() -> None:
    facts, agents = sites(c1=NAT, n1=NAT, f1={"10.0.0.11": "silent", "10.0.0.1": "open"})
    assert await reached(facts, agents) == FOUND
    asked = next(request for request in agents["c1"].requests if request["op"] == "reach")
    assert ["192.168.1.5", 2222] in asked["targets"] and ["192.168.1.5", 51820] in asked["targets"]


async def test_refused_connection_from_another_site_does_not_count_as_reachable() -> None:
    found = await reached(*sites(c1={"192.168.1.5": "refused", "10.0.0.11": "refused"}))
    assert found["c1"] == {"n1": "10.0.0.11"}


class BusyAgent(FakeAgent):
    """An agent whose host gets answers from `slow` addresses only with a long timeout."""

    slow: tuple[str, ...] = ()

    def _answer(self, request: dict[str, Any]) -> list[dict[str, Any]]:
        events = super()._answer(request)
        if request["op"] == "reach" and request["seconds"] < PAIR_TIMEOUT_S:
            for index, (address, _) in enumerate(request["targets"]):
                if address in self.slow:
                    events[0]["answers"][index] = "silent"
        return events


# As a first run has joined them: the far host calls the two others, and is not called.
CALLS = {
    "c1": {"n1": "10.0.0.11:51820", "f1": ""},
    "n1": {"c1": "10.0.0.1:51820", "f1": ""},
    "f1": {"c1": "10.0.0.1:51820", "n1": "10.9.0.1:51820"},
}
NUMBERS = {"c1": 1, "n1": 2, "f1": 3}


def written(name: str) -> dict[str, FileFact]:
    """The network's files on a host after a first run."""
    peers = [Peer(to, f"key-of-{to}", (f"10.77.0.{NUMBERS[to]}",), where) for to, where in CALLS[name].items()]
    return {PUBLIC_KEY: FileFact(text=f"key-of-{name}\n"), PEERS: FileFact(text=peers_conf(peers, 51820))}


async def second_look(*, slow: dict[str, tuple[str, ...]], shakes: Result | bytes = b"", **reach: Any) -> Any:
    """The result in a network that was joined before; `shakes` is WireGuard's output on the far host."""
    facts = {name: replace(fact, files={**fact.files, **written(name)}) for name, fact in sites()[0].items()}
    agents = {name: BusyAgent(fact, reach={**NAT, **reach.get(name, {})}) for name, fact in facts.items()}
    for name, addresses in slow.items():
        agents[name].slow = addresses
    return await reached(facts, agents, shakes)


async def test_host_that_answered_before_gets_more_time() -> None:
    slow = {"c1": ("10.0.0.11", "10.9.0.1"), "f1": ("10.0.0.1", "10.0.0.11", "10.9.0.1")}
    assert await second_look(slow=slow) == FOUND


async def test_chosen_address_stays_while_reachable() -> None:
    # A first choice would be 10.0.0.11, the address that n1 shares with the controller's network.
    assert await second_look(slow={"f1": ("10.9.0.1",)}) == FOUND
    moved = await second_look(slow={}, f1={"10.9.0.1": "silent"})
    assert moved["f1"] == {"c1": "10.0.0.1", "n1": "10.0.0.11"}


SILENT = {"10.0.0.1": "silent", "10.77.0.1": "silent"}


@cases(
    "shakes, stays",
    (f"9000\nkey-of-c1\t{9000 - HANDSHAKE_MAX_AGE_S + 1}\n".encode(), True),
    (Result(1), True),  # WireGuard itself does not answer: the other host may still be reachable
    (f"9000\nkey-of-c1\t{9000 - HANDSHAKE_MAX_AGE_S}\n".encode(), False),
    (b"9000\nkey-of-c1\t0\n", False),
)
async def test_link_ends_only_when_silent_and_without_a_recent_handshake(shakes: Result | bytes, stays: bool) -> None:
    found = await second_look(slow={}, shakes=shakes, f1=SILENT)
    assert ("c1" in found["f1"]) == stays and found["f1"]["n1"] == "10.9.0.1" and found["c1"] == FOUND["c1"]


async def test_host_lost_during_the_probe_keeps_its_links() -> None:
    facts, agents = sites(c1=NAT, n1=NAT)
    facts = {name: replace(fact, files={**fact.files, **written(name)}) for name, fact in facts.items()}
    del agents["f1"]
    assert await reached(facts, agents) == FOUND


async def test_first_probe_waits_for_slow_hosts_with_keys() -> None:
    key = {PUBLIC_KEY: FileFact(text="key")}
    for files, wanted in ((key, {"c1": "10.0.0.1", "n1": "10.0.0.11"}), ({}, {})):
        facts = {name: replace(fact, files={**fact.files, **files}) for name, fact in sites()[0].items()}
        agents = {name: BusyAgent(fact, reach=NAT) for name, fact in facts.items()}
        agents["f1"].slow = ("10.0.0.1", "10.0.0.11", "10.9.0.1")
        found = await reached(facts, agents)
        assert found["f1"] == wanted and "f1" not in found["c1"]
