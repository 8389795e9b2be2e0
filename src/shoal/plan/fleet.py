"""The hosts of one run, each with its agent."""

from __future__ import annotations

import asyncio
from collections.abc import Mapping

from shoal.agent.client import AgentSession
from shoal.hosts.api import Connector, Target
from shoal.plan.connections import Connections


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

    async def close(self) -> None:
        await asyncio.gather(*(agent.close() for agent in self._agents.values()), return_exceptions=True)
        self._agents.clear()
        await super().close()
