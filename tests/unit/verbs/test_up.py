"""`shoal up` and `shoal plan`, over a cluster in memory."""

from tests.support.errors import error_of
from tests.support.fake_clusters import AT_ONCE, Sandbox, context_of, raised
from tests.support.fake_world import LAB, lab

from shoal.agent.facts import Space
from shoal.errors import ProviderError, ShoalError
from shoal.plan.model import Cost
from shoal.slurm.conf import STATE_DIRECTORY
from shoal.spec.finding import Finding
from shoal.verbs.up import UpResult, plan, up


async def test_up_reports_its_changes_and_a_second_up_reports_none() -> None:
    world = lab()
    context = context_of(world)
    first = await up(context, AT_ONCE)
    assert first == UpResult("reef", changed=("c1", "n1", "n2"))
    assert first.whole and not first.unchanged
    world.look_again()
    second = await up(context, AT_ONCE)
    assert second == UpResult("reef")
    assert second.whole and second.unchanged


async def test_up_changes_the_others_and_reports_an_unreachable_host() -> None:
    world = lab()
    world.hosts["n2"].unreachable = True
    result = await up(context_of(world), AT_ONCE)
    assert result.changed == ("c1", "n1")
    assert {name: str(error) for name, error in result.failures.items()} == {
        "n2": "n2: does not answer within 10 s\n  fix: is the host up?"
    }
    assert not result.whole


async def test_up_changes_nothing_while_slurmctld_cannot_write_its_state() -> None:
    space = Space("/var/lib/slurm", 9_000, "its file system is read-only")
    world = lab(c1={"spaces": {STATE_DIRECTORY: space}})
    assert await error_of(ShoalError, up(context_of(world), AT_ONCE)) == (
        "c1: Slurm cannot write /var/lib/slurm/slurmctld: its file system is read-only; nothing was changed\n"
        "  fix: make room, or make it writable"
    )
    assert world.applied() == []


async def test_partition_with_jobs_is_removed_only_with_permission() -> None:
    world = lab()
    await raised(world, LAB + "  side: {nodesets: [lab]}\n")
    world.slurm.jobs["7"] = "n1"  # in `main`
    without_side = context_of(world)
    assert (await plan(without_side)).cost is Cost.NOTHING
    without_main = context_of(world, LAB.replace("  main:", "  side:"))
    planned = await plan(without_main)
    assert (planned.cost, planned.lost_jobs) == (Cost.JOBS, ("7",))
    before = world.slurm.conf
    assert await error_of(ShoalError, up(without_main, AT_ONCE)) == (
        "this change would end jobs (7); nothing was changed\n  fix: wait for them, or use --allow-job-loss"
    )
    assert world.slurm.conf == before
    world.slurm.jobs.clear()
    assert (await plan(without_main)).cost is Cost.NOTHING
    world.slurm.jobs["7"] = "n1"
    assert (await up(without_main, AT_ONCE, allow_job_loss=True)).changed == ("c1",)
    assert "PartitionName=main" not in world.slurm.conf


async def test_missing_hosts_are_planned_and_created_and_stopped_hosts_started() -> None:
    sandbox = Sandbox()
    made = await plan(sandbox.context())
    assert [(change.host, change.action) for change in made.changes] == [
        ("controller", "create on sandbox: debian12"),
        *((name, "create on sandbox: debian12, 2 simulated GPUs") for name in ("fish1", "fish2")),
    ]
    assert sandbox.provider.clusters == {}
    assert (await up(sandbox.context(), AT_ONCE)).created == ("controller", "fish1", "fish2")
    await sandbox.provider.faults.kill("reef", "fish2")
    sandbox.world.look_again()
    assert (await up(sandbox.context(), AT_ONCE)).created == ("fish2",)
    assert [one.state for one in await sandbox.provider.instances("reef")] == ["running"] * 3


async def test_plan_with_a_new_host_includes_changes_of_the_others(sandbox: Sandbox) -> None:
    del sandbox.world.agents["fish1"].items["service slurmd"]
    planned = await plan(sandbox.context(3))
    assert [(change.host, change.what) for change in planned.changes] == [
        ("fish3", "host"),
        ("controller", "file /etc/shoal/cluster.json"),
        ("fish1", "service slurmd"),
    ]


async def test_host_removed_from_the_spec_is_drained_and_deleted_without_jobs(sandbox: Sandbox) -> None:
    sandbox.world.slurm.jobs["7"] = "fish2"
    result = await up(sandbox.context(1), AT_ONCE)
    assert (result.staying, result.removed, result.whole) == (("fish2",), (), False)
    assert len(await sandbox.provider.instances("reef")) == 3
    sandbox.world.slurm.jobs.clear()
    planned = await plan(sandbox.context(1))
    assert (planned.drain, planned.delete, planned.cost) == (("fish2",), (("sandbox", "fish2"),), Cost.DRAIN)
    assert (await up(sandbox.context(1), AT_ONCE)).removed == ("fish2",)
    assert [one.name for one in await sandbox.provider.instances("reef")] == ["controller", "fish1"]
    assert sandbox.world.slurm.nodes == ["fish1"]


async def test_provider_obstacles_are_reported_before_creation() -> None:
    sandbox = Sandbox()
    missing = Finding("error", "systemd-nspawn is not installed", fix="apt-get install systemd-container")
    sandbox.provider.findings = [missing, Finding("warning", "little memory")]
    assert await error_of(ProviderError, up(sandbox.context(), AT_ONCE)) == (
        "systemd-nspawn is not installed\n  fix: apt-get install systemd-container"
    )
    sandbox.provider.findings += [Finding("error", "`cpus` out of range", "3", "ask for 1 to 2", host="fish1")]
    assert await error_of(ProviderError, up(sandbox.context(), AT_ONCE)) == (
        "cannot make sandbox hosts here:\n"
        "  systemd-nspawn is not installed, apt-get install systemd-container\n"
        "  fish1: `cpus` out of range, found 3, ask for 1 to 2\n"
        "  fix: solve these, then run the command again"
    )
    assert sandbox.provider.clusters == {}
