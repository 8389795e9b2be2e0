"""`shoal exec` and `shoal ssh`, over a cluster in memory."""

import asyncio
from pathlib import Path

import pytest
from tests.support.cases import cases
from tests.support.errors import error_of
from tests.support.fake_clusters import context_of
from tests.support.fake_world import World, host_facts, lab, spec_of

from shoal.errors import CommandTimeout, UsageError
from shoal.hosts.api import Result
from shoal.verbs.exec import execute, forget_host, ssh_command
from shoal_simulators.fake_host import FakeProgram


async def test_exec_groups_hosts_with_equal_output_and_status() -> None:
    world = lab()
    for name, answer in {"c1": b"6.1\n", "n1": b"6.1\n", "n2": Result(1, b"6.1\n")}.items():
        world.hosts[name].answers = {("uname", "-r"): answer}
    result = await execute(context_of(world), ["uname", "-r"], None, None, root=True, timeout=None)
    assert [(names, group.status) for names, group in result.groups] == [(("c1", "n1"), 0), (("n2",), 1)]
    assert result.worst == 1


async def test_operator_reaches_the_nodes_of_a_job() -> None:
    world = lab()
    world.hosts["c1"].answers = {("squeue",): b"12|12|n[1-2]\n19|15_3|n2\n"}
    for name in ("n1", "n2"):
        world.hosts[name].answers = {("true",): b""}
    chosen = {"15_3": None, "12": None, "19": "n2"}
    ran = [
        (await execute(context_of(world), ["true"], hosts, None, root=True, timeout=None, job=job)).groups[0][0]
        for job, hosts in chosen.items()
    ]
    assert ran == [("n2",), ("n1", "n2"), ("n2",)]
    for job, hosts, message in (
        ("7", None, "7 is no running job\n"),
        ("15_3", "n1", "job 15_3 does not run on n1"),
        ("12", "n[1", "is not a hostlist"),
    ):
        with pytest.raises(UsageError, match=message):
            await execute(context_of(world), ["true"], hosts, None, root=True, timeout=None, job=job)
        with pytest.raises(UsageError, match=message):
            await ssh_command(context_of(world), hosts, [], job)


async def test_exec_reports_unreachable_hosts() -> None:
    world = lab()
    world.hosts["n1"].answers = {("true",): b""}
    world.hosts["n2"].unreachable = True
    result = await execute(context_of(world), ["true"], None, "lab", root=False, timeout=None)
    assert [names for names, _ in result.groups] == [("n1",)]
    assert list(result.failures) == ["n2"]
    assert world.hosts["n1"].calls[0].root is False
    assert world.hosts["c1"].calls == []


async def test_exec_timeout_names_the_timeout_option() -> None:
    world = lab()

    async def sleep(program: FakeProgram) -> int:
        await asyncio.sleep(3600)
        return 0

    for name in ("n1", "n2"):
        world.hosts[name].answers = {("sleep",): sleep}
    result = await execute(context_of(world), ["sleep", "3600"], None, "lab", root=True, timeout=0.05)
    assert {type(error) for error in result.failures.values()} == {CommandTimeout}
    assert str(result.failures["n1"]) == (
        "n1: `sleep` did not end within the 0.05 s you gave it, and was ended\n  fix: give it longer: --timeout SECONDS"
    )


@cases(
    "argv, hint",
    (["echo $HOME | cat"], "shoal exec -- sh -c 'echo $HOME | cat'"),
    (["no-such-program"], ""),
    (["no-such-program", "a b"], ""),
)
async def test_shell_line_as_a_single_argument_gets_a_hint(argv: list[str], hint: str) -> None:
    result = await execute(context_of(lab()), argv, "n1", None, root=True, timeout=None)
    assert (result.worst, result.hint) == (127, hint)
    with pytest.raises(UsageError, match="exec needs a command\n  fix: shoal exec -- uptime"):
        await execute(context_of(lab()), [], None, None, root=True, timeout=None)


async def test_ssh_command_has_the_configured_options_and_the_cluster_keys(state: Path) -> None:
    text = "cluster: reef\ncontroller: {host: {name: c1, address: 10.0.0.1}, user: bob, port: 2222, identity: /k/id}\n"
    world = World(spec_of(text + "nodesets: {lab: {hosts: [n1]}}\n"), {"c1": host_facts("c1", "10.0.0.1")})
    assert await ssh_command(context_of(world), "c1", ["squeue", "--me"]) == [
        *("ssh", "-o", f"UserKnownHostsFile={state}/known_hosts", "-o", "StrictHostKeyChecking=yes"),
        *("-o", "HostKeyAlias=c1", "-p", "2222", "-l", "bob", "-i", "/k/id", "-o", "IdentitiesOnly=yes"),
        *("--", "10.0.0.1", "squeue", "--me"),
    ]
    assert (await ssh_command(context_of(world), "c1", ["--", "squeue"]))[-3:] == ["--", "10.0.0.1", "squeue"]
    assert (await ssh_command(context_of(world), "c1", []))[-1] == "10.0.0.1"
    line = await ssh_command(context_of(world), "c1", ["srun", "--pty", "bash"], terminal=True)
    assert line[-8:] == ["-t", "-o", "LogLevel=ERROR", "--", "10.0.0.1", "srun", "--pty", "bash"]
    assert world.hosts["c1"].connects == 4


@cases(
    "word, text",
    ("--json", "--json is after the host, where the command begins\n  fix: put --json before the host"),
    (
        "-L8080:c1:80",
        "-L8080:c1:80 is after the host, where the command begins\n"
        "  fix: for options of ssh, run ssh itself: `shoal ssh --json c1` prints its command line",
    ),
)
async def test_option_after_the_ssh_host_is_rejected(word: str, text: str) -> None:
    assert await error_of(UsageError, ssh_command(context_of(lab()), "c1", [word])) == text


def test_host_key_can_be_forgotten(state: Path) -> None:
    (state / "known_hosts").write_text("c1 ssh-ed25519 AAAAC3NzaC1lZDI1NTE5AAAAIEZg\n")
    assert forget_host(context_of(lab()), "c1") is True
    assert forget_host(context_of(lab()), "c1") is False
