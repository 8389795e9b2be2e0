"""Clusters in memory for the tests of verbs: hosts that exist, and a sandbox that a provider makes."""

from typing import Any

from tests.support.fake_world import World, host_facts, lab, spec_of

from shoal.plan.apply import ApplyTimeouts
from shoal.spec.members import default_spec
from shoal.verbs.context import Context
from shoal.verbs.up import up
from shoal_simulators.fake_provider import FakeProvider

AT_ONCE = ApplyTimeouts(nodes_s=0, drain_s=0)


def context_of(world: World, text: str | None = None, **more: Any) -> Context:
    return Context(spec_of(text) if text else world.spec, connector=world.connector, **more)


async def raised(world: World, text: str | None = None) -> Context:
    """A cluster that is up."""
    context = context_of(world, text)
    assert (await up(context, AT_ONCE)).whole
    world.look_again()
    return context


async def raised_lab(text: str | None = None) -> tuple[World, Context]:
    """A lab that is up."""
    world = lab()
    return world, await raised(world, text)


async def raised_sandbox() -> "Sandbox":
    """A sandbox that is up."""
    sandbox = Sandbox()
    await up(sandbox.context(), AT_ONCE)
    sandbox.world.look_again()
    return sandbox


class Sandbox:
    """A world whose hosts a provider makes: they answer once they are made."""

    def __init__(self, nodes: int = 2) -> None:
        self.provider = FakeProvider()
        spec = default_spec("reef", nodes=nodes)
        facts = {"controller": host_facts("controller", "10.0.0.1")}
        facts |= {f"fish{number}": host_facts(f"fish{number}", f"10.0.0.1{number}") for number in (1, 2, 3)}
        self.world = World(spec, facts)

    def context(self, nodes: int = 2) -> Context:
        return Context(
            default_spec("reef", nodes=nodes), connector=self.world.connector, providers=lambda name: self.provider
        )
