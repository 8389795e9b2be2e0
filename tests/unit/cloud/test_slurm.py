"""The interface to slurmctld: how its answers are parsed, and which commands it gets."""

import pytest
from tests.support.cases import cases

from shoal.cloud.service.slurm import (
    JOBS_COMMAND,
    MARK,
    LiveSlurm,
    format_reason,
    is_down,
    is_powering_down,
    is_registered,
    parse_jobs,
    retry_time,
    set_by_slurm,
    set_by_us,
    wants_machine,
)
from shoal.errors import CommandTimeout, SlurmError
from shoal.hosts.api import Result
from shoal.slurm.state import JOB_RECORD, NODES_COMMAND, NodeState, parse_nodes
from shoal_simulators.fake_host import Call, FakeHost

# As slurmctld 22.05 prints them, at the moments of a node's life.
ASLEEP = "NodeName=cl1 State=IDLE+CLOUD+POWERED_DOWN"
WAKING = "NodeName=cl1 State=ALLOCATED+CLOUD+NOT_RESPONDING+POWERING_UP"
WAKING_FOR_NOBODY = "NodeName=cl1 State=IDLE+CLOUD+NOT_RESPONDING+POWERING_UP"
REFUSED = (
    "NodeName=cl1 State=DOWN+CLOUD+NOT_RESPONDING+POWERING_UP"
    " Reason=shoal: out [again 2026-11-15T14:20:00Z] [root@2026-11-15T14:16:20]"
)
TIMED_OUT = (
    "NodeName=cl1 State=DOWN+CLOUD+POWERED_DOWN+NOT_RESPONDING Reason=ResumeTimeout reached [root@2026-11-15T14:17:28]"
)
GOING = "NodeName=cl1 State=IDLE+CLOUD+POWERING_DOWN"
WORKS = "NodeName=cl1 State=MIXED+CLOUD"


def node(text: str) -> NodeState:
    [found] = parse_nodes(text)
    return found


@cases(
    "text, wants, goes, down, used",
    (ASLEEP, False, True, False, False),
    (WAKING, True, False, False, False),
    (WAKING_FOR_NOBODY, True, False, False, False),
    (REFUSED, False, False, True, False),
    (TIMED_OUT, False, True, True, False),
    (GOING, False, True, False, False),
    (WORKS, False, False, False, True),
)
def test_node_flags_are_read_from_the_state(text: str, wants: bool, goes: bool, down: bool, used: bool) -> None:
    found = node(text)
    assert (wants_machine(found), is_powering_down(found), is_down(found), is_registered(found)) == (
        wants,
        goes,
        down,
        used,
    )


def test_reason_of_shoal_contains_the_retry_time() -> None:
    text = format_reason("lambda us-west-1 out of gpu_1x_a10\n  of\tall\u2009kinds", 1_800_000_000.0)
    assert text == "shoal: lambda us-west-1 out of gpu_1x_a10 of all kinds [again 2027-01-15T08:00:00Z]"
    found = node(f"NodeName=cl1 State=DOWN+CLOUD Reason={text} [root@2026-11-15T14:16:20]")
    assert set_by_us(found)
    assert retry_time(found) == 1_800_000_000.0


def test_reason_without_a_time_allows_a_retry_at_once() -> None:
    assert retry_time(NodeState("cl1", ("DOWN",), f"{MARK}something [again soon]")) == 0.0


def test_down_by_slurm_differs_from_down_by_the_operator() -> None:
    assert set_by_slurm(node(TIMED_OUT))
    assert set_by_slurm(NodeState("cl1", ("DOWN",), "Not responding", "slurm"))
    assert not set_by_slurm(NodeState("cl1", ("DOWN",), "ada looks into it", "root"))


def test_jobs_are_parsed_with_their_nodes_under_any_comment() -> None:
    text = (
        "\x1e17\x1fCONFIGURING\x1fada\x1fburst[1-2]\x1fshoal:abc1/def2\n"
        "\x1e18_3\x1fPENDING\x1fbob\x1f\x1f(null)\n"
        "\x1e19\x1fRUNNING\x1fbob\x1fburst3\x1fmine\x1ftrouble\x1f[\n"
    ).replace("\x1e", JOB_RECORD)
    first, second, third = parse_jobs(text)
    assert (first.id, first.nodes, first.saves, first.active) == ("17", ("burst1", "burst2"), True, True)
    assert (second.id, second.nodes, second.saves, second.active) == ("18_3", (), False, False)
    assert (third.id, third.nodes, third.saves) == ("19", ("burst3",), False)


def test_comment_of_a_job_is_no_record_of_another() -> None:
    forged = "mine\n\x1e20\x1fRUNNING\x1fada\x1fburst1\x1fshoal:abc1/def2"
    [job] = parse_jobs(f"{JOB_RECORD}19\x1fRUNNING\x1fbob\x1fburst3\x1f{forged}\n")
    assert (job.id, job.user, job.saves) == ("19", "bob", False)


async def test_many_nodes_need_few_commands() -> None:
    host = FakeHost("controller", {("scontrol",): b""})
    await LiveSlurm(host).power_down([f"burst{number}" for number in range(1, 1001)])
    assert host.argvs == [
        ("scontrol", "update", "nodename=burst[1-500]", "state=power_down_force"),
        ("scontrol", "update", "nodename=burst[501-1000]", "state=power_down_force"),
    ]


async def test_each_action_is_a_single_slurm_command() -> None:
    host = FakeHost("controller", {("scontrol",): b"", ("scancel",): b""})
    slurm = LiveSlurm(host)
    await slurm.down(["a1", "a2"], "shoal: x y")
    await slurm.drain(["a1"], "shoal: z")
    await slurm.resume(["a1"])
    await slurm.requeue("17_3")
    await slurm.comment("17", "lambda out; trying gcp")
    await slurm.keep_features(["a1", "a2"], ["burst", "images"])
    assert host.argvs == [
        ("scontrol", "update", "nodename=a[1-2]", "state=down", "reason=shoal: x y"),
        ("scontrol", "update", "nodename=a1", "state=drain", "reason=shoal: z"),
        ("scontrol", "update", "nodename=a1", "state=resume"),
        ("scontrol", "requeue", "17_3"),
        ("scontrol", "update", "jobid=17", "admincomment=lambda out; trying gcp"),
        ("scontrol", "update", "nodename=a[1-2]", "activefeatures=burst,images"),
    ]


@cases("script, options", ("exec {SHOAL_WARNINGS}<> <(:)\n", ("--batch",)), ("#!/bin/bash\nsrun x\n", ()))
async def test_warning_goes_to_a_batch_script_that_takes_it(script: str, options: tuple[str, ...]) -> None:
    host = FakeHost("controller", {("scontrol",): script.encode(), ("scancel",): b""})
    await LiveSlurm(host).warn("17")
    assert host.argvs == [
        ("scontrol", "write", "batch_script", "17", "-"),
        ("scancel", *options, "--signal=USR1", "17"),
    ]


async def test_slurm_error_contains_stderr() -> None:
    answers = {NODES_COMMAND: Result(1, stderr=b"slurm_load_node error: Unable to contact slurm controller\n")}
    with pytest.raises(SlurmError, match=r"^scontrol -d: slurm_load_node error: Unable to contact slurm controller$"):
        await LiveSlurm(FakeHost("controller", answers)).nodes()
    with pytest.raises(SlurmError, match="squeue -h: exit status 3"):
        await LiveSlurm(FakeHost("controller", {JOBS_COMMAND: Result(3)})).jobs()


async def test_slurm_timeout_is_a_slurm_error() -> None:
    class Hanging(FakeHost):
        async def run(self, *args: object, **more: object) -> Result:
            raise CommandTimeout("controller", "scontrol did not end within 60 s")

    with pytest.raises(SlurmError, match="did not end within 60 s"):
        await LiveSlurm(Hanging("controller", lambda call: _never(call))).nodes()


def _never(call: Call) -> bytes:
    raise AssertionError(call)
