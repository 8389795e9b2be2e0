"""How the cluster's services are: the hosts' clocks and the tracking server, for `shoal status`."""

from __future__ import annotations

import asyncio
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field

from shoal.agent.client import Ask
from shoal.agent.facts import Facts
from shoal.errors import ShoalError
from shoal.hosts.api import Host
from shoal.plan.fleet import Fleet
from shoal.roles.time import CONTAINER_MARKS, is_container
from shoal.spec.member import Member
from shoal.spec.model import Spec
from shoal.tracking import mlflow
from shoal.verbs.context import Context

PATIENCE = 5.0
"""Seconds for a host to answer. One that does not is left out: what is wrong with it is said elsewhere."""


@dataclass(frozen=True)
class Clocks:
    """How far each host's clock is ahead of the controller's, in seconds, as its agent measured it."""

    ahead: Mapping[str, float] = field(default_factory=dict)
    containers: tuple[str, ...] = ()
    """Hosts whose clock is that of the machine they run on."""


@dataclass(frozen=True)
class TrackingHealth:
    kind: str
    uri: str
    well: bool
    said: str = ""
    """What is wrong with it."""


async def present(context: Context) -> list[Member]:
    """The members that are there to be asked, and the controller in any case: without it there is nothing to say."""
    made = await context.instances() if any(member.provider for member in context.members) else {}
    return [one for one in context.members if not one.provider or one.name in made or "controller" in one.roles]


async def clocks(fleet: Fleet, names: Iterable[str], controller: str) -> Clocks:
    """Ask all hosts at once what time it is."""

    async def one(name: str) -> Facts | None:
        try:
            async with asyncio.timeout(PATIENCE):
                return await (await fleet.agent(name)).facts(Ask(files=dict.fromkeys(CONTAINER_MARKS, "there")))
        except (TimeoutError, ShoalError):
            return None

    names = list(names)
    answers = dict(zip(names, await asyncio.gather(*map(one, names)), strict=True))
    found = {name: facts for name, facts in answers.items() if facts is not None}
    if controller not in found:
        return Clocks()
    base = found[controller].clock_offset
    ahead = {name: round(facts.clock_offset - base, 3) for name, facts in found.items() if name != controller}
    return Clocks(ahead, tuple(name for name, facts in found.items() if is_container(facts)))


async def tracking_health(controller: Host, spec: Spec) -> TrackingHealth | None:
    """Whether the tracking server answers the controller, where the spec has one."""
    if spec.tracking is None:
        return None
    told = await controller.run(mlflow.TOLD, timeout=30.0)
    uri = mlflow.job_variables(told.text).get("MLFLOW_TRACKING_URI", "")
    if not uri:
        return TrackingHealth(spec.tracking.kind, "", False, "not set up yet; run `shoal up`")
    answer = await controller.run(mlflow.health_command(uri, ours=not spec.tracking.url), timeout=30.0)
    said = answer.text.strip()
    return TrackingHealth(spec.tracking.kind, uri, said == "200", "" if said == "200" else said)
