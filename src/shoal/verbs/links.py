"""`shoal bench links`: how fast every member reaches every other, over the cluster's own network."""

from __future__ import annotations

import asyncio
import json
import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from shoal.agent.document import File
from shoal.errors import AgentFailed, HostError, ShoalError, TimedOut, UsageError
from shoal.hosts.api import Process
from shoal.network.links import LINKS, MANY, PROGRAM, Link, Pair, groups, links_text, merged, read_links, rounds
from shoal.network.names import addresses_in
from shoal.plan.apply import ending
from shoal.plan.fleet import Fleet
from shoal.plan.progress import Phase
from shoal.roles.in_force import HOSTS, HOSTS_BLOCK
from shoal.slurm.conf import SRUN_PORTS
from shoal.verbs.context import Context

PINGS = 20
PATIENCE = 60.0
"""Seconds that a measurement may take beyond those it was given."""


@dataclass(frozen=True)
class LinksResult:
    """What was measured."""

    cluster: str
    hosts: tuple[str, ...]
    links: tuple[Link, ...]
    groups: tuple[tuple[str, ...], ...]
    """Hosts that are near each other, by all that is known of the members' links; one group where all are alike."""
    failures: Mapping[str, HostError] = field(default_factory=dict)

    @property
    def whole(self) -> bool:
        return not self.failures and not any(link.problem for link in self.links)


@dataclass(frozen=True)
class Player:
    """The measuring program on one host, and where it listens."""

    name: str
    process: Process
    address: str
    port: int
    token: str


async def bench_links(context: Context, hosts: str | None = None, seconds: float = 1.0) -> LinksResult:
    """Measure every pair in both directions, keep the result on the controller, and say which hosts are near."""
    chosen = context.choose(hosts)
    if len(chosen) < 2:
        raise UsageError(
            f"{chosen[0].name} alone has no link to measure", hint="name two hosts or more, or leave out --hosts"
        )
    controller = context.controller
    async with await context.fleet(chosen if controller in chosen else [controller, *chosen]) as fleet:
        addresses, before = await _known(fleet, controller.name)
        absent = [member.name for member in chosen if member.name not in addresses]
        if absent:
            raise ShoalError(f"{', '.join(absent)} has no address in the cluster yet", hint="run `shoal up` first")
        programs: list[Process] = []
        try:
            with context.progress.phase("measuring programs", len(chosen)) as phase:
                players = await _start(fleet, {m.name: addresses[m.name] for m in chosen}, programs, phase)
            plan = rounds(list(players), {member.name: member.shape.site for member in chosen})
            with context.progress.phase("links", sum(map(len, plan))) as phase:
                links = await _play(plan, players, seconds, phase)
        finally:
            # A program also ends by itself when nobody speaks with it any more.
            await asyncio.gather(*(program.kill() for program in programs), return_exceptions=True)
        known = merged(before, links, [member.name for member in context.members])
        await _keep(fleet, controller.name, known)
        computes = [member.name for member in context.members if "compute" in member.roles]
        return LinksResult(context.cluster, tuple(players), links, groups(known, computes), dict(fleet.failures))


async def _known(fleet: Fleet, controller: str) -> tuple[dict[str, str], tuple[Link, ...]]:
    """The members' addresses as they are in force, and what an earlier run measured."""
    host = await fleet.host(controller)
    names, links = await asyncio.gather(host.run(("cat", HOSTS)), host.run(("cat", LINKS)))
    return addresses_in(names.text, HOSTS_BLOCK), read_links(links.text)


async def _start(
    fleet: Fleet, addresses: Mapping[str, str], programs: list[Process], phase: Phase
) -> dict[str, Player]:
    """The program on every host, listening where the firewall lets members in, to those who know its token."""
    token = os.urandom(16).hex()
    first, last = (int(port) for port in SRUN_PORTS.split("-"))
    text = PROGRAM.read_text("utf-8")

    async def start(name: str) -> Player:
        host = await fleet.host(name)
        process = await host.start(("python3", "-I", "-S", "-B", "-c", text), root=False)
        programs.append(process)
        request = {"op": "listen", "address": addresses[name], "first": first, "last": last, "token": token}
        answer = await _ask(name, process, request)
        if "problem" in answer:
            raise AgentFailed(
                name,
                f"cannot listen on {addresses[name]}: {answer['problem']}",
                hint="run `shoal up`: the host's address may have changed",
            )
        return Player(name, process, addresses[name], answer["port"], token)

    return await fleet.each(addresses, start, ending(phase))


async def _play(
    plan: Sequence[tuple[Pair, ...]], players: Mapping[str, Player], seconds: float, phase: Phase
) -> tuple[Link, ...]:
    """Round after round; in a round all pairs at once, each in one direction and then in the other."""
    links: list[Link] = []

    async def pair(one: Player, other: Player) -> None:
        phase.say(one.name, f"and {other.name}")
        both = [await _measure(one, other, seconds), await _measure(other, one, seconds)]
        links.extend(both)
        phase.done(one.name, next((link.problem for link in both if link.problem), ""))

    for pairs in plan:
        await asyncio.gather(*(pair(players[one], players[other]) for one, other in pairs))
    order = {name: place for place, name in enumerate(players)}
    return tuple(sorted(links, key=lambda link: (order[link.source], order[link.target])))


async def _measure(one: Player, other: Player, seconds: float) -> Link:
    """One direction. A host that goes away in the middle is a link with a problem, and stops no other pair."""
    request = {"op": "measure", "address": other.address, "port": other.port, "token": other.token}
    request |= {"seconds": seconds, "pings": PINGS, "many": MANY}
    try:
        answer = await _ask(one.name, one.process, request, 2 * seconds + PATIENCE)
    except HostError as error:
        return Link(one.name, other.name, problem=error.message)
    return Link(one.name, other.name, **answer)


async def _ask(name: str, process: Process, request: Mapping[str, object], patience: float = PATIENCE) -> Any:
    """One request to a measuring program, and its answer."""
    try:
        async with asyncio.timeout(patience):
            await process.write(json.dumps(request).encode() + b"\n")
            line = await process.readline()
    except TimeoutError:
        raise TimedOut(name, f"the measuring program says nothing for {patience:g} s", hint="is the host up?") from None
    if not line:
        said = (await process.wait()).error_text.strip().splitlines()
        raise AgentFailed(
            name,
            f"the measuring program ended: {said[-1] if said else 'it said nothing'}",
            hint="Shoal needs python3, 3.8 or newer, on the host",
        )
    return json.loads(line)


async def _keep(fleet: Fleet, controller: str, links: Sequence[Link]) -> None:
    """Leave the measurement on the controller, where `shoal up` looks for it."""
    agent = await fleet.agent(controller)
    report = await agent.apply((File(LINKS, links_text(links)),), {}, lambda event: None)
    report.raise_failed(controller, "shoal bench links")
