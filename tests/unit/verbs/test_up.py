"""`shoal up` and `shoal plan`, over a cluster in memory."""

from __future__ import annotations

import pytest
from tests.unit.plan.fake_world import LAB, lab
from tests.unit.verbs.fake_clusters import AT_ONCE, Sandbox, context_of, raised

from shoal.errors import HostError, ProviderError, ShoalError
from shoal.plan.model import Cost
from shoal.spec.finding import Finding
from shoal.verbs.up import UpResult, plan, up


async def test_up_says_what_it_changed_and_the_next_one_that_there_was_nothing() -> None:
    world = lab()
    context = context_of(world)
    first = await up(context, AT_ONCE)
    assert first == UpResult("reef", changed=("c1", "n1", "n2"))
    assert first.whole and not first.unchanged
    world.look_again()
    second = await up(context, AT_ONCE)
    assert second == UpResult("reef")
    assert second.whole and second.unchanged


async def test_up_with_one_host_away_brings_up_the_others_and_says_so() -> None:
    world = lab()
    world.hosts["n2"].unreachable = True
    result = await up(context_of(world), AT_ONCE)
    assert result.changed == ("c1", "n1")
    assert {name: str(error) for name, error in result.failures.items()} == {
        "n2": "n2: does not answer within 10 s\n  fix: is the host up?"
    }
    assert not result.whole


async def test_up_without_the_controller_stops_at_once() -> None:
    world = lab()
    world.hosts["c1"].unreachable = True
    with pytest.raises(HostError, match="c1: does not answer within 10 s"):
        await up(context_of(world), AT_ONCE)
    assert world.applied() == []


async def test_up_ends_no_running_job_unless_that_is_allowed() -> None:
    world = lab()
    await raised(world)
    world.slurm.jobs["7"] = "n1"
    renamed = context_of(world, LAB.replace("cluster: reef", "cluster: atoll"))
    before = world.slurm.conf
    with pytest.raises(ShoalError) as caught:
        await up(renamed, AT_ONCE)
    assert str(caught.value) == (
        "this change would end jobs (7); nothing was changed\n  fix: wait for them, or use --allow-job-loss"
    )
    assert world.slurm.conf == before
    await up(renamed, AT_ONCE, allow_job_loss=True)
    assert "ClusterName=atoll" in world.slurm.conf


async def test_a_partition_with_jobs_is_taken_away_only_when_that_is_allowed() -> None:
    world = lab()
    await raised(world, LAB + "  side: {nodesets: [lab]}\n")
    world.slurm.jobs["7"] = "n1"  # in `main`
    without_side = context_of(world)
    assert (await plan(without_side)).cost is Cost.NOTHING
    without_main = context_of(world, LAB.replace("  main:", "  side:"))
    planned = await plan(without_main)
    assert (planned.cost, planned.lost_jobs) == (Cost.JOBS, ("7",))
    with pytest.raises(ShoalError, match=r"this change would end jobs \(7\); nothing was changed"):
        await up(without_main, AT_ONCE)
    assert "PartitionName=main" in world.slurm.conf
    world.slurm.jobs.clear()
    assert (await plan(without_main)).cost is Cost.NOTHING
    assert (await up(without_main, AT_ONCE)).changed == ("c1",)
    assert "PartitionName=main" not in world.slurm.conf


async def test_the_plan_for_a_sandbox_that_is_not_there_is_to_make_it() -> None:
    sandbox = Sandbox()
    made = await plan(sandbox.context())
    assert [(change.host, change.action) for change in made.changes] == [
        ("controller", "create on sandbox: debian12"),
        ("fish1", "create on sandbox: debian12, 2 simulated GPUs"),
        ("fish2", "create on sandbox: debian12, 2 simulated GPUs"),
    ]
    assert sandbox.provider.clusters == {}


async def test_up_makes_the_hosts_that_are_missing_and_starts_those_that_stopped() -> None:
    sandbox = Sandbox()
    result = await up(sandbox.context(), AT_ONCE)
    assert result.created == ("controller", "fish1", "fish2")
    await sandbox.provider.faults.kill("reef", "fish2")
    sandbox.world.look_again()
    again = await up(sandbox.context(), AT_ONCE)
    assert again.created == ("fish2",)
    assert [one.state for one in await sandbox.provider.instances("reef")] == ["running"] * 3


async def test_the_plan_for_a_host_more_also_says_what_happens_to_those_that_are_there() -> None:
    sandbox = Sandbox()
    await up(sandbox.context(), AT_ONCE)
    sandbox.world.look_again()
    del sandbox.world.agents["fish1"].items["service slurmd"]
    planned = await plan(sandbox.context(3))
    assert [(change.host, change.what) for change in planned.changes] == [
        ("fish3", "host"),
        ("fish1", "service slurmd"),
    ]


async def test_a_host_that_the_spec_no_longer_names_is_drained_and_deleted() -> None:
    sandbox = Sandbox()
    await up(sandbox.context(), AT_ONCE)
    sandbox.world.look_again()
    planned = await plan(sandbox.context(1))
    assert (planned.drain, planned.delete, planned.cost) == (("fish2",), (("sandbox", "fish2"),), Cost.DRAIN)
    result = await up(sandbox.context(1), AT_ONCE)
    assert result.removed == ("fish2",)
    assert [one.name for one in await sandbox.provider.instances("reef")] == ["controller", "fish1"]
    assert sandbox.world.slurm.nodes == ["fish1"]


async def test_a_host_with_jobs_is_not_deleted() -> None:
    sandbox = Sandbox()
    await up(sandbox.context(), AT_ONCE)
    sandbox.world.look_again()
    sandbox.world.slurm.jobs["7"] = "fish2"
    result = await up(sandbox.context(1), AT_ONCE)
    assert (result.staying, result.removed, result.whole) == (("fish2",), (), False)
    assert len(await sandbox.provider.instances("reef")) == 3


async def test_what_stands_in_a_providers_way_is_said_before_it_begins() -> None:
    sandbox = Sandbox()
    missing = Finding("error", "systemd-nspawn is not installed", fix="apt-get install systemd-container")
    sandbox.provider.findings = [missing, Finding("warning", "little memory")]
    with pytest.raises(ProviderError) as caught:
        await up(sandbox.context(), AT_ONCE)
    assert str(caught.value) == "systemd-nspawn is not installed\n  fix: apt-get install systemd-container"
    sandbox.provider.findings += [Finding("error", "`cpus` out of range", "3", "ask for 1 to 2", host="fish1")]
    with pytest.raises(ProviderError) as caught:
        await up(sandbox.context(), AT_ONCE)
    assert str(caught.value) == (
        "cannot make sandbox hosts here:\n"
        "  systemd-nspawn is not installed, apt-get install systemd-container\n"
        "  fish1: `cpus` out of range, found 3, ask for 1 to 2\n"
        "  fix: solve these, then run the command again"
    )
    assert sandbox.provider.clusters == {}
