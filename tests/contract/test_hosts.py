"""What every kind of host guarantees: over SSH, on this machine, and in the shipped fake."""

import asyncio
from collections.abc import AsyncIterator, Iterator
from pathlib import Path

import pytest
from tests.support.cases import cases
from tests.support.sshd_server import Sshd, needs_sshd, running_sshd

from shoal.errors import CommandTimeout
from shoal.hosts.api import Host, Result, Target
from shoal.hosts.local import LocalConnector
from shoal.hosts.ssh import SshConnector
from shoal_simulators.fake_host import Call, FakeConnector, FakeHost, FakeProgram

WORDS = (
    *("two words", "it's", '"double"', "new\nline", "tab\there", "größe ✓", "$(id) `id` $HOME", ""),
    *("*", "!x", "a\\b", "-n", "~"),
)
BOTH = ("sh", "-c", "printf out; printf err >&2; exit 3")
BIG_LINE = ("sh", "-c", "head -c 4000000 /dev/zero; echo; echo end")
MANY_LINES = ("seq", "1", "200000")
NOISY = ("sh", "-c", "head -c 300000 /dev/zero >&2; echo tail >&2; echo done")
HALF_LINE = ("sh", "-c", "echo one; printf two")
SUICIDE = ("sh", "-c", "kill -9 $$")
LEAVES_CHILD = ("sh", "-c", "exec 3<&0; sleep 600 <&3 > /dev/null 2>&1 & echo $!")
ECHO = 'while read -r line; do echo "got $line"; done; exit 5'


async def echo(program: FakeProgram) -> int:
    while line := await program.readline():
        await program.print(b"got " + line)
    return 5


async def cat(program: FakeProgram) -> int:
    while line := await program.readline():
        await program.print(line)
    return 0


async def sleep(program: FakeProgram) -> int:
    await asyncio.sleep(3600)
    return 0


def printf(call: Call) -> bytes:
    return b"".join(f"[{word}]".encode() for word in call.argv[2:])


FAKE_ANSWERS = {
    BOTH: Result(3, b"out", b"err"),
    BIG_LINE: bytes(4_000_000) + b"\nend\n",
    MANY_LINES: b"".join(b"%d\n" % number for number in range(1, 200_001)),
    NOISY: Result(0, b"done\n", bytes(300_000) + b"tail\n"),
    HALF_LINE: b"one\ntwo",
    SUICIDE: Result(137),
    LEAVES_CHILD: b"17\n",
    ("kill", "17"): b"",
    ("sh", "-c", ECHO): echo,
    ("cat",): cat,
    ("true",): b"",
    ("sleep",): sleep,
    ("printf", "[%s]"): printf,
}


@pytest.fixture(scope="module")
def sshd(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Sshd]:
    with running_sshd(tmp_path_factory.mktemp("sshd")) as server:
        yield server


@pytest.fixture(params=[pytest.param("ssh", marks=needs_sshd), "local", "fake"])
async def host(request: pytest.FixtureRequest, tmp_path: Path) -> AsyncIterator[Host]:
    opened: Host
    if request.param == "ssh":
        server: Sshd = request.getfixturevalue("sshd")
        opened = await SshConnector(tmp_path / "cluster" / "known_hosts").connect(server.target("node"))
    elif request.param == "local":
        opened = await LocalConnector().connect(Target("node"))
    else:
        opened = await FakeConnector(FakeHost("node", FAKE_ANSWERS)).connect(Target("node"))
    async with opened:
        yield opened


async def test_run_returns_status_and_both_streams_as_bytes(host: Host) -> None:
    assert await host.run(BOTH, root=False) == Result(3, b"out", b"err")


async def test_host_has_its_name(host: Host) -> None:
    assert (host.name, host.target.name) == ("node", "node")


@cases("word", *WORDS)
async def test_arguments_arrive_unchanged(host: Host, word: str) -> None:
    result = await host.run(["printf", "[%s]", word, "next"], root=False)
    assert result.text == f"[{word}][next]"


async def test_input_of_five_megabytes_is_echoed(host: Host) -> None:
    data = bytes(range(256)) * 20_000
    result = await host.run(["cat"], stdin=data, root=False)
    assert result.status == 0
    assert result.stdout == data


async def test_unread_input_is_not_an_error(host: Host) -> None:
    assert await host.run(["true"], stdin=bytes(5_000_000), root=False) == Result(0)


async def test_missing_program_is_status_127(host: Host) -> None:
    result = await host.run(["no-such-program"], root=False)
    assert result.status == 127
    assert "no-such-program" in result.error_text


async def test_death_by_signal_is_128_plus_the_signal(host: Host) -> None:
    assert (await host.run(SUICIDE, root=False)).status == 137


async def test_timeout_names_the_program_and_leaves_the_host_usable(host: Host) -> None:
    with pytest.raises(CommandTimeout, match=r"node: `sleep` did not end within 0\.2 s"):
        await host.run(["sleep", "3600"], timeout=0.2, root=False)
    assert (await host.run(["true"], root=False)).status == 0


async def test_cancelled_run_leaves_the_host_usable(host: Host) -> None:
    task = asyncio.create_task(host.run(["sleep", "3600"], root=False))
    await asyncio.sleep(0.1)
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task
    assert (await host.run(["true"], root=False)).status == 0


async def test_run_can_be_cancelled_at_any_step_of_its_start(host: Host) -> None:
    for steps in range(16):
        task = asyncio.create_task(host.run(["sleep", "3600"], root=False))
        for _ in range(steps):
            await asyncio.sleep(0)
        task.cancel()
        _, waiting = await asyncio.wait([task], timeout=60)
        assert not waiting, f"still waiting after {steps} steps"
    assert (await host.run(["true"], root=False)).status == 0


async def test_many_programs_run_concurrently_on_a_host(host: Host) -> None:
    results = await asyncio.gather(*(host.run(["printf", "[%s]", str(n)], root=False) for n in range(24)))
    assert [result.text for result in results] == [f"[{n}]" for n in range(24)]


async def test_program_is_driven_line_by_line(host: Host) -> None:
    process = await host.start(["sh", "-c", ECHO], root=False)
    for word in (b"one\n", b"two\n"):
        await process.write(word)
        assert await process.readline() == b"got " + word
    assert await process.wait() == Result(5)
    assert await process.readline() == b""


async def test_lines_of_megabytes_are_read_whole(host: Host) -> None:
    process = await host.start(BIG_LINE, root=False)
    assert await process.readline() == bytes(4_000_000) + b"\n"
    assert await process.readline() == b"end\n"
    assert await process.readline() == b""
    assert (await process.wait()).status == 0


async def test_slow_reader_gets_every_line(host: Host) -> None:
    process = await host.start(MANY_LINES, root=False)
    await asyncio.sleep(0.2)
    count = 0
    while line := await process.readline():
        count += 1
        assert int(line) == count
    assert count == 200_000
    assert (await process.wait()).status == 0


async def test_last_line_without_newline_is_not_lost(host: Host) -> None:
    process = await host.start(HALF_LINE, root=False)
    assert [await process.readline() for _ in range(3)] == [b"one\n", b"two", b""]


async def test_wait_returns_the_unread_output(host: Host) -> None:
    process = await host.start(HALF_LINE, root=False)
    assert await process.readline() == b"one\n"
    assert await process.wait() == Result(0, b"two")


async def test_last_64_kib_of_stderr_of_a_started_program_are_kept(host: Host) -> None:
    process = await host.start(NOISY, root=False)
    assert await process.readline() == b"done\n"
    result = await process.wait()
    assert len(result.stderr) == 65536
    assert result.stderr.endswith(b"tail\n")


async def test_run_keeps_all_of_stderr(host: Host) -> None:
    assert len((await host.run(NOISY, root=False)).stderr) == 300_005


async def test_killed_program_ends_with_status_137(host: Host) -> None:
    process = await host.start(["sleep", "3600"], root=False)
    await process.kill()
    assert (await process.wait()).status == 137
    await process.kill()


async def test_program_has_ended_although_a_child_of_it_holds_its_input(host: Host) -> None:
    process = await host.start(LEAVES_CHILD, root=False)
    child = (await process.readline()).decode().strip()
    assert await process.readline() == b""
    assert (await host.run(["kill", child], root=False)).status == 0, "the child was there all the time"


async def test_closing_the_host_ends_its_programs(host: Host) -> None:
    process = await host.start(["sleep", "3600"], root=False)
    await host.close()
    ending = (await asyncio.gather(process.wait(), return_exceptions=True))[0]
    assert isinstance(ending, Exception) or ending.status == 137
