"""Clusters that are up, and their state away from that of the person who runs the tests."""

from pathlib import Path

import pytest
from tests.support.fake_clusters import Sandbox, context_of, raised_lab, raised_sandbox
from tests.support.fake_world import World

from shoal.verbs.context import Context


@pytest.fixture(autouse=True)
def state(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Where the host keys of cluster `reef` are kept; its sandbox would be beside it."""
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path / "state"))
    monkeypatch.setenv("SHOAL_CACHE", str(tmp_path / "cache"))
    (tmp_path / "state" / "shoal" / "reef").mkdir(parents=True)
    return tmp_path / "state" / "shoal" / "reef"


@pytest.fixture
async def world(state: Path) -> World:
    """A lab that is up."""
    world, _ = await raised_lab()
    return world


@pytest.fixture
def context(world: World) -> Context:
    return context_of(world)


@pytest.fixture
async def sandbox(state: Path) -> Sandbox:
    """A sandbox that is up."""
    return await raised_sandbox()
