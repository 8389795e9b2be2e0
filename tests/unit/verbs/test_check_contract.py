"""`shoal check` and `shoal plan` report settings that leave jobs too little time to save their work."""

from dataclasses import replace

from tests.support.fake_clusters import context_of, raised
from tests.support.fake_world import LAB, World, lab, spec_of

from shoal.hosts.api import Result
from shoal.verbs.check import check
from shoal.verbs.context import Context
from shoal.verbs.up import plan

SHORT = LAB + "slurm: {options: {KillWait: 5}}\n"
TOO_SHORT = (
    "slurm.options.KillWait: jobs have less time to save after SIGTERM than they count on, found 5 s, "
    "delete it, or say 30"
)


async def test_contract_violation_is_reported_once_while_active_and_by_plan() -> None:
    world = lab(SHORT)
    assert TOO_SHORT in [str(finding) for finding in (await plan(context_of(world))).findings]
    context = await raised(world)
    assert [(finding.level, str(finding)) for finding in await check(context)] == [("warning", TOO_SHORT)]
    outside_the_file = [str(finding) for finding in await check(context_of(world, LAB))]
    assert (
        "c1: jobs have less time to save after SIGTERM than they count on, found 5 s, run `shoal up`, which sets 30"
        in outside_the_file
    )


async def test_short_grace_is_a_warning_when_a_higher_partition_shares_nodes() -> None:
    text = LAB.replace("default: true}", "default: true, grace: 10}")
    assert spec_of(text).partitions["main"].grace == 10
    alone = await check(await raised(lab(text)))
    assert [str(finding) for finding in alone] == []
    shared = text + "  urgent: {nodesets: [lab], priority: 10}\n"
    assert [str(finding) for finding in await check(await raised(lab(shared)))] == [
        "partitions.main: a preempted job has less time to save than it counts on, found 10 s, "
        "say `grace: 60` or more, and run `shoal up`"
    ]


async def test_short_grace_in_the_file_does_not_hide_another_partition() -> None:
    text = LAB.replace("default: true}", "default: true, grace: 10}") + "  urgent: {nodesets: [lab], priority: 10}\n"
    context = await raised(lab(text))
    [running] = await check(context)
    for partition, found in (("main", 0), ("night", 1)):
        warning = replace(running, path=f"partitions.{partition}.grace", found="5")
        assert await check(replace(context, warnings=(warning,))) == [warning, running][: 1 + found]


async def test_slurm_without_readable_settings_is_an_error(world: World, context: Context) -> None:
    asked = world.slurm.scontrol
    world.hosts["c1"].answers[("scontrol",)] = lambda call: (
        Result(1, stderr=b"slurm_load_ctl_conf error: Zero Bytes\n") if call.argv[-1] == "config" else asked(call)
    )
    assert [str(finding) for finding in await check(context)] == [
        "c1: `scontrol show config` on c1 failed: slurm_load_ctl_conf error: Zero Bytes, run `shoal up`; "
        "if that does not help, `shoal check` says what is wrong"
    ]
