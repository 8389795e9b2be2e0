"""The plan: which changes are needed on which host, and what they cost."""

from pathlib import Path

import pytest
from tests.support.cases import cases
from tests.support.errors import error_of
from tests.support.fake_world import LAB, World, lab, slurm_package, spec_of

from shoal.agent.facts import Facts, FileFact
from shoal.errors import SlurmError, VersionMismatch
from shoal.hosts.provider import Request
from shoal.plan.apply import ApplyTimeouts, apply
from shoal.plan.cluster_findings import clock_findings, dnf_findings
from shoal.plan.diff import cluster_goal, make_plan
from shoal.plan.model import Change, Cost, Plan
from shoal.plan.observe import Observation, observe
from shoal.plan.progress import NoProgress
from shoal.roles.current_conf import SLURM_CONF
from shoal.spec.finding import Finding
from shoal.spec.member import Shape
from shoal.spec.members import members
from shoal.spec.model import Spec

WITHOUT_N2 = LAB.replace(", {name: n2, address: 10.0.0.12}", "")


async def planned(world: World, spec: Spec | None = None) -> Plan:
    spec = spec or world.spec
    async with world.fleet(*(member.name for member in members(spec))) as fleet:
        return await make_plan(spec, await observe(fleet, spec), fleet, {})


async def applied(world: World) -> World:
    """The world after its spec was applied, with new facts."""
    async with world.fleet() as fleet:
        plan = await make_plan(world.spec, await observe(fleet, world.spec), fleet, {})
        nodes = [member.name for member in members(world.spec) if "compute" in member.roles]
        await apply(plan, fleet, world.controller, nodes, NoProgress(), ApplyTimeouts(nodes_s=0, drain_s=0))
    world.look_again()
    return world


async def replanned(text: str, before: str = LAB) -> Plan:
    """The plan for a new file, where that of before is in force."""
    return await planned(await applied(lab(before)), spec_of(text))


def costs(plan: Plan) -> dict[tuple[str, str], Cost]:
    return {(change.host, change.what): change.cost for change in plan.changes if change.cost}


async def test_fresh_hosts_need_everything_at_no_cost_and_a_plan_changes_nothing() -> None:
    world = lab()
    plan = await planned(world)
    assert [host.name for host in plan.hosts] == ["c1", "n1", "n2"]
    assert all(host.changes for host in plan.hosts) and plan.cost is Cost.NOTHING and not plan.empty
    assert world.applied("check") == ["c1", "n1", "n2"] and world.applied("apply") == world.applied("secret") == []


async def test_new_partition_costs_nothing() -> None:
    plan = await replanned(LAB + "  long: {nodesets: [lab]}\n")
    assert {(change.host, change.what) for change in plan.changes} == {
        ("c1", f"file {SLURM_CONF}"),
        ("c1", "command reconfigure"),
    }
    assert plan.cost is Cost.NOTHING


async def test_new_setting_costs_restarts() -> None:
    plan = await replanned(LAB + "slurm: {options: {KillWait: 60}}\n")
    assert costs(plan) == {
        ("c1", f"file {SLURM_CONF}"): Cost.RESTART,
        ("c1", "service slurmctld"): Cost.RESTART,
        ("n1", "service slurmd"): Cost.RESTART,
        ("n2", "service slurmd"): Cost.RESTART,
    }


async def test_leaving_node_is_drained_and_stays_configured_until_empty() -> None:
    plan = await replanned(WITHOUT_N2)
    assert plan.drain == ("n2",) and plan.cost is Cost.DRAIN and all(not host.changes for host in plan.hosts)
    assert [host.name for host in plan.after_drain] == ["c1", "n1"]
    first, *after = plan.changes
    assert first == Change("n2", "node", "drain, then remove", Cost.DRAIN)
    assert {change.host for change in after} == {"c1", "n1"}
    assert ("c1", f"file {SLURM_CONF}", f"make file {SLURM_CONF}, once n2 is empty") in [
        (change.host, change.what, change.action) for change in after
    ]
    assert all(change.action.endswith(", once n2 is empty") for change in after)


async def test_immediate_changes_are_not_repeated_after_the_drain() -> None:
    world = await applied(lab())
    text = WITHOUT_N2 + "slurm: {options: {KillWait: 60}}\n"
    plan = await planned(world, spec_of(text))
    assert [(change.what, change.action) for change in plan.changes if change.what in ("service slurmctld",)] == [
        ("service slurmctld", "restart service slurmctld")
    ]
    told = [change.action for change in plan.changes if (change.host, change.what) == ("c1", f"file {SLURM_CONF}")]
    assert told == [f"make file {SLURM_CONF}", f"make file {SLURM_CONF}, once n2 is empty"]


async def test_leaving_undeleted_host_is_a_warning() -> None:
    plan = await replanned(WITHOUT_N2, LAB + "login: {hosts: [{name: door, address: 10.0.0.2}]}\n")
    assert [str(finding) for finding in plan.findings] == [
        "n2: leaves the cluster, and slurmd and the munge key stay on it, "
        "put it back into the file and run `shoal node remove n2`",
        "door: leaves the cluster, and the munge key stays on it, "
        "on it, as root: systemctl disable --now munge && rm /etc/munge/munge.key",
    ]
    kept = LAB.replace("controller: {", "controller: {compute: true, ")
    assert (await planned(await applied(lab(kept)), spec_of(LAB))).findings == ()


async def test_deleting_a_host_costs_as_much_as_removing_its_node() -> None:
    plan = Plan("reef", drain=("fish2",), delete=(("sandbox", "fish2"), ("sandbox", "door1")))
    assert [(change.host, change.cost) for change in plan.changes if change.what == "host"] == [
        ("fish2", Cost.DRAIN),
        ("door1", Cost.NOTHING),
    ]


async def test_controller_without_compute_is_drained() -> None:
    world = await applied(lab(LAB.replace("controller: {", "controller: {compute: true, ")))
    assert f"NodeName={world.controller} " in world.slurm.conf
    plan = await planned(world, spec_of(LAB))
    assert plan.drain == ("c1",)
    [now] = [host for host in plan.hosts if host.name == "c1"]
    [later] = [host for host in plan.after_drain if host.name == "c1"]
    assert "service slurmd" not in [item.key for _, document in now.stages for item in document]
    [slurmd] = [item for _, document in later.stages for item in document if item.key == "service slurmd"]
    assert not slurmd.running  # type: ignore[attr-defined]


async def test_cluster_rename_costs_jobs() -> None:
    plan = await replanned(LAB.replace("cluster: reef", "cluster: atoll"))
    assert costs(plan)["c1", f"file {SLURM_CONF}"] is Cost.JOBS and plan.cost is Cost.JOBS


async def test_new_slurm_conf_on_a_login_host_costs_nothing() -> None:
    text = LAB + "login: {hosts: [{name: door, address: 10.0.0.2}]}\n"
    plan = await replanned(text + "slurm: {options: {KillWait: 60}}\n", text)
    [change] = [change for change in plan.changes if change.host == "door"]
    assert (change.what, change.cost) == (f"file {SLURM_CONF}", Cost.NOTHING)


async def test_impossible_item_is_reported_before_apply() -> None:
    world = lab()
    world.agents["n1"].failing["user slurm"] = "the id 64030 belongs to user bob"
    plan = await planned(world)
    assert plan.findings == (
        Finding("error", "cannot apply user slurm", "the id 64030 belongs to user bob", host="n1"),
    )
    [change] = [change for change in plan.changes if change.host == "n1" and change.what == "user slurm"]
    assert change.action == "cannot be applied: the id 64030 belongs to user bob"


async def test_unreachable_host_is_named_and_changes_nothing_for_the_others() -> None:
    world = lab()
    world.hosts["n2"].unreachable = True
    plan = await planned(world)
    assert {name: error.cause for name, error in plan.unreached.items()} == {"n2": "does not answer within 10 s"}
    assert [host.name for host in plan.hosts] == ["c1", "n1"]
    world = await applied(lab())
    assert (await planned(world)).empty
    world.hosts["n2"].unreachable = True
    plan = await planned(world)
    assert (plan.changes, list(plan.unreached)) == ((), ["n2"])


async def test_host_with_another_package_manager_is_rejected_and_the_others_planned() -> None:
    world = lab(n1={"package_manager": "dnf", "os_id": "rocky", "os_version": "9.4"})
    plan = await planned(world)
    assert {name: error.cause for name, error in plan.unreached.items()} == {
        "n1": "packages are installed with apt; found dnf (rocky 9.4)"
    }
    assert [host.name for host in plan.hosts] == ["c1", "n2"]


async def test_versions_outside_the_window_are_rejected_before_any_change() -> None:
    world = lab(c1={"packages": slurm_package("26.05.5-1")}, n2={"packages": slurm_package("26.05.5-1")})
    with pytest.raises(VersionMismatch) as caught:
        await planned(world)
    assert caught.value.message == (
        "the hosts' Slurm versions cannot talk to each other; nothing was changed\n"
        "  n1: Slurm too old for the controller's, found Slurm 22.05.8; the controller c1 has 26.05.5 and talks to "
        "24.11 to 26.05, write `slurm: {from: shoal}` into the file, for the same Slurm on all hosts; or "
        "bring all hosts to one release, as no Slurm talks to all of these; or install Slurm 24.11 to "
        "26.05 on n1; or take n1 out of the spec"
    )
    assert [finding.host for finding in caught.value.findings] == ["n1"]  # type: ignore[attr-defined]
    assert world.applied("check") == world.applied("apply") == world.applied("secret") == []


async def test_controller_without_a_slurm_package_is_rejected_with_the_fix() -> None:
    assert await error_of(SlurmError, planned(lab(c1={"os_id": "debian", "os_version": "99"}))) == (
        "c1: apt offers no slurmctld there; nothing was changed\n"
        "  fix: add a package source that has Slurm (Debian's main, Ubuntu's universe), or make another host the "
        "controller"
    )


def test_plan_of_hosts_to_create_shows_their_shape() -> None:
    request = Request("fish1", Shape(image="debian13", cpus=2, memory_mb=2048, gpus=1, site="b"))
    plan = Plan("reef", create=(("sandbox", request),), delete=(("sandbox", "fish9"),))
    assert plan.changes == (
        Change("fish1", "host", "create on sandbox: debian13, 2 CPUs, 2048 MB, 1 simulated GPU, site b"),
        Change("fish9", "host", "delete from sandbox"),
    )


@cases("offset, level", (0.0, None), (59.0, None), (-61.0, "warning"), (239.0, "warning"), (-241.2, "error"))
def test_clock_offset_is_reported_before_munge_rejects_messages(offset: float, level: str | None) -> None:
    assert [(finding.level, str(finding)) for finding in clock_findings({"n1": Facts(clock_offset=offset)})] == [
        (
            level,
            f"n1: the clock is off, found {offset:+.0f} s against this machine, "
            "run `timedatectl set-ntp true` on it; munge rejects messages from 300 s on",
        )
    ] * bool(level)


def test_foreign_slurm_conf_drains_no_node() -> None:
    theirs = FileFact(text="ClusterName=old\nNodeName=x[1-4] CPUs=2\nPartitionName=a Nodes=ALL\n")
    world = lab(c1={"files": {SLURM_CONF: theirs}})
    facts = {name: agent.facts for name, agent in world.agents.items()}
    goal = cluster_goal(world.spec, Observation(facts), {})
    assert (goal.leaving, goal.later) == ((), None)


async def test_host_with_dnf_is_accepted_with_shoals_slurm_and_a_warning(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("SHOAL_CACHE", str(tmp_path))
    (tmp_path / "slurm").mkdir()
    (tmp_path / "slurm/slurm-24.11.5-1-x86_64.tar.gz").write_bytes(b"tree")
    world = lab(n1={"package_manager": "dnf", "os_id": "rocky", "os_version": "9.4"})
    spec = spec_of(LAB + "slurm: {from: shoal}\nstorage: {/data: {host: n1}}\n")
    async with world.fleet() as fleet:
        facts = (await observe(fleet, spec)).facts
    assert set(facts) == {"c1", "n1", "n2"}
    warning, error = dnf_findings(spec, facts)
    assert (warning.level, warning.host, warning.what) == ("warning", "n1", "hosts with dnf are not run by us")
    assert (error.level, error.path) == ("error", "storage./data") and "host with apt only" in error.what
