"""A host that exists only in memory, for tests: it answers from a table and remembers what it was asked.

    host = FakeHost("n1", {("hostname",): b"n1\\n", ("scontrol", "ping"): Result(1, stderr=b"down")})
    connector = FakeConnector(host, FakeHost("n2", unreachable=True))

A key of the table is a whole command or its first words. A value is the standard output of a program that ends well, a
Result, a function from the Call to either, or an async function that plays the program: see `FakeProgram`.
"""

from __future__ import annotations

import asyncio
import inspect
from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import cast

from shoal.errors import ConnectionLost, HostError, Unreachable
from shoal.hosts import sudo
from shoal.hosts.api import Result, Target
from shoal.hosts.pipes import STDERR_TAIL, Inbox, Tail
from shoal.hosts.process import KILLED, LineHost, LineProcess, as_it_is, told


@dataclass
class Call:
    """A program that was asked for. `stdin` grows as the input comes in."""

    argv: tuple[str, ...]
    root: bool
    stdin: bytes = b""
    killed: bool = False


class FakeProgram:
    """What an async answer is given: the call, its input to read, its output to write. Returns the exit status."""

    def __init__(self, call: Call, stdin: Inbox, out: Callable[[bytes], Awaitable[None]], err: Tail) -> None:
        self.call = call
        self._stdin = stdin
        self._out = out
        self._err = err

    async def readline(self) -> bytes:
        return await self._stdin.readline()

    async def read(self) -> bytes:
        """Standard input up to its end."""
        return await self._stdin.rest()

    async def print(self, data: bytes) -> None:
        """Write to standard output; waits while the reader is slow, and never returns once the connection is lost."""
        await self._out(data)

    def complain(self, data: bytes) -> None:
        """Write to standard error."""
        self._err.feed(data)


Program = Callable[[FakeProgram], Awaitable[int]]
Answer = bytes | Result | Callable[[Call], bytes | Result] | Program
Answers = Mapping[tuple[str, ...], Answer]


class FakeHost(LineHost):
    """A host with scripted answers. `calls` holds what it was asked, in order."""

    def __init__(
        self,
        target: Target | str,
        answers: Answers | Callable[[Call], bytes | Result] | None = None,
        *,
        unreachable: bool | HostError = False,
        lose_after_lines: int | None = None,
        sudo_refused: bool = False,
    ) -> None:
        """`lose_after_lines` breaks the connection once a program has written that many lines."""
        self.target = Target(target) if isinstance(target, str) else target
        self.answers: Answers = answers if isinstance(answers, Mapping) else {(): answers} if answers else {}
        self.unreachable = unreachable
        self.lose_after_lines = lose_after_lines
        self.sudo_refused = sudo_refused
        self.calls: list[Call] = []
        self.connects = 0
        self.closed = False
        self._running: set[_FakeWire] = set()

    @property
    def argvs(self) -> list[tuple[str, ...]]:
        return [call.argv for call in self.calls]

    async def close(self) -> None:
        self.closed = True
        for wire in list(self._running):
            await wire.kill()

    def lose(self) -> None:
        """Break the connection under every program that runs now."""
        for wire in list(self._running):
            wire.lose()

    async def _open(self, argv: Sequence[str], *, root: bool, whole_stderr: bool) -> LineProcess:
        call = Call(tuple(argv), root)
        self.calls.append(call)
        refused = root and self.sudo_refused
        answer = Result(1, stderr=b"sudo: a password is required\n") if refused else self._answer(call.argv)
        judge = partial(sudo.judge, self.name, self.target.user or "operator", argv) if refused else as_it_is
        wire = _FakeWire(self, call, answer, whole_stderr=whole_stderr)
        self._running.add(wire)
        return LineProcess(wire, judge)

    def _answer(self, argv: tuple[str, ...]) -> Answer:
        for length in range(len(argv), -1, -1):
            if argv[:length] in self.answers:
                return self.answers[argv[:length]]
        return Result(127, stderr=f"sh: 1: {argv[0]}: not found\n".encode())


class FakeConnector:
    """Connects to the fake hosts it was given, by name."""

    def __init__(self, *hosts: FakeHost) -> None:
        self.hosts = {host.name: host for host in hosts}

    async def connect(self, target: Target) -> FakeHost:
        host = self.hosts.get(target.name)
        if host is None:
            raise Unreachable(target.name, f"no address is known for {target.name!r}", hint="check the spelling")
        host.connects += 1
        if isinstance(host.unreachable, HostError):
            raise host.unreachable
        if host.unreachable:
            raise Unreachable(target.name, "does not answer within 10 s", hint="is the host up?")
        host.closed = False
        return host


class _FakeWire:
    """The pipes of a scripted program, which runs as a task."""

    def __init__(self, host: FakeHost, call: Call, answer: Answer, *, whole_stderr: bool) -> None:
        self._host = host
        self._call = call
        self._lines = 0
        self._flow = asyncio.Event()
        self._flow.set()
        self._stdin = Inbox(_nothing, _nothing)
        self.stdout = Inbox(self._flow.clear, self._flow.set)
        self.stderr = Tail(None if whole_stderr else STDERR_TAIL)
        self.status: int | None = None
        self.killed = False
        self._task = asyncio.create_task(self._play(answer))

    async def send(self, data: bytes) -> None:
        if not self._task.done():
            self._call.stdin += data
            self._stdin.feed(data)

    def close_input(self) -> None:
        self._stdin.end()

    async def kill(self) -> None:
        if self.status is None and not self._task.done():
            self.killed = self._call.killed = True
            self._end(KILLED)
        if self._task is not asyncio.current_task():
            await asyncio.wait([self._task])

    def lose(self) -> None:
        hint = "check that the host is up, then run the same again"
        what = f"the connection broke while it ran {told(self._call.argv)}"
        self._end(None, ConnectionLost(self._host.name, what, hint=hint))

    async def _play(self, answer: Answer) -> None:
        program = FakeProgram(self._call, self._stdin, self._print, self.stderr)
        try:
            self._end(await self._act(answer, program))
        except Exception as bug:
            # A mistake in the test's own script shows itself where the test waits.
            self._end(None, bug)

    async def _act(self, answer: Answer, program: FakeProgram) -> int:
        if inspect.iscoroutinefunction(answer):
            return cast(int, await answer(program))
        if callable(answer):
            await program.read()
            answer = cast(Callable[[Call], bytes | Result], answer)(self._call)
        result = Result(0, answer) if isinstance(answer, bytes) else answer
        self.stderr.feed(result.stderr)
        await self._print(result.stdout)
        return result.status

    async def _print(self, data: bytes) -> None:
        limit = self._host.lose_after_lines
        for line in data.splitlines(keepends=True):
            if limit is not None and self._lines >= limit:
                self.lose()
                raise asyncio.CancelledError
            self.stdout.feed(line)
            self._lines += line.endswith(b"\n")
            await self._flow.wait()

    def _end(self, status: int | None, error: Exception | None = None) -> None:
        self.status = status
        self.stdout.end(error)
        self._host._running.discard(self)
        if self._task is not asyncio.current_task():
            self._task.cancel()


def _nothing() -> None:
    """The input of a fake program is never held back."""
