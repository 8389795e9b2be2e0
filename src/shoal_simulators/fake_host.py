"""A host and an agent in memory, for tests. The host answers from a table and records the calls.

    host = FakeHost("n1", {("hostname",): b"n1\\n", ("scontrol", "ping"): Result(1, stderr=b"down")})
    connector = FakeConnector(host, FakeHost("n2", unreachable=True))

A key of the table is a whole command or its first words. A value is the standard output of a program that succeeds, a
Result, a function from the Call to either, or an async function that plays the program: see `FakeProgram`.

The agent speaks the agent's protocol on a FakeHost and changes nothing:

    agent = FakeAgent(Facts(hostname="n1"), failing={"service slurmd": "slurmd did not start"})
    host = FakeHost("n1", {("python3",): agent.play})
"""

from __future__ import annotations

import asyncio
import base64
import hashlib
import inspect
import json
import time
from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import asdict, dataclass
from functools import partial
from typing import Any, cast

from shoal.agent.facts import Facts
from shoal.errors import ConnectionLost, HostError, Unreachable
from shoal.hosts import sudo
from shoal.hosts.api import Result, Target
from shoal.hosts.process import KILLED, LineHost, LineProcess, OutputBuffer, OutputTail, ProgramChannel, program_name


@dataclass
class Call:
    """A program that was started. `stdin` grows with its input."""

    argv: tuple[str, ...]
    root: bool
    stdin: bytes = b""
    killed: bool = False


class FakeProgram:
    """What an async answer is given: the call, its input to read, its output to write. Returns the exit status."""

    def __init__(
        self, call: Call, stdin: OutputBuffer, out: Callable[[bytes], Awaitable[None]], err: OutputTail
    ) -> None:
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
    """A host with scripted answers. `calls` has the programs it was asked to run, in order."""

    def __init__(
        self,
        target: Target | str,
        answers: Answers | Callable[[Call], bytes | Result] | None = None,
        *,
        unreachable: bool | HostError = False,
        lose_after_lines: int | None = None,
        sudo_denied_error: bool = False,
    ) -> None:
        """`lose_after_lines` breaks the connection once a program has written that many lines."""
        self.target = Target(target) if isinstance(target, str) else target
        self.answers: Answers = answers if isinstance(answers, Mapping) else {(): answers} if answers else {}
        self.unreachable = unreachable
        self.lose_after_lines = lose_after_lines
        self.sudo_denied_error = sudo_denied_error
        self.calls: list[Call] = []
        self.connects = self._connections = 0
        self.closed = False
        self._running: set[_FakeChannel] = set()

    @property
    def argvs(self) -> list[tuple[str, ...]]:
        return [call.argv for call in self.calls]

    async def close(self) -> None:
        self._connections -= 1
        if self._connections > 0:
            return  # another one is open
        self.closed = True
        for channel in list(self._running):
            await channel.kill()

    def lose(self) -> None:
        """Break the connection under every program that runs now."""
        for channel in list(self._running):
            channel.lose()

    async def _open(self, argv: Sequence[str], *, root: bool, whole_stderr: bool) -> LineProcess:
        call = Call(tuple(argv), root)
        self.calls.append(call)
        refused = root and self.sudo_denied_error
        answer = Result(1, stderr=b"sudo: a password is required\n") if refused else self._answer(call.argv)
        judge = partial(sudo.check_sudo_result, self.name, self.target.user or "operator", argv) if refused else None
        channel = _FakeChannel(self, call, answer, whole_stderr=whole_stderr)
        self._running.add(channel)
        return LineProcess(channel, judge)

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
        host._connections += 1
        host.closed = False
        return host


class _FakeChannel(ProgramChannel):
    """The pipes of a scripted program, which runs as a task."""

    def __init__(self, host: FakeHost, call: Call, answer: Answer, *, whole_stderr: bool) -> None:
        self._host = host
        self._call = call
        self._lines = 0
        self._flow = asyncio.Event()
        self._flow.set()
        super().__init__(self._flow.clear, self._flow.set, whole_stderr=whole_stderr)
        self._stdin = OutputBuffer(_nothing, _nothing)
        self._task = asyncio.create_task(self._play(answer))

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
        what = f"the connection broke while it ran {program_name(self._call.argv)}"
        self._end(None, ConnectionLost(self._host.name, what, hint=hint))

    def _write(self, chunk: bytes) -> bool:
        if self._task.done():
            return False
        self._call.stdin += chunk
        self._stdin.feed(chunk)
        return True

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
    """The input of a fake program has no flow control."""


class FakeAgent:
    """The agent of one host. `items` holds what was applied, by key; it stays from one session to the next."""

    def __init__(
        self,
        facts: Facts,
        *,
        failing: Mapping[str, str] | None = None,
        secrets: Mapping[str, bytes] | None = None,
        reach: Mapping[str, str] | None = None,
    ) -> None:
        """`failing` has the items that fail, by key, with their messages; `reach` the answers of other addresses where
        they are not `open`."""
        self.facts = facts
        self.failing = dict(failing or {})
        self.secrets = dict(secrets or {})
        self.items: dict[str, dict[str, Any]] = {}
        self.reach = dict(reach or {})
        self.requests: list[dict[str, Any]] = []
        self._due: set[str] = set()

    async def play(self, program: FakeProgram) -> int:
        """The program to give to a FakeHost."""
        size = int((await program.readline()).split()[0])
        while size > 0:
            size -= len(await program.readline())
        received: dict[str, bytes] = {}
        while line := await program.readline():
            request = json.loads(line)
            if request["op"] == "receive":
                content = bytearray()  # of megabytes, in lines of some hundred bytes
                while len(content) <= request["size"]:
                    content += await program.readline()
                received[request["name"]] = bytes(content[:-1])
                continue
            for item in request.get("items", ()):
                if "received" in item:
                    item["content_b64"] = base64.b64encode(received[item.pop("received")]).decode()
            self.requests.append({name: value for name, value in request.items() if name != "items"})
            if request["op"] == "exit":
                break
            for event in self._answer(request):
                await program.print(json.dumps(event).encode() + b"\n")
        return 0

    def _answer(self, request: dict[str, Any]) -> list[dict[str, Any]]:
        if request["op"] == "facts":
            return [{"event": "facts", "facts": {**asdict(self.facts), "clock": time.time()}, "took": 0.0}]
        if request["op"] == "reach":
            answers = [self.reach.get(address, "open") for address, _ in request["targets"]]
            return [{"event": "reach", "answers": answers}]
        if request["op"] == "secret":
            path = request["path"]
            if path not in self.secrets and not request["make"]:
                return [{"event": "error", "text": f"{path}: No such file or directory"}]
            content = self.secrets.setdefault(path, path.encode().ljust(request["make"], b"."))
            return [{"event": "secret", "content_b64": base64.b64encode(content).decode()}]
        return self._converge(
            request["items"], dry=request["op"] == "check", defer=request.get("defer_restarts", False)
        )

    def _converge(self, items: list[dict[str, Any]], *, dry: bool, defer: bool) -> list[dict[str, Any]]:
        due = set(self._due)
        events: list[dict[str, Any]] = []
        stop = ""
        for index, item in enumerate(items):
            event = {"event": "item", "index": index, "key": item["key"], "action": "", "diff": "", "detail": ""}
            if stop:
                event.update(status="skipped", detail=stop)
            elif item["key"] in self.failing:
                event.update(status="failed", detail=self.failing[item["key"]])
                stop = "" if dry else f"after the failure of {item['key']}"
            elif not dry and item["key"] not in self.items and _valueless(item):
                event.update(status="failed", detail=f"the value of the secret for {item['path']} was not given")
                stop = f"after the failure of {item['key']}"
            else:
                event.update(self._apply(item, due, dry=dry, defer=defer))
            events.append(event)
        if not dry:
            self._due = due
        changed = sum(event["status"] in ("change", "changed") for event in events)
        failed = sum(event["status"] == "failed" for event in events)
        return [*events, {"event": "done", "changed": changed, "failed": failed}]

    def _apply(self, item: dict[str, Any], due: set[str], *, dry: bool, defer: bool) -> dict[str, Any]:
        target = _comparable(item)
        before = self.items.get(item["key"])
        if before and "sha256" in before and _valueless(item):
            target["sha256"] = before["sha256"]  # without a new value the host keeps its own
        differs = before != target and not item.get("on_change")
        restart = item["key"] in due and not (defer and item["kind"] == "service")
        if not differs and not restart:
            return {"status": "ok"}
        due.update(f"service {name}" for name in item.get("restarts", ()))
        due.update(item.get("reloads", ()))
        due.discard(item["key"])
        if not dry:
            self.items[item["key"]] = target
        action = f"make {item['key']}" if differs else f"restart {item['key']}"
        return {
            "status": "change" if dry else "changed",
            "action": action,
            "diff": "(secret)" * bool(item.get("secret")),
        }


def _valueless(item: dict[str, Any]) -> bool:
    """Whether it is a secret of which neither the value nor its digest was sent."""
    return bool(item.get("secret")) and "content_b64" not in item and not item["sha256"]


def _comparable(item: dict[str, Any]) -> dict[str, Any]:
    """An item without what a dry run does not know: a secret counts by its digest."""
    if "content_b64" in item:
        item = {**item, "sha256": hashlib.sha256(base64.b64decode(item["content_b64"])).hexdigest()}
    return {name: value for name, value in item.items() if name not in ("content_b64", "restarts", "reloads")}
