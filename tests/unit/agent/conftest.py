"""The real agent on this machine, in a temporary directory."""

from collections.abc import AsyncIterator
from pathlib import Path

import pytest
from agent_place import Place, here

from shoal.agent.client import AgentSession


@pytest.fixture
async def place(tmp_path: Path) -> AsyncIterator[Place]:
    async with await AgentSession.open(here(), state=str(tmp_path / "state")) as opened:
        yield Place(tmp_path, opened)
