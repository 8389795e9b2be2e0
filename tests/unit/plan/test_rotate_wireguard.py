"""New WireGuard keys: seen to work from every host, and nothing of a rotation outlives the network."""

from __future__ import annotations

import pytest
from tests.unit.verbs.test_keys import context_of, mesh

from shoal.errors import ShoalError
from shoal.network.wireguard import MARK, NEXT_KEY
from shoal.plan import rotate_wireguard
from shoal.roles.documents import farewell
from shoal.verbs.keys import rotate


async def test_every_host_is_seen_to_reach_the_controller_over_the_network() -> None:
    world, _ = mesh()
    await rotate(context_of(world), "wireguard")
    for agent in world.agents.values():
        asked = [request["targets"] for request in agent.requests if request["op"] == "reach"]
        assert asked[-1] == [["10.77.0.1", 6817]]


async def test_a_host_that_does_not_come_back_ends_the_rotation_and_the_next_run_finishes_it(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(rotate_wireguard, "PATIENCE", 0)
    world, done = mesh()
    world.agents["n2"].reach["10.77.0.1"] = "silent"
    with pytest.raises(ShoalError) as caught:
        await rotate(context_of(world), "wireguard")
    assert "n2" in str(caught.value) and "does not reach the controller with its new key" in str(caught.value)
    assert "run the same command again" in str(caught.value)
    assert ("c1", f"rm -f {MARK}") not in done


def test_a_rotation_that_was_killed_leaves_no_key_and_no_mark_on_a_host_that_goes() -> None:
    assert {f"file {NEXT_KEY}", f"file {MARK}"} <= {item.key for item in farewell()}
