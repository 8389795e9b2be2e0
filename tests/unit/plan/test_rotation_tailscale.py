"""`shoal keys rotate tailscale` over hosts in memory."""

import base64
from dataclasses import replace
from typing import Any

import pytest
from tests.support.fake_world import LAB, World, lab
from tests.unit.network.test_tailscale_status import STATUS

from shoal.agent.facts import Facts
from shoal.errors import HostError, ShoalError, UsageError
from shoal.plan.progress import NoProgress
from shoal.plan.rotation import RotationContext, rotate_tailscale
from shoal.roles.tailscale import KEY
from shoal_simulators.fake_host import FakeAgent

TAILNET = LAB + "network: {kind: tailscale, auth_key: env:TS_AUTHKEY}\n"


class Telling(FakeAgent):
    """An agent with a list of Tailscale statuses, one per query; the last one stays."""

    def __init__(self, facts: Facts, answers: list[dict[str, Any]]) -> None:
        super().__init__(facts)
        self.answers = answers
        self.given = b""

    def _answer(self, request: dict[str, Any]) -> list[dict[str, Any]]:
        if request["op"] == "facts":
            now = self.answers.pop(0) if len(self.answers) > 1 else self.answers[0]
            self.facts = replace(self.facts, tailscale=now)
        for item in request.get("items", ()):
            if item.get("path") == KEY and "content_b64" in item:
                self.given = base64.b64decode(item["content_b64"])
        return super()._answer(request)


def tailnet(monkeypatch: pytest.MonkeyPatch, **answers: list[dict[str, Any]]) -> World:
    """A lab in a tailnet. `answers` are the Tailscale statuses of a host."""
    monkeypatch.setenv("TS_AUTHKEY", "tskey-auth-new")
    world = lab(TAILNET)
    for name, host in world.hosts.items():
        agent = Telling(world.agents[name].facts, answers.get(name, [STATUS]))
        world.agents[name] = agent
        host.answers = {**host.answers, ("python3",): agent.play}
    return world


async def rotated(world: World) -> dict[str, HostError]:
    async with world.fleet() as fleet:
        with NoProgress().phase("keys", 3) as phase:
            try:
                await rotate_tailscale(RotationContext(world.spec, fleet, "c1", ("c1", "n1", "n2"), phase))
            except ShoalError as error:
                if not error.message.startswith("the rotation is not finished"):
                    raise
        return fleet.failures


async def test_every_host_logs_in_with_the_current_key(monkeypatch: pytest.MonkeyPatch) -> None:
    world = tailnet(monkeypatch)
    assert await rotated(world) == {}
    for agent in world.agents.values():
        assert isinstance(agent, Telling) and agent.given == b"tskey-auth-new"
        assert "--force-reauth" in agent.items["command join the tailnet"]["argv"]


async def test_host_that_does_not_return_or_changes_address_is_reported(monkeypatch: pytest.MonkeyPatch) -> None:
    out = {**STATUS, "BackendState": "NeedsLogin"}
    moved = {**STATUS, "TailscaleIPs": ["100.64.0.77"]}
    world = tailnet(monkeypatch, n1=[STATUS, out])
    failures = await rotated(world)
    assert failures["n1"].cause == "is not in the tailnet with its new key: NeedsLogin"
    assert set(failures) == {"n1"} and world.applied() == ["n1"], "it stops at the first host that fails"
    world = tailnet(monkeypatch, n2=[STATUS, moved])
    failures = await rotated(world)
    assert failures["n2"].cause == "came back into the tailnet as 100.64.0.77; it was 100.64.0.1"
    assert failures["n2"].hint == "run `shoal up`, which updates the other hosts"
    assert world.applied() == ["n1", "n2"], "the controller keeps its key"


async def test_rotation_waits_for_the_links_of_each_host(monkeypatch: pytest.MonkeyPatch) -> None:
    world, silent = tailnet(monkeypatch), [b"100.64.0.1\n", b""]
    world.hosts["n1"].answers = {**world.hosts["n1"].answers, ("sh", "-c"): lambda call: silent.pop(0)}
    assert await rotated(world) == {} and silent == []


async def test_host_with_silent_tailscale_is_unchanged(monkeypatch: pytest.MonkeyPatch) -> None:
    world = tailnet(monkeypatch, n1=[{}], n2=[{"problem": "no daemon"}])
    failures = await rotated(world)
    assert failures["n1"].cause == "Tailscale does not answer there: it is not installed"
    assert failures["n2"].cause == "Tailscale does not answer there: no daemon" and world.applied() == ["c1"]


async def test_missing_auth_key_changes_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    world = tailnet(monkeypatch)
    monkeypatch.delenv("TS_AUTHKEY")
    with pytest.raises(UsageError, match=r"network\.auth_key is env:TS_AUTHKEY, and TS_AUTHKEY is not set"):
        await rotated(world)
    assert world.applied() == []
