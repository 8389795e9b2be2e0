"""Hosts that belong to another cluster, and a cluster that got another name in its file."""

import json
from dataclasses import replace

import pytest
from tests.support.cases import cases
from tests.support.errors import error_of
from tests.support.fake_clusters import AT_ONCE, context_of
from tests.support.fake_world import LAB, World, lab

from shoal.agent.facts import FileFact
from shoal.errors import ShoalError
from shoal.hosts.api import Result
from shoal.network import wireguard
from shoal.plan.model import Cost
from shoal.roles.accounting import SACCTMGR_CONF
from shoal.roles.host_record import HOST_RECORD, STATE_OWNER, read_host_record
from shoal.roles.shares import RECORD as SHARES_RECORD
from shoal.slurm.state import JOB_RECORD
from shoal.tracking import mlflow
from shoal.verbs.check import check
from shoal.verbs.context import Context
from shoal.verbs.down import down
from shoal.verbs.keys import rotate
from shoal.verbs.up import plan, up

NODES = "NodeName=gpu1 NodeHostName=n1 State=ALLOCATED\nNodeName=gpu2 NodeHostName=other State=ALLOCATED\n"
JOBS = (("17", "RUNNING", "alice", "gpu1"), ("18", "RUNNING", "bob", "gpu2"), ("19", "PENDING", "bob", ""))
BELONGS = (
    "n1: belongs to cluster {0} (controller desk, 10.0.0.99) (running: job 17 (alice))\nnothing was changed\n"
    "  fix: {1}take n1 out of this file; or run `shoal node remove gpu1` with the file of {0}; or use "
    "`shoal up --take-over`, which ends the jobs on it"
)
SAME_NAME = (
    "if that is this cluster, it keeps desk as `controller` until `shoal down`: see docs/rebuild.md\n"
    "if it is another of this name, "
)


SERVICES = (
    (wireguard.HUB_RULES, FileFact(there=True), "the hub of its network"),
    (SHARES_RECORD, FileFact(text="keeps /data /srv/data\n"), "the share /data"),
    (mlflow.UNIT, FileFact(there=True), "the MLflow server"),
    (SACCTMGR_CONF, FileFact(there=True), "the accounting database"),
)
"""The traces of what other hosts of a cluster need a host for."""


def occupy(world: World, cluster: str, *, answers: bool = True) -> None:
    """n1 belongs to another cluster, which calls it gpu1."""
    record = {"cluster": cluster, "controller": "desk", "address": "10.0.0.99", "id": "0123456789abcdef"}
    set_text(world, "n1", HOST_RECORD, json.dumps(record))
    rest = ("None", "0:10", "UNLIMITED", "1", "train")
    queue = "".join(JOB_RECORD + "\x1f".join((*job[:3], "main", job[3], *rest)) + "\n" for job in JOBS)
    silent = Result(1, stderr=b"Unable to contact slurm controller\n")
    world.hosts["n1"].answers = {
        **world.hosts["n1"].answers,
        ("scontrol",): NODES.encode() if answers else silent,
        ("squeue",): queue.encode() if answers else silent,
        ("sh",): b"",
    }


def set_text(world: World, name: str, path: str, text: str) -> None:
    set_file(world, name, path, FileFact(text=text))


def set_file(world: World, name: str, path: str, file: FileFact) -> None:
    agent = world.agents[name]
    agent.facts = replace(agent.facts, files={**agent.facts.files, path: file})


@cases("cluster, first", ("atoll", ""), ("reef", SAME_NAME), ids=["another name", "the same name"])
async def test_host_of_a_live_cluster_is_refused_with_its_jobs(cluster: str, first: str) -> None:
    world = lab()
    occupy(world, cluster)
    for verb in (up, plan):
        assert await error_of(ShoalError, verb(context_of(world))) == BELONGS.format(cluster, first)
    assert world.applied() == []
    [finding] = [finding for finding in await check(context_of(world)) if finding.level == "error"]
    assert (finding.host, finding.found) == ("n1", "running: job 17 (alice)")
    assert finding.what == f"belongs to cluster {cluster} (controller desk, 10.0.0.99)"


async def test_take_over_ends_the_jobs_and_removes_the_other_cluster_first() -> None:
    world = lab()
    occupy(world, "atoll")
    planned = await plan(context_of(world), take_over=True)
    action = "take over from cluster atoll (controller desk, 10.0.0.99); running: job 17 (alice)"
    assert [(change.host, change.action) for change in planned.take_over] == [("n1", action)]
    assert planned.cost is Cost.JOBS
    assert (await up(context_of(world), AT_ONCE, take_over=True)).whole
    [call] = [call for call in world.hosts["n1"].calls if call.argv[0] == "sh"]
    assert call.argv[-2:] == ("gpu1", "shoal: taken over by cluster reef")
    stopped = [item for item in world.agents["n1"].items.values() if item["key"] == "service shoal-returning-nodes"]
    assert stopped and not stopped[0]["running"], "what the other cluster had there is removed"
    world.look_again()
    record = read_host_record(world.agents["n1"].facts)
    assert record and (record.cluster, record.controller, record.address) == ("reef", "c1", "10.0.0.1")
    assert (await up(context_of(world), AT_ONCE)).unchanged


async def test_silent_cluster_keeps_its_hosts_unless_it_has_this_name() -> None:
    world = lab()
    occupy(world, "atoll", answers=False)
    with pytest.raises(ShoalError, match="its controller does not answer: jobs may run there"):
        await up(context_of(world), AT_ONCE)
    occupy(world, "reef", answers=False)  # its controller is gone, and the file has another
    assert (await up(context_of(world), AT_ONCE)).whole


@cases("path, file, service", *SERVICES)
async def test_host_that_a_live_cluster_needs_is_never_taken_over(path: str, file: FileFact, service: str) -> None:
    world = lab()
    occupy(world, "atoll")
    set_file(world, "n1", path, file)
    for verb in (up, plan):
        assert await error_of(ShoalError, verb(context_of(world), take_over=True)) == (
            f"n1: has {service} of cluster atoll (controller desk, 10.0.0.99) (running: job 17 (alice), 18 (bob))\n"
            "nothing was changed\n  fix: name another host for it in the file of atoll and run `shoal up` there, or "
            "run `shoal down` with that file; or take n1 out of this file"
        )
    assert world.applied() == []
    [finding] = [finding for finding in await check(context_of(world)) if finding.level == "error"]
    assert finding.what == f"has {service} of cluster atoll (controller desk, 10.0.0.99)"


async def test_services_of_a_silent_cluster_are_named_and_decide_nothing_about_this_one() -> None:
    text = f"{LAB}storage: {{/data: {{kind: nfs}}}}\naccounting: true\nnetwork: wireguard\n"
    world = lab(text)
    for name in world.agents:
        set_text(world, name, wireguard.PUBLIC_KEY, f"public key of {name}\n")
        world.agents[name].facts = replace(world.agents[name].facts, tun=True)
    occupy(world, "atoll", answers=False)
    for path, file, _ in SERVICES:
        set_file(world, "n1", path, file)
    planned = await plan(context_of(world), take_over=True)
    assert [finding.what for finding in planned.findings if finding.level == "error"] == []
    [change] = planned.take_over
    assert change.action == (
        "take over from cluster atoll (controller desk, 10.0.0.99); its controller does not answer: jobs may run "
        "there, and it loses the hub of its network, the share /data, the MLflow server, the accounting database"
    )
    with_records = context_of(world, f"{LAB}accounting: true\n")
    assert "n1" in (await up(with_records, AT_ONCE, take_over=True)).changed


async def test_controller_may_get_a_new_host_key_and_is_not_moved_to_a_node(world: World) -> None:
    set_text(world, "c1", "/etc/ssh/ssh_host_ed25519_key.pub", "ssh-ed25519 AAAAnew root@c1")
    record = world.agents["n1"].items[f"file {HOST_RECORD}"]
    assert (await up(context_of(world), AT_ONCE)).whole
    assert world.agents["n1"].items[f"file {HOST_RECORD}"] == record, "the cluster keeps its id"
    text = LAB.replace("{name: c1, address: 10.0.0.1}", "{name: n1, address: 10.0.0.11}").replace(
        "[{name: n1, address: 10.0.0.11}", "[{name: c1, address: 10.0.0.1}"
    )
    [finding] = [finding for finding in await check(context_of(world, text)) if finding.level == "error"]
    assert (finding.host, finding.what.partition(",")[0]) == ("c1", "is the controller of cluster reef")


async def test_another_clusters_controller_is_never_taken_over(world: World) -> None:
    text = LAB.replace("cluster: reef", "cluster: atoll").replace("name: c1", "name: c2")
    text = text.replace("10.0.0.1}", "10.0.0.2}").replace("name: n1, address: 10.0.0.11", "name: c1, address: 10.0.0.1")
    other = lab(text, c1={"files": world.agents["c1"].facts.files})
    with pytest.raises(ShoalError) as caught:
        await up(context_of(other), AT_ONCE, take_over=True)
    assert "c1: is the controller of cluster reef (controller c1, 10.0.0.1)" in str(caught.value)
    assert "run `shoal down` with the file of reef first, or take c1 out of this file" in str(caught.value)
    assert other.applied() == []


async def test_rename_is_rejected_before_anything_changes(world: World) -> None:
    world.slurm.jobs["7"] = "n1"
    before = world.slurm.conf
    renamed = context_of(world, LAB.replace("cluster: reef", "cluster: atoll"))
    for agent in world.agents.values():
        agent.requests.clear()
    for attempt in (up(renamed, AT_ONCE, allow_job_loss=True, take_over=True), plan(renamed, take_over=True)):
        assert await error_of(ShoalError, attempt) == (
            "c1: the running cluster is called reef, the file says atoll, and a cluster keeps its name (running: job 7 "
            "(root))\nnothing was changed\n  fix: write `cluster: reef` again. To build it anew as atoll, first run "
            "`shoal down` with `cluster: reef`: that ends its jobs, and records of accounting stay under reef"
        )
    assert [finding.path for finding in await check(renamed)] == ["cluster"]
    assert world.applied() == [] and world.slurm.conf == before
    with pytest.raises(ShoalError, match=r"c1 belongs to cluster reef \(controller c1, 10.0.0.1\)"):
        await down(renamed, force=True)
    assert world.applied() == []


@cases("owner", "reef", "reef|536\n")
async def test_state_of_the_cluster_stays_and_is_kept_aside_once_its_hosts_are_released(
    world: World, owner: str
) -> None:
    set_text(world, "c1", STATE_OWNER, owner)
    assert (await up(context_of(world), AT_ONCE)).unchanged
    await down(context_of(world), force=True)
    world.look_again()
    set_text(world, "c1", STATE_OWNER, owner)
    renamed = context_of(world, LAB.replace("cluster: reef", "cluster: atoll"))
    assert (await up(renamed, AT_ONCE)).whole
    command = world.agents["c1"].items["command keep the state of cluster reef as /var/lib/slurm/slurmctld.reef"]
    assert command["argv"][-2:] == ["/var/lib/slurm/slurmctld", "/var/lib/slurm/slurmctld.reef"]


async def test_down_and_keys_leave_hosts_of_other_clusters_alone(world: World, context: Context) -> None:
    occupy(world, "atoll")
    with pytest.raises(ShoalError, match=r"n1 belongs to cluster atoll .*; nothing was changed"):
        await rotate(context, "munge")
    for agent in world.agents.values():
        agent.requests.clear()
    result = await down(context)
    assert result.released == ("c1", "n2")
    assert "belongs to cluster atoll" in str(result.failures["n1"])
    assert world.applied() == ["c1", "n2"]
