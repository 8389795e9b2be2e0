"""The verbs, over a cluster in memory."""

from __future__ import annotations

import asyncio
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from tests.unit.plan.fake_world import LAB, World, host_facts, lab, spec_of

from shoal.agent.facts import Disk
from shoal.errors import HostError, ProviderError, ShoalError, SlurmError, TimedOut, UsageError
from shoal.hosts.api import Result
from shoal.hosts.fake import FakeHost, FakeProgram
from shoal.plan.apply import Patience
from shoal.plan.model import Cost
from shoal.providers.fake import FakeProvider
from shoal.slurm.state import NODES_COMMAND
from shoal.spec.finding import Finding
from shoal.spec.members import default_spec
from shoal.verbs.check import check
from shoal.verbs.context import Context, requests
from shoal.verbs.down import DownResult, down
from shoal.verbs.node import drain_nodes, remove_node, resume_nodes
from shoal.verbs.remote import execute, forget_host, ssh_command
from shoal.verbs.status import NO_CONFIGURATION, ask, status
from shoal.verbs.up import UpResult, plan, up

AT_ONCE = Patience(nodes=0, drain=0)


def kept(state: Path) -> bool:
    return state.exists()


def context_of(world: World, text: str | None = None, **more: Any) -> Context:
    return Context(spec_of(text) if text else world.spec, connector=world.connector, **more)


async def raised(world: World, text: str | None = None) -> Context:
    """A cluster that is up."""
    context = context_of(world, text)
    assert (await up(context, AT_ONCE)).whole
    world.look_again()
    return context


# ---- up and plan


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
    assert (planned.cost, planned.loses) == (Cost.JOBS, ("7",))
    with pytest.raises(ShoalError, match=r"this change would end jobs \(7\); nothing was changed"):
        await up(without_main, AT_ONCE)
    assert "PartitionName=main" in world.slurm.conf
    world.slurm.jobs.clear()
    assert (await plan(without_main)).cost is Cost.NOTHING
    assert (await up(without_main, AT_ONCE)).changed == ("c1",)
    assert "PartitionName=main" not in world.slurm.conf


class Sandbox:
    """A world whose hosts a provider makes: they answer once they are made."""

    def __init__(self, nodes: int = 2) -> None:
        self.provider = FakeProvider()
        spec = default_spec("reef", nodes=nodes)
        facts = {"controller": host_facts("controller", "10.0.0.1")}
        facts |= {f"fish{number}": host_facts(f"fish{number}", f"10.0.0.1{number}") for number in (1, 2, 3)}
        self.world = World(spec, facts)

    def context(self, nodes: int = 2) -> Context:
        return Context(
            default_spec("reef", nodes=nodes), connector=self.world.connector, providers=lambda name: self.provider
        )


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
        "sandbox hosts cannot be made here:\n"
        "  systemd-nspawn is not installed, apt-get install systemd-container\n"
        "  fish1: `cpus` out of range, found 3, ask for 1 to 2\n"
        "  fix: solve these, then run the command again"
    )
    assert sandbox.provider.clusters == {}


# ---- status


async def test_status_is_what_slurm_says() -> None:
    world = lab()
    context = await raised(world)
    world.slurm.jobs["7"] = "n1"
    world.slurm.states["n2"], world.slurm.reasons["n2"] = "IDLE+DRAIN", "fan broken"
    found = await status(context)
    assert (found.cluster, found.controller, found.version) == ("reef", "c1", "22.05.8")
    assert [(node.name, node.state, node.reason) for node in found.nodes] == [
        ("n1", ("IDLE",), ""),
        ("n2", ("IDLE", "DRAIN"), "fan broken"),
    ]
    assert [(part.name, part.nodes, part.default) for part in found.partitions] == [("main", "n[1-2]", True)]
    assert [(job.id, job.nodes) for job in found.jobs] == [("7", "n1")]
    assert (found.absent, found.extra) == ((), ())


async def test_status_names_nodes_that_only_the_file_or_only_slurm_has() -> None:
    world = lab()
    await raised(world)
    other = context_of(world, LAB.replace("name: n2, address: 10.0.0.12", "name: n3, address: 10.0.0.13"))
    found = await status(other)
    assert (found.absent, found.extra) == (("n3",), ("n2",))


async def test_status_before_there_is_a_slurm_says_so() -> None:
    world = lab()
    world.hosts["c1"].answers = {}
    with pytest.raises(SlurmError) as caught:
        await status(context_of(world))
    assert str(caught.value) == "c1 has no Slurm yet\n  fix: run `shoal up`"


async def test_status_of_a_cluster_that_was_taken_down_says_so() -> None:
    world = lab()
    said = b"scontrol: error: fetch_config: DNS SRV lookup failed\n" + NO_CONFIGURATION.encode()
    world.hosts["c1"].answers = {("scontrol",): Result(1, b"", said), ("systemctl",): b"inactive\n"}
    with pytest.raises(SlurmError) as caught:
        await status(context_of(world))
    assert str(caught.value) == "Slurm on c1 is not set up: it has no configuration\n  fix: run `shoal up`"


@pytest.mark.parametrize("state", ["failed", "inactive", "activating"])
async def test_status_says_at_once_that_slurmctld_does_not_run(state: str) -> None:
    world = lab()
    context = await raised(world)
    asked = len(world.hosts["c1"].calls)
    world.hosts["c1"].answers = {**world.hosts["c1"].answers, ("systemctl",): Result(3, f"{state}\n".encode())}
    with pytest.raises(SlurmError) as caught:
        await status(context)
    assert str(caught.value) == (
        f"slurmctld does not run on c1 ({state})\n"
        "  fix: run `shoal up`; its log: `shoal ssh c1 journalctl -u slurmctld`"
    )
    assert [call.argv[0] for call in world.hosts["c1"].calls[asked:]] == ["scontrol", "systemctl"]


async def test_a_slurmctld_that_hangs_is_the_one_who_does_not_answer() -> None:
    async def hang(program: FakeProgram) -> int:
        await asyncio.sleep(3600)
        return 0

    with pytest.raises(SlurmError) as caught:
        await ask(FakeHost("c1", {NODES_COMMAND: hang}), NODES_COMMAND, 0.05)
    assert str(caught.value) == (
        "slurmctld on c1 does not answer within 0.05 s\n"
        "  fix: run `shoal up`; its log: `shoal ssh c1 journalctl -u slurmctld`"
    )


async def test_status_of_a_slurm_that_does_not_answer_says_what_it_said() -> None:
    world = lab()
    context = await raised(world)
    world.slurm.broken = "slurm_load_node error: Unable to contact slurm controller (connect failure)\n"
    with pytest.raises(SlurmError) as caught:
        await status(context)
    assert "on c1 failed: slurm_load_node error: Unable to contact slurm controller (connect failure)\n" in str(
        caught.value
    )


# ---- exec and ssh


async def test_exec_groups_hosts_whose_output_and_status_are_equal() -> None:
    world = lab()
    for name, answer in {"c1": b"6.1\n", "n1": b"6.1\n", "n2": Result(1, b"6.1\n")}.items():
        world.hosts[name].answers = {("uname", "-r"): answer}
    result = await execute(context_of(world), ["uname", "-r"], None, None, root=True, timeout=None)
    assert [(names, group.status) for names, group in result.groups] == [(("c1", "n1"), 0), (("n2",), 1)]
    assert result.worst == 1


async def test_exec_keeps_the_hosts_that_did_not_answer() -> None:
    world = lab()
    world.hosts["n1"].answers = {("true",): b""}
    world.hosts["n2"].unreachable = True
    result = await execute(context_of(world), ["true"], None, "lab", root=False, timeout=None)
    assert [names for names, _ in result.groups] == [("n1",)]
    assert list(result.failures) == ["n2"]
    assert world.hosts["n1"].calls[0].root is False
    assert world.hosts["c1"].calls == []


async def test_exec_says_that_the_time_was_the_users_own() -> None:
    world = lab()

    async def sleep(program: FakeProgram) -> int:
        await asyncio.sleep(3600)
        return 0

    for name in ("n1", "n2"):
        world.hosts[name].answers = {("sleep",): sleep}
    result = await execute(context_of(world), ["sleep", "3600"], None, "lab", root=True, timeout=0.05)
    assert {type(error) for error in result.failures.values()} == {TimedOut}
    assert str(result.failures["n1"]) == (
        "n1: `sleep` did not end within the 0.05 s you gave it, and was ended\n  fix: give it longer: --timeout SECONDS"
    )


@pytest.mark.parametrize(
    ("argv", "hint"),
    [
        (["echo $HOME | cat"], "shoal exec -- sh -c 'echo $HOME | cat'"),
        (["no-such-program"], ""),
        (["no-such-program", "a b"], ""),
    ],
)
async def test_a_shell_line_given_as_one_word_is_told_how_to_be_one(argv: list[str], hint: str) -> None:
    result = await execute(context_of(lab()), argv, "n1", None, root=True, timeout=None)
    assert (result.worst, result.hint) == (127, hint)


async def test_exec_without_a_command_is_refused() -> None:
    with pytest.raises(UsageError, match="exec needs a command\n  fix: shoal exec -- uptime"):
        await execute(context_of(lab()), [], None, None, root=True, timeout=None)


async def test_the_ssh_command_has_everything_the_file_says_and_only_this_clusters_keys(state: Path) -> None:
    text = "cluster: reef\ncontroller: {host: {name: c1, address: 10.0.0.1}, user: bob, port: 2222, identity: /k/id}\n"
    world = World(spec_of(text + "nodesets: {lab: {hosts: [n1]}}\n"), {"c1": host_facts("c1", "10.0.0.1")})
    assert await ssh_command(context_of(world), "c1", ["squeue", "--me"]) == [
        *("ssh", "-o", f"UserKnownHostsFile={state}/known_hosts", "-o", "StrictHostKeyChecking=yes"),
        *("-o", "HostKeyAlias=c1", "-p", "2222", "-l", "bob", "-i", "/k/id", "-o", "IdentitiesOnly=yes"),
        *("10.0.0.1", "--", "squeue", "--me"),
    ]
    assert (await ssh_command(context_of(world), "c1", ["--", "squeue"]))[-3:] == ["10.0.0.1", "--", "squeue"]
    assert (await ssh_command(context_of(world), "c1", []))[-1] == "10.0.0.1"
    assert world.hosts["c1"].connects == 3


@pytest.mark.parametrize(
    ("word", "text"),
    [
        ("--json", "--json stands after the host, where the command begins\n  fix: put --json before the host"),
        (
            "-L8080:c1:80",
            "-L8080:c1:80 stands after the host, where the command begins\n"
            "  fix: options of ssh belong to ssh itself: `shoal ssh --json c1` prints its command line",
        ),
    ],
)
async def test_an_option_after_the_host_of_ssh_is_refused(word: str, text: str) -> None:
    with pytest.raises(UsageError) as caught:
        await ssh_command(context_of(lab()), "c1", [word])
    assert str(caught.value) == text


def test_a_host_key_can_be_forgotten(state: Path) -> None:
    (state / "known_hosts").write_text("c1 ssh-ed25519 AAAAC3NzaC1lZDI1NTE5AAAAIEZg\n")
    assert forget_host(context_of(lab()), "c1") is True
    assert forget_host(context_of(lab()), "c1") is False


# ---- node


async def test_nodes_are_drained_with_a_reason_and_resumed() -> None:
    world = lab()
    context = await raised(world)
    assert await drain_nodes(context, "n[1-2]", "fan broken") == ["n1", "n2"]
    assert world.slurm.reasons == {"n1": "fan broken", "n2": "fan broken"}
    assert await resume_nodes(context, "n1") == ["n1"]
    assert await resume_nodes(context, "n1") == []
    assert world.slurm.states == {"n2": "IDLE+DRAIN"}


async def test_nodes_cannot_be_drained_or_resumed_while_slurmctld_does_not_run() -> None:
    world = lab()
    context = await raised(world)
    world.hosts["c1"].answers = {**world.hosts["c1"].answers, ("systemctl",): Result(3, b"failed\n")}
    for work in (drain_nodes(context, "n1", "fan broken"), resume_nodes(context, "n1")):
        with pytest.raises(SlurmError, match=r"slurmctld does not run on c1 \(failed\)"):
            await work
    assert world.slurm.updates == []


async def test_a_host_that_does_not_compute_is_no_node() -> None:
    with pytest.raises(UsageError) as caught:
        await drain_nodes(context_of(lab()), "c1,n1", "")
    assert str(caught.value) == "not a compute node: c1\n  fix: name a node that `shoal status` lists"


async def test_a_removed_node_leaves_the_file_slurm_and_nothing_of_ours_behind(tmp_path: Path) -> None:
    world = lab()
    await raised(world)
    file = tmp_path / "shoal.yaml"
    file.write_text("# our lab\n" + LAB)
    result = await remove_node(replace(context_of(world), file=file), "n2", AT_ONCE)
    assert (result.removed, result.whole) == (("n2",), True)
    assert file.read_text() == "# our lab\n" + LAB.replace(", {name: n2, address: 10.0.0.12}", "")
    assert world.slurm.nodes == ["n1"]
    assert world.agents["n2"].items["service slurmd"]["running"] is False
    assert world.agents["n2"].items["file /etc/munge/munge.key"]["content"] is None


async def test_a_node_with_jobs_stays_as_it_is_until_they_have_ended(tmp_path: Path) -> None:
    world = lab()
    await raised(world)
    world.slurm.jobs["7"] = "n2"
    file = tmp_path / "shoal.yaml"
    file.write_text(LAB)
    result = await remove_node(replace(context_of(world), file=file), "n2", AT_ONCE)
    assert (result.staying, result.removed) == (("n2",), ())
    assert world.agents["n2"].items["service slurmd"]["running"] is True


async def test_a_node_can_only_be_taken_out_of_a_file() -> None:
    with pytest.raises(UsageError) as caught:
        await remove_node(context_of(lab()), "n2", AT_ONCE)
    assert str(caught.value) == (
        "there is no file to take n2 out of\n  fix: write one with `shoal init`, then run the command again"
    )


@pytest.mark.parametrize(
    ("host", "text"),
    [
        ("n[1-2]", "n[1-2] names 2 hosts, and this takes one\n  fix: say n1"),
        ("c1", "not a compute node: c1\n  fix: name a node that `shoal status` lists"),
    ],
)
async def test_only_one_node_is_removed_at_a_time(host: str, text: str, tmp_path: Path) -> None:
    file = tmp_path / "shoal.yaml"
    file.write_text(LAB)
    with pytest.raises(UsageError) as caught:
        await remove_node(replace(context_of(lab()), file=file), host, AT_ONCE)
    assert str(caught.value) == text
    assert file.read_text() == LAB


# ---- down


async def test_down_is_refused_while_jobs_run() -> None:
    world = lab()
    context = await raised(world)
    world.slurm.jobs |= {"7": "n1", "8_2": "n2"}
    with pytest.raises(ShoalError) as caught:
        await down(context)
    assert str(caught.value) == (
        "cluster reef has 2 running job(s): 7, 8_2\n  fix: wait for them, cancel them, or use --force"
    )
    assert (await down(context, force=True)).released == ("c1", "n1", "n2")


async def test_down_releases_hosts_and_forgets_their_keys(state: Path) -> None:
    world = lab()
    context = await raised(world)
    result = await down(context)
    assert result == DownResult("reef", released=("c1", "n1", "n2"))
    assert not kept(state)
    for agent in world.agents.values():
        assert agent.items["service munge"]["running"] is False
        assert agent.items["block members in /etc/hosts"]["content"] == ""


async def test_down_with_a_host_away_releases_the_others_and_keeps_the_keys(state: Path) -> None:
    world = lab()
    context = await raised(world)
    world.hosts["n2"].unreachable = True
    world.agents["n1"].failing["service slurmd"] = "slurmd does not stop"
    result = await down(context)
    assert result.released == ("c1",)
    assert {name: str(error) for name, error in result.failures.items()} == {
        "n1": "n1: service slurmd: slurmd does not stop\n"
        "  fix: look at `shoal ssh n1 journalctl -u slurmd`, then run `shoal down` again",
        "n2": "n2: does not answer within 10 s\n  fix: is the host up?",
    }
    assert kept(state)


async def test_down_removes_what_the_provider_made_and_needs_no_cluster_to_be_there() -> None:
    sandbox = Sandbox()
    assert await down(sandbox.context()) == DownResult("reef")
    await up(sandbox.context(), AT_ONCE)
    assert await down(sandbox.context()) == DownResult("reef", deleted=("controller", "fish1", "fish2"))
    assert sandbox.provider.clusters == {}


# ---- check


async def test_check_finds_nothing_on_a_cluster_that_is_up() -> None:
    world = lab()
    context = await raised(world)
    before = {name: len(agent.requests) for name, agent in world.agents.items()}
    assert await check(context) == []
    for name, agent in world.agents.items():
        assert {request["op"] for request in agent.requests[before[name] :]} <= {"facts", "check", "reach", "exit"}


async def test_check_says_all_that_is_wrong_the_worst_first() -> None:
    world = lab(n1={"disks": (Disk("/", 20_000, 300), Disk("/data", 20_000, 300))})
    context = await raised(world)
    world.hosts["n2"].unreachable = True
    world.slurm.states["n2"] = "DOWN*"
    warning = Finding("warning", "weights of one", path="nodesets.lab")
    edited = replace(context_of(world, LAB + "  long: {nodesets: [lab]}\n"), warnings=(warning,))
    assert [str(finding) for finding in await check(edited)] == [
        "n2: does not answer within 10 s, is the host up?",
        "n1: little space on /, found 300 MB, free at least 1 GB",
        "n2: Slurm cannot use the node, found down+not_responding, run `shoal up`; `shoal status` shows the state",
        "nodesets.lab: weights of one",
        "changes are due on c1, `shoal plan` shows them, `shoal up` makes them",
    ]
    assert context.cluster == "reef"


@pytest.mark.parametrize(
    ("state", "what"),
    [("failed", "slurmctld does not run (failed)"), ("active", "slurmctld does not answer")],
)
async def test_a_controller_whose_slurmctld_is_dead_is_an_error(state: str, what: str) -> None:
    world = lab()
    context = await raised(world)
    world.slurm.broken = "Unable to contact slurm controller\n"
    agent = world.agents["c1"]
    agent.facts = replace(agent.facts, services={**agent.facts.services, "slurmctld": state})
    assert [str(finding) for finding in await check(context) if finding.level == "error"] == [
        f"c1: {what}, run `shoal up`; its log: `shoal ssh c1 journalctl -u slurmctld`"
    ]


async def test_a_node_that_is_new_in_the_file_is_a_change_and_no_error() -> None:
    world = lab()
    await raised(world)
    wider = context_of(world, LAB.replace("controller: {", "controller: {compute: true, "))
    assert [(finding.level, finding.what) for finding in await check(wider)] == [
        ("info", "changes are due on c1"),
    ]


async def test_check_of_a_sandbox_that_is_not_there_says_what_is_in_its_way() -> None:
    sandbox = Sandbox()
    sandbox.provider.findings = [Finding("error", "not root", fix="run it with sudo")]
    assert [(finding.level, str(finding)) for finding in await check(sandbox.context())] == [
        ("error", "not root, run it with sudo"),
        ("info", "not made yet: controller,fish[1-2], run `shoal up`"),
    ]


async def test_check_without_the_controller_still_says_what_it_saw() -> None:
    world = lab(n1={"disks": (Disk("/var", 20_000, 300),)})
    world.hosts["c1"].unreachable = True
    assert [finding.host for finding in await check(context_of(world))] == ["c1", "n1"]


async def test_check_names_each_host_outside_the_version_window() -> None:
    world = lab(c1={"os_version": "13"})
    found = await check(context_of(world))
    assert [(finding.level, finding.host, finding.what) for finding in found] == [
        ("error", "n1", "Slurm too old for the controller's"),
        ("error", "n2", "Slurm too old for the controller's"),
    ]


async def test_a_provider_that_cannot_say_what_it_has_is_an_error_and_not_an_empty_cluster() -> None:
    class Mute(FakeProvider):
        async def instances(self, cluster: str) -> list[Any]:
            raise ProviderError("the sandbox's records cannot be read")

    context = Context(default_spec("reef"), providers=lambda name: Mute())
    with pytest.raises(ProviderError, match="records cannot be read"):
        await plan(context)


def test_requests_are_only_for_the_hosts_of_that_provider() -> None:
    text = "cluster: reef\ncontroller: {host: c1}\nnodesets: {fish: {provider: sandbox, count: 1}}\n"
    assert [request.name for request in requests(Context(spec_of(text)).members, "sandbox")] == ["fish1"]
