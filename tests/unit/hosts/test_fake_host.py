"""The fake host of other tests: it answers from its table, records calls, and fails on request."""

import pytest

from shoal.errors import AuthenticationFailed, ConnectionLost, SudoDenied, Unreachable
from shoal.hosts.api import Result, Target
from shoal_simulators.fake_host import Call, FakeConnector, FakeHost, FakeProgram


async def test_longest_matching_command_answers() -> None:
    host = FakeHost("n1", {("scontrol",): b"any", ("scontrol", "ping"): Result(1, b"", b"down")})
    assert (await host.run(["scontrol", "show", "node"])).stdout == b"any"
    assert await host.run(["scontrol", "ping"]) == Result(1, b"", b"down")


async def test_calls_are_recorded_with_their_input() -> None:
    host = FakeHost("n1", {("cat",): lambda call: call.stdin.upper()})
    assert (await host.run(["cat", "-"], stdin=b"data", root=False)).stdout == b"DATA"
    assert host.calls == [Call(("cat", "-"), root=False, stdin=b"data")]
    assert host.argvs == [("cat", "-")]


async def test_function_can_answer_all_commands() -> None:
    host = FakeHost("n1", lambda call: Result(len(call.argv)))
    assert [(await host.run(argv)).status for argv in (["a"], ["a", "b"])] == [1, 2]


async def test_connection_is_lost_after_a_set_number_of_lines() -> None:
    host = FakeHost("n1", {("agent",): b"one\ntwo\nthree\n"}, lose_after_lines=2)
    process = await host.start(["agent"])
    assert [await process.readline(), await process.readline()] == [b"one\n", b"two\n"]
    with pytest.raises(ConnectionLost, match="n1: the connection broke while it ran `agent`"):
        await process.readline()


async def test_connection_is_lost_on_command() -> None:
    async def wait_for_input(program: FakeProgram) -> int:
        await program.print(b"ready\n")
        await program.readline()
        return 0

    host = FakeHost("n1", {("agent",): wait_for_input})
    process = await host.start(["agent"])
    assert await process.readline() == b"ready\n"
    host.lose()
    with pytest.raises(ConnectionLost):
        await process.wait()


async def test_host_can_be_unreachable_for_any_reason() -> None:
    connector = FakeConnector(
        FakeHost("n1", unreachable=True), FakeHost("n2", unreachable=AuthenticationFailed("n2", "no")), FakeHost("n3")
    )
    with pytest.raises(Unreachable, match="n1: does not answer"):
        await connector.connect(Target("n1"))
    with pytest.raises(AuthenticationFailed, match="n2: no"):
        await connector.connect(Target("n2"))
    with pytest.raises(Unreachable, match="no address is known for 'n4'"):
        await connector.connect(Target("n4"))
    async with await connector.connect(Target("n3")) as host:
        assert host.connects == 1
    assert host.closed


async def test_sudo_can_be_denied() -> None:
    host = FakeHost(Target("n1", user="ubuntu"), {("true",): b""}, sudo_denied_error=True)
    with pytest.raises(SudoDenied, match="n1: ubuntu may not become root: sudo asks for a password"):
        await host.run(["true"])
    assert (await host.run(["true"], root=False)).status == 0


async def test_exception_in_the_script_reaches_the_test() -> None:
    def broken(call: Call) -> bytes:
        raise KeyError("typo")

    with pytest.raises(KeyError, match="typo"):
        await FakeHost("n1", broken).run(["true"])


async def test_killed_call_is_recorded() -> None:
    async def forever(program: FakeProgram) -> int:
        await program.read()
        return 0

    host = FakeHost("n1", {("agent",): forever})
    process = await host.start(["agent"])
    await process.kill()
    assert host.calls[0].killed
