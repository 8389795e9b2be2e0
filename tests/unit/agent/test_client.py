"""The client distinguishes a host that cannot run the agent from an agent that failed."""

import asyncio
import os
import stat
import sys
from pathlib import Path

import pytest
from agent_place import ME, WithPython, here
from tests.support.cases import cases

from shoal.agent import client
from shoal.agent.client import AgentSession, ItemResult, Report
from shoal.agent.document import File, SecretRef
from shoal.errors import AgentFailed, SudoDenied
from shoal.hosts.api import Host, Result
from shoal_simulators.fake_host import FakeHost, FakeProgram


async def failure(host: Host) -> str:
    with pytest.raises(AgentFailed) as caught:
        async with await AgentSession.open(host) as session:
            await session.facts()
    return str(caught.value)


async def test_python_older_than_3_8_is_rejected_with_the_fix() -> None:
    pretend = "import sys; sys.version_info = (3, 6, 9); exec(sys.argv[-1])"
    assert await failure(WithPython([sys.executable, "-c", pretend])) == (
        "here: its python3 is version 3.6, and Shoal needs 3.8 or newer\n"
        "  fix: install a newer python3 on the host, or use a newer release of its distribution"
    )


@cases("ahead", 4000, -4000)
async def test_clock_offset_of_a_host_is_reported(tmp_path: Path, ahead: int) -> None:
    wrong = f"import sys, time; right = time.time; time.time = lambda: right() + {ahead}; exec(sys.argv[-1])"
    async with await AgentSession.open(WithPython([sys.executable, "-c", wrong]), state=str(tmp_path)) as session:
        facts = await session.facts()
    assert facts.clock_offset == pytest.approx(ahead, abs=100)


async def test_crashed_agent_is_reported_with_its_stderr() -> None:
    host = FakeHost("n1", {("python3",): Result(1, stderr=b"Traceback (most recent call last):\nMemoryError\n")})
    assert await failure(host) == (
        "n1: the agent ended unexpectedly with status 1\nTraceback (most recent call last):\nMemoryError\n"
        "  fix: run the command again; should it end so again, report it with these lines"
    )


async def test_error_of_the_agent_is_reported_with_the_fix() -> None:
    async def full(program: FakeProgram) -> int:
        await program.print(b'{"event":"error","text":"/var/lib/shoal: No space left on device"}\n')
        await program.read()
        return 0

    with pytest.raises(AgentFailed) as caught:
        async with await AgentSession.open(FakeHost("n1", {("python3",): full})) as session:
            await session.secret("/key")
    assert str(caught.value) == (
        "n1: /var/lib/shoal: No space left on device\n"
        "  fix: repair it on the host (`shoal ssh n1`), then run the command again"
    )


async def test_python_without_its_standard_library_is_reported_with_the_fix() -> None:
    words = b"Traceback (most recent call last):\nModuleNotFoundError: No module named 'json'\n"
    assert await failure(FakeHost("n1", {("python3",): Result(1, stderr=words)})) == (
        "n1: its python3 is not complete: ModuleNotFoundError: No module named 'json'\n"
        "  fix: install the whole standard library: apt-get install python3"
    )


@cases(
    "key, own_fix, fix",
    ("file /c", "", "repair it on the host (`shoal ssh n1`)"),
    ("service d", "", "look at `shoal ssh n1 journalctl -u d`"),
    ("packages a b", "", "see what `shoal ssh n1 apt-get install a b` says"),
    ("file /c", "delete options.Bad in the cluster's file", "delete options.Bad in the cluster's file"),
)
def test_failed_item_is_reported_with_the_fix_and_the_next_command(key: str, own_fix: str, fix: str) -> None:
    failed = ItemResult(key, "failed", detail="no", fix=own_fix)
    report = Report((ItemResult("group g", "ok"), failed), 0, 1)
    with pytest.raises(AgentFailed) as caught:
        report.raise_failed("n1", "shoal up")
    assert str(caught.value) == f"n1: {failed.key}: no\n  fix: {fix}, then run `shoal up` again"


async def test_user_without_sudo_raises_sudo_denied() -> None:
    with pytest.raises(SudoDenied):
        async with await AgentSession.open(FakeHost("n1", sudo_denied_error=True)) as session:
            await session.facts()


async def test_output_of_login_scripts_is_ignored() -> None:
    async def noisy(program: FakeProgram) -> int:
        await program.print(b'Welcome!\n\n42\n{"event":"secret","content_b64":"YWJj"}\n')
        await program.read()
        return 0

    async with await AgentSession.open(FakeHost("n1", {("python3",): noisy})) as session:
        assert await session.secret("/key") == b"abc"


async def test_error_of_a_killed_agent_contains_no_secret(tmp_path: Path) -> None:
    async def dies(program: FakeProgram) -> int:
        await program.readline()
        program.complain(b"Killed\n")
        return 137

    item = File(f"{tmp_path}/key", SecretRef("key"), **ME)
    with pytest.raises(AgentFailed) as caught:
        async with await AgentSession.open(FakeHost("n1", {("python3",): dies})) as session:
            await session.apply((item,), {"key": b"topsecret"}, lambda event: None)
    assert "topsecret" not in repr(caught.value) + str(caught.value)
    assert "dG9wc2VjcmV0" not in repr(caught.value) + str(caught.value)


async def cached(place: Path) -> Path:
    """The compiled program that a session leaves there."""
    async with await AgentSession.open(here(), state=str(place)) as session:
        await session.facts()
    (kept,) = (place / "agent").iterdir()
    return kept


async def test_compiled_program_is_cached_and_readable_only_by_its_owner(tmp_path: Path) -> None:
    assert await cached(tmp_path) == (kept := await cached(tmp_path))
    assert stat.S_IMODE(os.stat(tmp_path / "agent").st_mode) == 0o700
    assert stat.S_IMODE(os.stat(kept).st_mode) == 0o600


@cases("spoiled", b"", b"not marshal", b"N")
async def test_damaged_cache_of_the_compiled_program_is_replaced(tmp_path: Path, spoiled: bytes) -> None:
    kept = await cached(tmp_path)
    good = kept.read_bytes()
    kept.write_bytes(spoiled)
    async with await AgentSession.open(here(), state=str(tmp_path)) as session:
        assert (await session.facts()).hostname
    assert kept.read_bytes() == good


async def test_compiled_program_in_a_writable_directory_is_not_run(tmp_path: Path) -> None:
    kept = await cached(tmp_path)
    kept.write_bytes(b"not marshal")
    os.chmod(tmp_path / "agent", 0o777)
    async with await AgentSession.open(here(), state=str(tmp_path)) as session:
        assert (await session.facts()).hostname
    assert stat.S_IMODE(os.stat(tmp_path / "agent").st_mode) == 0o700


async def test_session_can_be_closed_twice(tmp_path: Path) -> None:
    session = await AgentSession.open(here(), state=str(tmp_path))
    await session.close()
    await session.close()


async def test_agent_that_ignores_close_is_killed(monkeypatch: pytest.MonkeyPatch) -> None:
    async def deaf(program: FakeProgram) -> int:
        await asyncio.Event().wait()
        return 0

    monkeypatch.setattr(client, "CLOSE_TIMEOUT_S", 0.05)
    host = FakeHost("n1", {("python3",): deaf})
    await (await AgentSession.open(host)).close()
    assert host.calls[-1].killed
