"""Rented machines without a rental service shut themselves down, on real hosts and by their own clocks.

Limits of an hour are shortened in the script that a machine boots with, or by setting back the time since when the
controller is silent. Run it by hand (`-m matrix`): it waits for minutes.
"""

import asyncio
from collections.abc import Iterator

import pytest
from tests.e2e.cluster import Cluster
from tests.e2e.leftovers import noted
from tests.e2e.simulated_clouds import Cloud, bill, printed, renting, submit

from shoal.cloud.providers import rental_provider
from shoal.cloud.providers.api import ProviderLogin
from shoal.cloud.service.boot import machine_script
from shoal.roles.rented import CONTROLLER_TIMEOUT_S
from shoal.sandbox.provider import SandboxProvider
from shoal_simulators.instances import InstanceOrder, MachineType, Profile
from shoal_simulators.market import Market
from shoal_simulators.sandbox_backend import SandboxBackend

COVERS = "remote/watchdog.sh remote/end_pod.py remote/rental_lead.sh cloud/service/boot"
pytestmark = [pytest.mark.sandbox, pytest.mark.matrix, pytest.mark.timeout(1500)]

TYPES = (MachineType("cpu", "", 0, 0, 1, 1, 1.0, places={"here": 9}),)
OFF = "el-off"
SOON = 30
"""Seconds from its boot until a machine that nobody has joined goes."""
ENOUGH = 300.0


def test_machine_that_never_joins_powers_itself_off() -> None:
    profile = Profile(user="root", boot_s=0.0, stop_s=0.0)
    with noted(OFF):
        assert asyncio.run(_phases(profile, machine_script(SOON))) == ["up", "error"]


async def _phases(profile: Profile, script: str) -> list[str]:
    """What becomes of a machine that is ordered with such a script, and of which nobody hears any more."""
    backend = SandboxBackend("lambda", OFF)
    await SandboxProvider().destroy(OFF, _quiet)
    await backend.open()
    try:
        market = Market(profile, TYPES, backend)
        instance = market.order(InstanceOrder("n1", "cpu", "here", user_data=script), "m1")
        seen: list[str] = []
        async with asyncio.timeout(ENOUGH):
            while "error" not in seen:
                await asyncio.sleep(0.2)
                market.update()
                if instance.phase in ("up", "error") and instance.phase not in seen:
                    seen.append(instance.phase)
        return seen
    finally:
        await backend.close()
        await SandboxProvider().destroy(OFF, _quiet)


NAME = "el-dead"
KEY = "sk-e2e-0123456789abcdef"
SPEC = f"""\
cluster: {NAME}
controller: {{provider: sandbox, memory: 1G}}
providers:
  acme: {{kind: sandbox, url: "URL-OF-sandbox", key: "env:SANDBOX_KEY"}}
nodesets:
  burst: {{provider: acme, type: cpu, max: 1, idle: 10s, cpus: 1, memory: 1G}}
"""
ON_NODE = "ssh -q -i /etc/shoal/elastic/id_ed25519 -o StrictHostKeyChecking=no -o UserKnownHostsFile=/dev/null"


@pytest.fixture(scope="module")
def rented(tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[Cluster, str]]:
    with renting(tmp_path_factory.mktemp("dead"), SPEC, Cloud("sandbox", KEY)) as (cluster, urls):
        yield cluster, urls["sandbox"]


def off(url: str) -> set[str]:
    """The nodes whose machines are switched off, as their cloud has it."""

    async def ask() -> set[str]:
        at = rental_provider(ProviderLogin("acme", "sandbox", KEY, url))
        try:
            return {instance.node for instance in await at.instances(NAME) if instance.state in ("stopped", "error")}
        finally:
            await at.close()

    return asyncio.run(ask())


def test_node_without_its_controller_powers_off_and_is_released_later(
    rented: tuple[Cluster, str],
) -> None:
    cluster, url = rented
    job = submit(cluster, "burst1", "hostname; sleep 3600")
    cluster.wait("the job runs", lambda: bool(printed(cluster, job)), seconds=400)
    cluster.on("controller", "systemctl", "stop", "shoal-elastic", "slurmctld")

    def on_node(command: str) -> str:
        return cluster.ssh("controller", f"{ON_NODE} root@burst1 '{command}'").stdout.strip()

    cluster.wait("the silence is noted", lambda: on_node("cat /run/shoal-watchdog/silent").isdigit(), seconds=300)
    assert off(url) == set()
    on_node(f"echo $(($(date +%s) - {CONTROLLER_TIMEOUT_S})) > /run/shoal-watchdog/silent")
    cluster.wait("the node goes that heard nothing for an hour", lambda: off(url) == {"burst1"}, seconds=300)
    [machine] = bill(url)["machines"]
    assert not machine["ended"]  # this cloud bills what is switched off

    cluster.on("controller", "systemctl", "start", "slurmctld", "shoal-elastic")
    cluster.wait("it is given back", lambda: machine["id"] in _ended_machines(url), seconds=300)


def _ended_machines(url: str) -> set[str]:
    return {machine["id"] for machine in bill(url)["machines"] if machine["ended"]}


def _quiet(text: str, part: float) -> None: ...
