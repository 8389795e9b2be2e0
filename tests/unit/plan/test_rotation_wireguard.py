"""New WireGuard keys: every host verifies them, and no file of a rotation outlives the network."""

from typing import Any

import pytest
from tests.support.errors import error_of
from tests.support.fake_clusters import context_of
from tests.support.fake_world import World
from tests.unit.verbs.test_keys import mesh

from shoal.errors import ShoalError
from shoal.hosts.api import Result
from shoal.network.wireguard import MARK
from shoal.plan import rotation_wireguard
from shoal.verbs.keys import rotate
from shoal_simulators.fake_host import Call, FakeAgent

ON_THE_NETWORK = {"10.77.0.1": "c1", "10.77.0.2": "n1", "10.77.0.3": "n2"}


def calls(world: World) -> list[tuple[str, str]]:
    """The pairs of hosts that connected over the network, in alphabetical order."""
    return sorted(
        (name, ON_THE_NETWORK[address])
        for name, agent in world.agents.items()
        for request in agent.requests
        if request["op"] == "reach"
        for address, _ in request["targets"]
        if address in ON_THE_NETWORK
    )


async def test_rotation_ends_when_every_pair_has_a_handshake_and_one_side_initiates() -> None:
    world, _ = mesh()
    await rotate(context_of(world), "wireguard")
    assert calls(world) == [("c1", "n1"), ("c1", "n2"), ("n1", "n2")]


async def test_host_behind_nat_initiates_to_the_others() -> None:
    world, _ = mesh()
    at = world.agents["n1"].facts.addresses[0].address
    for other in ("c1", "n2"):
        world.agents[other].reach[at] = "silent"
    await rotate(context_of(world), "wireguard")
    assert calls(world) == [("c1", "n2"), ("n1", "c1"), ("n1", "n2")]


class DeafAtFirst(FakeAgent):
    """An agent whose host gets no answer over the network at its first attempt."""

    def _answer(self, request: dict[str, Any]) -> list[dict[str, Any]]:
        asked = [one["targets"] for one in self.requests if one["op"] == "reach"]
        events = super()._answer(request)
        if request["op"] == "reach" and asked.count(request["targets"]) == 1:
            over = [address in ON_THE_NETWORK for address, _ in request["targets"]]
            events[0]["answers"] = ["silent" if found else "open" for found in over]
        return events


async def test_silent_pair_is_retried_until_its_handshake() -> None:
    world, done = mesh()
    world.agents["n1"] = agent = DeafAtFirst(world.agents["n1"].facts)
    world.hosts["n1"].answers = {**world.hosts["n1"].answers, ("python3",): agent.play}
    await rotate(context_of(world), "wireguard")
    assert calls(world) == [("c1", "n1"), ("c1", "n2"), ("n1", "n2"), ("n1", "n2")]
    assert done[-1] == ("c1", f"rm -f {MARK}")


async def test_pair_without_a_handshake_or_a_host_with_its_old_key_stops_the_rotation(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(rotation_wireguard, "HANDSHAKE_TIMEOUT_S", 0)
    world, done = mesh()
    world.agents["n1"].reach["10.77.0.3"] = "silent"
    assert await error_of(ShoalError, rotate(context_of(world), "wireguard")) == (
        "the rotation is not finished: n1: cannot reach n2 with its new key\n  fix: run the same command again"
    )
    assert ("c1", f"rm -f {MARK}") not in done
    world, _ = mesh()
    shell = world.hosts["n2"].answers["sh", "-c"]

    def other_key(call: Call) -> Any:
        return Result(1) if "public-key" in call.argv[2] else shell(call)

    world.hosts["n2"].answers |= {("sh", "-c"): other_key}
    with pytest.raises(ShoalError, match="n2: does not use its new key"):
        await rotate(context_of(world), "wireguard")
