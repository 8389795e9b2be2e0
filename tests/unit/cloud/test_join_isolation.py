"""One rented machine whose facts break the code of a join: it is dropped with the cause, and the others join."""

import asyncio
from dataclasses import replace
from pathlib import Path
from typing import Any

from tests.support.cases import cases
from tests.support.fake_world import host_facts, spec_of
from tests.unit.cloud.test_join import ADDRESSES, HEALTHY, Reef, machine

from shoal.agent.facts import Address, Facts, FileFact
from shoal.cloud.providers.api import RentedInstance
from shoal.cloud.service.context import UNFIT_TYPE_PREFIX
from shoal.hosts.api import Result, Target
from shoal.network.tunnel import HOST_KEYS
from shoal.network.wireguard import PUBLIC_KEY
from shoal_simulators.fake_host import FakeAgent, FakeHost

PODS = spec_of("""
cluster: reef
network: wireguard
controller: {host: {name: c1, address: 10.0.0.1}}
nodesets:
  lab: {hosts: [{name: n1, address: 10.0.0.11}]}
  cloud: {provider: lambda, type: gpu_1x_a10, cpus: 4, memory: 15G, max: 4, lifetime: 2h}
  pods: {provider: runpod, type: NVIDIA A40, max: 2, cpus: 2, memory: 8G, gpus: 1}
providers: {lambda: {key: env:K}, runpod: {key: env:R}}
""")
POD = RentedInstance("p-1", "reef", "pods1", "tp", "up", "RUNNING", "203.0.113.9", 10400)


def pod_facts() -> Facts:
    keys = {HOST_KEYS[0]: FileFact(text="ssh-ed25519 AAAAPOD root@x7f3\n")}
    return host_facts("x7f3", "172.17.0.2", init="none", tun=False, files=keys)


class PodReef(Reef):
    """The same on WireGuard, with a rented container."""

    def __init__(self, tmp_path: Path, *numbers: int, **more: Any) -> None:
        super().__init__(tmp_path, *numbers, spec=PODS, **more)
        for name, agent in self.world.agents.items():
            key = {PUBLIC_KEY: FileFact(text=f"key-of-{name}=\n")}
            agent.facts = replace(agent.facts, modules=("wireguard",), files={**agent.facts.files, **key})
        self.add("pods1", pod_facts())

    def add(self, name: str, facts: Facts) -> None:
        world = self.world
        world.agents[name] = FakeAgent(facts)
        world.hosts[name] = FakeHost(Target(name), {("python3",): world.agents[name].play, HEALTHY: Result(0)})
        world.connector.hosts[name] = world.hosts[name]


async def test_rented_container_on_wireguard_does_not_block_other_joins(tmp_path: Path) -> None:
    reef = PodReef(tmp_path, 1)
    assert await reef.joiner.join({"pods1": POD}) == {"pods1": ""}
    names = reef.item("pods1", "block members in /etc/hosts")
    reef.others = {"pods1": POD}
    assert await reef.joiner.join({"cloud1": machine(1)}) == {"cloud1": ""}
    assert reef.item("pods1", "block members in /etc/hosts") == names, "it still finds the controller in its tunnel"
    reef.others = {"pods1": POD, "cloud1": machine(1)}
    await reef.joiner.remove_departed()


async def test_rented_container_below_its_nodeset_is_unfit(tmp_path: Path) -> None:
    reef = PodReef(tmp_path)
    reef.add("pods1", replace(pod_facts(), memory_mb=4000))
    said = "it has 4000 MB of memory and nodeset pods says 8192 MB (set `cpus: 2`, `memory: 4000M` there"
    assert (await reef.joiner.join({"pods1": POD}))["pods1"].startswith(f"{UNFIT_TYPE_PREFIX}{said}")
    assert not [key for key in reef.asked("pods1") if key.startswith(("package", "service"))]


@cases("address", "not an address", "10.0.0.300")
async def test_machine_with_invalid_facts_fails_alone(tmp_path: Path, address: str) -> None:
    reef = Reef(tmp_path, 1, 2, joined=(3,))
    for name in ("cloud2", "cloud3"):
        agent = reef.world.agents[name]
        agent.facts = replace(agent.facts, addresses=(Address("eth0", address, 24),))
    errors = await reef.joiner.join({"cloud1": machine(1), "cloud2": machine(2)})
    assert errors["cloud1"] == ""
    assert "its agent gives an answer that cannot be read" in errors["cloud2"]
    assert set(reef.members_known_to("c1")) == {*ADDRESSES, "cloud1", "cloud3"}


@cases("together", True, False)
async def test_machine_that_breaks_our_code_fails_alone(tmp_path: Path, together: bool) -> None:
    reef = Reef(tmp_path, 1, 2, joined=(3,))
    for name in ("cloud2", "cloud3"):
        agent = reef.world.agents[name]
        agent.facts = replace(agent.facts, hostname=None)  # type: ignore[arg-type]
    machines = {"cloud1": machine(1), "cloud2": machine(2)}
    groups = [machines] if together else [{name: one} for name, one in machines.items()]
    results = await asyncio.gather(*map(reef.joiner.join, groups))
    errors = {name: error for result in results for name, error in result.items()}
    assert errors["cloud1"] == ""
    assert errors["cloud2"].startswith("a bug in Shoal, with what this machine reports: ")
    assert set(reef.members_known_to("c1")) == {*ADDRESSES, "cloud1", "cloud3"}
