"""The hosts of one run, each with its agent."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Iterable, Mapping
from typing import TYPE_CHECKING, Self, TypeVar

from shoal.errors import ControllerFailed, HostError
from shoal.hosts.api import Connector, Host, Target
from shoal.hosts.fanout import HostOutcome, fan_out
from shoal.plan.progress import Phase

if TYPE_CHECKING:
    from shoal.agent.client import AgentSession, ItemEvent, Report
    from shoal.agent.document import Document

T = TypeVar("T")


class Connections:
    """Connections to many hosts. A host that fails drops out with its cause and does not stop the others."""

    def __init__(self, targets: Mapping[str, Target], connector: Connector) -> None:
        self.targets = dict(targets)
        self.failures: dict[str, HostError] = {}
        self._connector = connector
        self._connecting: dict[str, asyncio.Future[Host]] = {}
        self._hosts: dict[str, Host] = {}

    @property
    def live(self) -> list[str]:
        """The hosts that have not dropped out, in the order of the spec."""
        return [name for name in self.targets if name not in self.failures]

    def start_connecting(self, names: Iterable[str]) -> None:
        """Begin to connect to hosts that will be needed. `host` waits for the result and raises its error."""
        for name in names:
            if name not in self._hosts and name not in self._connecting:
                self._connecting[name] = asyncio.ensure_future(self._connector.connect(self.targets[name]))

    async def host(self, name: str) -> Host:
        """The connection to a host, made on first use."""
        if name not in self._hosts:
            self.start_connecting([name])
            connection = self._connecting[name]
            try:
                # Several callers may wait for the same connection: a cancelled one must not cancel it for the others.
                self._hosts[name] = await asyncio.shield(connection)
            finally:
                if connection.done() and self._connecting.get(name) is connection:
                    del self._connecting[name]
        return self._hosts[name]

    async def reconnect(self, name: str) -> Host:
        """A new connection to a host that was lost."""
        if old := self._hosts.pop(name, None):
            await old.close()
        return await self.host(name)

    async def each(
        self, names: Iterable[str], action: Callable[[str], Awaitable[T]], phase: Phase | None = None
    ) -> dict[str, T]:
        """Run an action on many hosts at once. Returns the results by name; failures go to `failures`.

        Each host is reported to `phase` when it is done.
        """

        def report(outcome: HostOutcome[T]) -> None:
            if phase is not None:
                phase.done(outcome.name, outcome.error.cause if outcome.error else "")

        names = [name for name in names if name not in self.failures]
        outcomes = await fan_out(names, action, on_done=report)
        answers: dict[str, T] = {}
        for name, outcome in outcomes.items():
            if outcome.error is not None:
                self.failures[name] = outcome.error
            else:
                answers[name] = outcome.value  # type: ignore[assignment]
        return answers

    def require(self, name: str) -> None:
        """Raises when a host that the run depends on has dropped out, with the errors of all hosts."""
        if name not in self.failures:
            return
        raise self.failures[name] if len(self.failures) == 1 else ControllerFailed(name, self.failures)

    async def close(self) -> None:
        for connection in self._connecting.values():
            connection.cancel()
        results = await asyncio.gather(*self._connecting.values(), return_exceptions=True)
        self._connecting.clear()
        hosts = [*self._hosts.values(), *(host for host in results if not isinstance(host, BaseException))]
        await asyncio.gather(*(host.close() for host in hosts), return_exceptions=True)
        self._hosts.clear()

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, *error: object) -> None:
        await self.close()


class Fleet(Connections):
    """Connections to many hosts, and agents on them."""

    def __init__(self, targets: Mapping[str, Target], connector: Connector) -> None:
        super().__init__(targets, connector)
        self._agents: dict[str, AgentSession] = {}

    async def agent(self, name: str) -> AgentSession:
        """The agent on a host, started on first use and reused: later requests cost one round trip."""
        from shoal.agent.client import AgentSession  # slow to import, and commands about jobs need no agent

        if name not in self._agents:
            self._agents[name] = await AgentSession.open(await self.host(name))
        return self._agents[name]

    def take_over(self, other: Fleet) -> None:
        """Take over the connections and agents that another fleet has to our hosts."""
        for name in self.targets:
            if name in other._hosts and name not in self._hosts:
                self._hosts[name] = other._hosts.pop(name)
                if name in other._agents:
                    self._agents[name] = other._agents.pop(name)

    async def converge(
        self, name: str, document: Document, secrets: Mapping[str, bytes], phase: Phase, again: str = "shoal up"
    ) -> Report:
        """Bring a host to what the document says, and report to the phase.

        Raises AgentFailed for items that fail. `again` is the command to run after that.
        """

        def report_item(event: ItemEvent) -> None:
            if event.text:
                phase.update(name, event.text)

        report = await (await self.agent(name)).apply(document, secrets, report_item)
        report.raise_failed(name, again)
        return report

    async def converge_all(
        self, documents: Mapping[str, Document], secrets: Mapping[str, bytes], phase: Phase, again: str = "shoal up"
    ) -> dict[str, Report]:
        """The same for many hosts at once. Returns the reports by name; failures go to `failures`."""
        return await self.each(
            documents, lambda name: self.converge(name, documents[name], secrets, phase, again), phase
        )

    async def close(self) -> None:
        await asyncio.gather(*(agent.close() for agent in self._agents.values()), return_exceptions=True)
        self._agents.clear()
        await super().close()
