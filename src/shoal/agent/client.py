"""The operator's end of the agent: sends the program to a host once and speaks with it for as long as wanted."""

from __future__ import annotations

import asyncio
import base64
import json
import time
from collections.abc import AsyncIterator, Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field, replace
from types import TracebackType
from typing import Any, Literal, Self

from shoal.agent.document import Document, to_wire
from shoal.agent.facts import Facts, from_wire
from shoal.agent.loader import COMMAND, STATE, payload
from shoal.errors import AgentFailed, ConnectionLost
from shoal.hosts.api import Host, Process

Status = Literal["ok", "change", "changed", "failed", "skipped"]
CLOSE_TIMEOUT_S = 5.0
"""For an agent to end after `exit`."""
_LARGE_BYTES = 1 << 20
"""From this size on a secret travels by itself, before the document."""


@dataclass(frozen=True)
class FactsRequest:
    """What to look up on a host beside the fixed facts. Every name costs time; ask only for what is used."""

    packages: tuple[str, ...] = ()
    """For one that is not installed, the available version is reported; lists are fetched if there are none."""
    installed: tuple[str, ...] = ()
    """Packages of which only an installed version matters."""
    users: tuple[str, ...] = ()
    groups: tuple[str, ...] = ()
    files: Mapping[str, Literal["hash", "text", "there", "program"]] = field(default_factory=dict)
    services: tuple[str, ...] = ()
    directories: tuple[str, ...] = ()
    """Whose file systems to look at."""
    tailscale: bool = False
    """Whether to ask the host's own Tailscale what it sees."""
    filesystems: tuple[str, ...] = ()
    """Kinds of file systems, by the names the kernel has for them: `nfs4`, `nfsd`."""
    modules: tuple[str, ...] = ()
    """Kernel modules: `wireguard`."""


@dataclass(frozen=True)
class ItemResult:
    """How one item of the document stands."""

    key: str
    status: Status
    action: str = ""
    """What was or would be done: `restart slurmd (file /etc/slurm/slurm.conf changes)`."""
    diff: str = ""
    detail: str = ""
    """Why it failed, or what is worth knowing."""
    fix: str = ""
    """What to do about a failure, where that is not to be done on the host."""
    edited: bool = False
    """A file that somebody else has changed since an agent wrote it."""


@dataclass(frozen=True)
class ItemEvent:
    """Something to show while a host is being converged."""

    key: str
    text: str = ""
    """What is going on: `download 40%`."""
    result: ItemResult | None = None
    """Set when the item is finished."""


@dataclass(frozen=True)
class Report:
    """How a document stands on a host: one result an item, in its order, then restarts of services it does not name."""

    items: tuple[ItemResult, ...]
    changed: int
    failed: int

    def raise_failed(self, host: str, again: str) -> None:
        """Raises AgentFailed for the first item that failed, if one did. `again` is the command to run after that."""
        failed = next((item for item in self.items if item.status == "failed"), None)
        if failed is not None:
            hint = f"{failed.fix or _remedy(failed.key, host)}, then run `{again}` again"
            raise AgentFailed(host, f"{failed.key}: {failed.detail}", hint=hint)


class AgentSession:
    """One conversation with the agent on one host. Requests go one after another.

    A host without a usable Python, and an agent that ends unexpectedly, raise AgentFailed; a lost connection raises
    ConnectionLost. An item that fails is part of the report, not an exception.
    """

    def __init__(self, host: Host, process: Process) -> None:
        self._host = host
        self._process = process

    @classmethod
    async def open(cls, host: Host, *, state: str = STATE) -> AgentSession:
        """Start the agent. `state` is the directory on the host where it keeps what has to outlive a run."""
        session = cls(host, await host.start(COMMAND))
        await session._process.write(payload(state))
        return session

    async def facts(self, ask: FactsRequest | None = None) -> Facts:
        """What the host is, and how far its clock is ahead of ours."""
        begin = time.time()
        event = await self._answer("facts", **asdict(ask or FactsRequest()))
        with self._decoded():
            facts = from_wire(event["facts"])
            # The clock was read `took` seconds after the request arrived; the rest is the way there and back.
            travel = time.time() - begin - event["took"]
            return replace(facts, clock_offset=facts.clock - (begin + event["took"] + travel / 2))

    async def check(self, document: Document) -> Report:
        """What applying the document would change. Changes nothing."""
        await self._request("check", items=to_wire(document))
        return await self._report(len(document), lambda event: None)

    async def apply(
        self,
        document: Document,
        secrets: Mapping[str, bytes],
        on_event: Callable[[ItemEvent], None],
        *,
        defer_restarts: bool = False,
    ) -> Report:
        """Apply the document to the host. With `defer_restarts`, running services wait for a later call."""
        items = to_wire(document, secrets, _LARGE_BYTES)
        for name in dict.fromkeys(item["received"] for item in items if "received" in item):
            await self._request("receive", name=name, size=len(secrets[name]))
            await self._process.write(secrets[name])
            await self._process.write(b"\n")
        await self._request("apply", items=items, defer_restarts=defer_restarts)
        return await self._report(len(document), on_event)

    async def reach(self, targets: Sequence[tuple[str, int]], seconds: float) -> list[str]:
        """What each address and port answers this host: `open`, `refused`, `silent`, or the kernel's error."""
        event = await self._answer("reach", targets=[list(target) for target in targets], seconds=seconds)
        with self._decoded():
            answers = [str(answer) for answer in event["answers"]]
            if len(answers) != len(targets):
                raise ValueError(f"{len(answers)} answers for {len(targets)} addresses")
            return answers

    async def secret(self, path: str, make: int = 0, *, text: bool = False) -> bytes:
        """The content of a secret file. If there is none it is made first: `make` random bytes, or as `text` digits."""
        event = await self._answer("secret", path=path, make=make, text=text)
        with self._decoded():
            return base64.b64decode(event["content_b64"])

    async def close(self) -> None:
        """Let the agent go. Safe to call more than once, and after an error."""
        try:
            async with asyncio.timeout(CLOSE_TIMEOUT_S):
                await self._process.write(b'{"op": "exit"}\n')
                await self._process.wait()
        except ConnectionLost:
            pass
        except TimeoutError:
            await self._process.kill()  # the host is gone, or the agent is busy

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if kind is None:
            await self.close()
        else:
            await self._process.kill()

    async def _report(self, count: int, on_event: Callable[[ItemEvent], None]) -> Report:
        ordered: dict[int, ItemResult] = {}
        further: list[ItemResult] = []
        async for event in self._events():
            with self._decoded():
                if event["event"] == "progress":
                    on_event(ItemEvent(event["key"], event["text"]))
                elif event["event"] == "item":
                    fields = {
                        name: event[name] for name in ("action", "diff", "detail", "fix", "edited") if name in event
                    }
                    result = ItemResult(event["key"], event["status"], **fields)
                    if event["index"] < 0:
                        further.append(result)
                    else:
                        ordered[event["index"]] = result
                    on_event(ItemEvent(result.key, result=result))
                elif event["event"] == "done":
                    items = tuple(ordered[index] for index in range(count)) + tuple(further)
                    return Report(items, event["changed"], event["failed"])
        raise AssertionError("unreachable")

    @contextmanager
    def _decoded(self) -> Iterator[None]:
        """Map the errors of an answer that no agent of ours gives to the failure of this host, and of no other."""
        try:
            yield
        except (LookupError, TypeError, ValueError, AttributeError) as error:
            what = f"its agent gives an answer that cannot be read: {type(error).__name__}: {error}"
            hint = "the host may have been tampered with; replace it, or report this with the lines above"
            raise AgentFailed(self._host.name, what, hint=hint) from error

    async def _answer(self, operation: str, **values: Any) -> dict[str, Any]:
        await self._request(operation, **values)
        return await anext(event async for event in self._events() if event["event"] == operation)

    async def _request(self, operation: str, **values: Any) -> None:
        await self._process.write(json.dumps({"op": operation, **values}).encode() + b"\n")

    async def _events(self) -> AsyncIterator[dict[str, Any]]:
        while line := await self._process.readline():
            event = _event(line)
            if event is None:
                continue
            if event["event"] == "refused":
                what = f"its python3 is version {event['python']}, and Shoal needs 3.8 or newer"
                hint = "install a newer python3 on the host, or use a newer release of its distribution"
                raise AgentFailed(self._host.name, what, hint=hint)
            if event["event"] == "error":
                hint = f"repair it on the host (`shoal ssh {self._host.name}`), then run the command again"
                raise AgentFailed(self._host.name, event["text"], hint=hint)
            yield event
        raise await self._end_error()

    async def _end_error(self) -> AgentFailed:
        """Why the agent ended before it answered. Raises ConnectionLost or SudoDenied when that was the cause."""
        result = await self._process.wait()
        output = "\n".join(result.error_text.strip().splitlines()[-10:])
        if result.status == 127 or "python3: not found" in output or "python3: command not found" in output:
            what, hint = "has no python3, which Shoal needs there", "install it: apt-get install python3"
        elif "No module named" in output:
            what = f"its python3 is not complete: {output.splitlines()[-1]}"
            hint = "install the whole standard library: apt-get install python3"
        elif result.status == 137:
            what = "the agent was killed while it worked"
            hint = "if memory ran out (`journalctl -k` on the host), give it more; then run `shoal up` again"
        else:
            what = f"the agent ended unexpectedly with status {result.status}\n{output}".rstrip()
            hint = "run the command again; should it end so again, report it with these lines"
        return AgentFailed(self._host.name, what, hint=hint)


def _remedy(key: str, host: str) -> str:
    """Where to look when an item fails."""
    kind, _, name = key.partition(" ")
    if kind == "service":
        return f"look at `shoal ssh {host} journalctl -u {name}`"
    if kind == "packages":
        return f"see what `shoal ssh {host} apt-get install {name}` says"
    return f"repair it on the host (`shoal ssh {host}`)"


def _event(line: bytes) -> dict[str, Any] | None:
    """The agent's event; None for another line, such as one of a login script."""
    try:
        event = json.loads(line)
    except ValueError:
        return None
    return event if isinstance(event, dict) and "event" in event else None
