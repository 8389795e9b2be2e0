"""What an agent guarantees to its client: the real program on this machine, and the shipped fake."""

import grp
import os
import pwd
from collections.abc import AsyncIterator, Iterator
from dataclasses import replace
from hashlib import sha256
from pathlib import Path

import pytest

from shoal.agent.client import AgentSession, FactsRequest, ItemEvent
from shoal.agent.document import Command, Directory, File, SecretRef
from shoal.agent.facts import Facts
from shoal.errors import AgentFailed, ConnectionLost
from shoal.hosts.api import Host, Target
from shoal.hosts.local import LocalHost
from shoal_simulators.fake_host import FakeAgent, FakeHost

SECRET = b"correct horse battery staple"


@pytest.fixture(params=["program", "fake"])
def host(request: pytest.FixtureRequest) -> Iterator[Host]:
    if request.param == "program":
        yield LocalHost(Target("here"), through_sudo=False)
    else:
        yield FakeHost("here", {("python3",): FakeAgent(Facts(hostname="here", python="3.11.2", memory_mb=1)).play})


@pytest.fixture
async def session(host: Host, tmp_path: Path) -> AsyncIterator[AgentSession]:
    async with await AgentSession.open(host, state=str(tmp_path / "state")) as opened:
        yield opened


def document(tmp_path: Path, text: str = "a=1\n") -> tuple[Directory | File | Command, ...]:
    owner, group = pwd.getpwuid(os.geteuid()).pw_name, grp.getgrgid(os.getegid()).gr_name
    return (
        Directory(str(tmp_path / "etc"), owner, group),
        File(str(tmp_path / "etc/a.conf"), text, owner, group, reloads=("command reload",)),
        File(str(tmp_path / "etc/key"), SecretRef("key", sha256(SECRET).hexdigest()), owner, group, 0o400),
        Command("reload", ("sh", "-c", f"echo reloaded >> {tmp_path}/reloads"), on_change=True),
    )


async def apply(session: AgentSession, *items: Directory | File | Command) -> tuple[list[str], int, int]:
    report = await session.apply(items, {"key": SECRET}, lambda event: None)
    return [item.status for item in report.items], report.changed, report.failed


async def test_check_changes_nothing_and_predicts_apply(session: AgentSession, tmp_path: Path) -> None:
    items = document(tmp_path)
    for _ in range(2):
        report = await session.check(items)
        assert [item.status for item in report.items] == ["change"] * 4
        assert [item.key for item in report.items] == [item.key for item in items]
        assert (report.changed, report.failed) == (4, 0)
    assert await apply(session, *items) == (["changed"] * 4, 4, 0)


async def test_second_apply_changes_nothing(session: AgentSession, tmp_path: Path) -> None:
    await apply(session, *document(tmp_path))
    assert await apply(session, *document(tmp_path)) == (["ok"] * 4, 0, 0)
    report = await session.check(document(tmp_path))
    assert (report.changed, report.failed) == (0, 0)


async def test_changed_file_runs_only_its_reload_command(session: AgentSession, tmp_path: Path) -> None:
    await apply(session, *document(tmp_path))
    again = await apply(session, *document(tmp_path, "a=2\n"))
    assert again == (["ok", "changed", "ok", "changed"], 2, 0)


async def test_every_finished_item_is_reported_at_once(session: AgentSession, tmp_path: Path) -> None:
    seen: list[ItemEvent] = []
    report = await session.apply(document(tmp_path), {"key": SECRET}, seen.append)
    assert tuple(event.result for event in seen if event.result) == report.items


async def test_secret_is_never_shown(session: AgentSession, tmp_path: Path) -> None:
    seen: list[ItemEvent] = []
    checked = await session.check(document(tmp_path))
    report = await session.apply(document(tmp_path), {"key": SECRET}, seen.append)
    assert checked.items[2].diff == "(secret)"
    assert SECRET.decode() not in repr((seen, report, checked, session))


async def test_unresolved_secret_keeps_an_existing_file_and_cannot_create_a_file(
    session: AgentSession, tmp_path: Path
) -> None:
    directory, _, known, _ = document(tmp_path)
    assert isinstance(known, File)
    unknown = replace(known, content=SecretRef("another"))
    assert [item.status for item in (await session.check((directory, unknown))).items] == ["change", "change"]
    report = await session.apply((directory, unknown), {}, lambda event: None)
    assert [item.status for item in report.items] == ["changed", "failed"]
    assert report.items[1].detail == f"the value of the secret for {tmp_path}/etc/key was not given"
    await apply(session, known)
    assert [item.status for item in (await session.check((unknown,))).items] == ["ok"]
    assert await apply(session, unknown, known) == (["ok", "ok"], 0, 0)


async def test_secret_file_is_generated_once_and_stays(session: AgentSession, tmp_path: Path) -> None:
    path = str(tmp_path / "munge.key")
    made = await session.secret(path, make=1024)
    assert len(made) == 1024
    assert await session.secret(path, make=1024) == made
    assert await session.secret(path) == made


async def test_missing_secret_file_is_an_error_with_its_path(session: AgentSession, tmp_path: Path) -> None:
    with pytest.raises(AgentFailed, match=f"here: {tmp_path}/none: No such file or directory"):
        await session.secret(str(tmp_path / "none"))


async def test_facts_include_the_clock_offset(session: AgentSession) -> None:
    facts = await session.facts(FactsRequest(users=("root",)))
    assert facts.hostname and facts.python and facts.memory_mb > 0
    assert abs(facts.clock_offset) < 30


async def test_host_without_python_is_rejected_with_the_fix() -> None:
    with pytest.raises(AgentFailed) as caught:
        async with await AgentSession.open(FakeHost("bare")) as session:
            await session.facts()
    assert str(caught.value) == (
        "bare: has no python3, which Shoal needs there\n  fix: install it: apt-get install python3"
    )


async def test_connection_lost_during_apply_raises_connection_lost(tmp_path: Path) -> None:
    host = FakeHost("gone", {("python3",): FakeAgent(Facts()).play}, lose_after_lines=2)
    with pytest.raises(ConnectionLost):
        async with await AgentSession.open(host) as session:
            await session.apply(document(tmp_path), {"key": SECRET}, lambda event: None)
