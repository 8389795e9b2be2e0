"""The hosts of one run, each with its agent."""

from __future__ import annotations

import asyncio
from collections.abc import Mapping

from shoal.agent.client import AgentSession, ItemEvent, Report
from shoal.agent.document import Document
from shoal.hosts.api import Connector, Target
from shoal.plan.connections import Connections
from shoal.plan.progress import Phase


class Fleet(Connections):
    """Connections to many hosts, and agents on them."""

    def __init__(self, targets: Mapping[str, Target], connector: Connector) -> None:
        super().__init__(targets, connector)
        self._agents: dict[str, AgentSession] = {}

    async def agent(self, name: str) -> AgentSession:
        """The agent on a host, started on first use and kept: later questions cost one round trip."""
        if name not in self._agents:
            self._agents[name] = await AgentSession.open(await self.host(name))
        return self._agents[name]

    def take(self, other: Fleet) -> None:
        """Go on with the connections and agents that another has to hosts of ours; it lets go of them."""
        for name in self.targets:
            if name in other._hosts and name not in self._hosts:
                self._hosts[name] = other._hosts.pop(name)
                if name in other._agents:
                    self._agents[name] = other._agents.pop(name)

    async def converge(
        self, name: str, document: Document, secrets: Mapping[str, bytes], phase: Phase, again: str = "shoal up"
    ) -> Report:
        """Bring a host to what the document says; the phase tells how far it is.

        Raises AgentFailed for what cannot be brought about. `again` is the command to run after that.
        """

        def tell(event: ItemEvent) -> None:
            if event.text:
                phase.say(name, event.text)

        report = await (await self.agent(name)).apply(document, secrets, tell)
        report.raise_failed(name, again)
        return report

    async def close(self) -> None:
        await asyncio.gather(*(agent.close() for agent in self._agents.values()), return_exceptions=True)
        self._agents.clear()
        await super().close()
