"""`shoal check`, over a cluster in memory."""

from dataclasses import replace
from typing import Any

import pytest
from tests.support.cases import cases
from tests.support.fake_clusters import Sandbox, context_of, raised
from tests.support.fake_world import LAB, World, lab, spec_of

from shoal.agent.facts import Disk, Neighbour
from shoal.errors import ProviderError, VersionMismatch
from shoal.spec.finding import Finding
from shoal.spec.members import default_spec
from shoal.verbs.check import check
from shoal.verbs.context import Context, requests
from shoal.verbs.up import plan, up
from shoal_simulators.fake_provider import FakeProvider


async def test_check_of_a_running_cluster_has_no_findings(world: World, context: Context) -> None:
    before = {name: len(agent.requests) for name, agent in world.agents.items()}
    assert await check(context) == []
    for name, agent in world.agents.items():
        assert {request["op"] for request in agent.requests[before[name] :]} <= {"facts", "check", "reach", "exit"}


async def test_check_reports_all_problems_worst_first() -> None:
    world = lab(n1={"disks": (Disk("/", 20_000, 300), Disk("/data", 20_000, 300))})
    context = await raised(world)
    world.hosts["n2"].unreachable = True
    world.slurm.states = {"n1": "IDLE+DRAIN", "n2": "DOWN*"}
    world.slurm.reasons["n1"] = "bad fan"
    warning = Finding("warning", "weights of one", path="nodesets.lab")
    edited = replace(context_of(world, LAB + "  long: {nodesets: [lab]}\n"), warnings=(warning,))
    errors = [
        "n2: does not answer within 10 s, is the host up?",
        "n1: little space on /, found 300 MB, free at least 1 GB",
        "n2: Slurm cannot use the node, found down+not_responding, run `shoal up`; `shoal status` shows the state",
    ]
    assert [str(finding) for finding in await check(edited)] == [
        *errors,
        "nodesets.lab: weights of one",
        "n1: is drained and takes no jobs, found bad fan (by root 2026-01-01T00:00:00), when that is solved, run "
        "`shoal node resume n1`",
        "changes are due on c1, `shoal plan` shows them, `shoal up` makes them",
    ]
    world.slurm.states = {"n1": "IDLE*", "n2": "DOWN*"}
    *found, resumed = [(finding.level, str(finding)) for finding in await check(context)]
    assert found == [("error", text) for text in errors]
    assert resumed == (
        "warning",
        "n1: has just been resumed, and Slurm waits for its answer, found idle+not_responding, if it stays so, run "
        "`shoal doctor --node n1`",
    )


async def test_images_with_versions_that_cannot_talk_are_errors_before_hosts_are_made() -> None:
    provider = FakeProvider()
    text = (
        "cluster: reef\ncontroller: {provider: sandbox}\n"
        "nodesets:\n  new: {provider: sandbox, count: 1, image: debian13}\n"
    )
    context = Context(spec_of(text), providers=lambda name: provider)
    errors = [finding for finding in await check(context) if finding.level == "error"]
    assert [(finding.host, finding.what) for finding in errors] == [("new1", "Slurm newer than the controller's")]
    for verb in (plan, up):
        with pytest.raises(VersionMismatch, match="nothing was changed"):
            await verb(context)
    assert await provider.instances("reef") == []


@cases("state, what", ("failed", "slurmctld does not run (failed)"), ("active", "slurmctld does not answer"))
async def test_dead_slurmctld_is_an_error(world: World, context: Context, state: str, what: str) -> None:
    world.slurm.broken = "Unable to contact slurm controller\n"
    agent = world.agents["c1"]
    agent.facts = replace(agent.facts, services={**agent.facts.services, "slurmctld": state})
    assert [str(finding) for finding in await check(context) if finding.level == "error"] == [
        f"c1: {what}, run `shoal up`; its log: `shoal ssh c1 journalctl -u slurmctld`"
    ]


async def test_new_node_in_the_file_is_a_change_and_not_an_error(world: World) -> None:
    wider = context_of(world, LAB.replace("controller: {", "controller: {compute: true, "))
    assert [(finding.level, finding.what) for finding in await check(wider)] == [("info", "changes are due on c1")]


async def test_check_of_a_missing_sandbox_reports_its_obstacles() -> None:
    sandbox = Sandbox()
    sandbox.provider.findings = [Finding("error", "not root", fix="run it with sudo")]
    assert [(finding.level, str(finding)) for finding in await check(sandbox.context())] == [
        ("error", "not root, run it with sudo"),
        ("info", "not made yet: controller,fish[1-2], run `shoal up`"),
    ]


async def test_check_without_the_controller_reports_its_other_findings() -> None:
    world = lab(n1={"disks": (Disk("/var", 20_000, 300),)})
    world.hosts["c1"].unreachable = True
    assert [finding.host for finding in await check(context_of(world))] == ["c1", "n1"]


async def test_provider_that_cannot_list_its_instances_is_an_error() -> None:
    class Mute(FakeProvider):
        async def instances(self, cluster: str) -> list[Any]:
            raise ProviderError("the sandbox's records cannot be read")

    context = Context(default_spec("reef"), providers=lambda name: Mute())
    with pytest.raises(ProviderError, match="records cannot be read"):
        await plan(context)


def test_requests_are_only_for_the_hosts_of_that_provider() -> None:
    text = "cluster: reef\ncontroller: {host: c1}\nnodesets: {fish: {provider: sandbox, count: 1}}\n"
    assert [request.name for request in requests(Context(spec_of(text)).members, "sandbox")] == ["fish1"]


MANY = [f"10.0.0.{n}" for n in range(5, 10)]


def beside(*addresses: str, interface: str = "eth0") -> dict[str, Any]:
    return {"neighbours": tuple(Neighbour(interface, address) for address in addresses)}


@cases(
"network, neighbours, found",
("lan", {"n1": beside("10.0.0.1", "10.0.0.12")}, None),
        ("lan", {"n1": beside("10.0.0.99", "10.0.0.7"), "n2": beside("10.0.0.7")}, "10.0.0.7, 10.0.0.99 beside n[1-2]"),
        ("lan", {"n1": beside(*MANY)}, "10.0.0.5, 10.0.0.6, 10.0.0.7, 10.0.0.8, ... beside n1"),
        ("lan", {"n1": beside("172.17.0.3", interface="docker0")}, None),
        ("wireguard", {"n1": beside("10.0.0.99")}, None),)  # fmt: skip
async def test_strangers_on_the_segment_are_a_warning_only_in_a_lan(
    network: str, neighbours: dict[str, dict[str, Any]], found: str | None
) -> None:
    world = lab(LAB + f"network: {network}\n", **neighbours)
    findings = [one for one in await check(context_of(world, LAB + f"network: {network}\n")) if "segment" in one.what]
    assert [(one.level, one.path, one.found) for one in findings] == ([("warning", "network", found)] if found else [])
    assert all("set `network: wireguard`" in one.fix for one in findings)
