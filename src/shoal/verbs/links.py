"""`shoal bench links`: the speed from every member to every other, over the cluster's own network."""

from __future__ import annotations

import asyncio
import json
import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from shoal.agent.document import File
from shoal.errors import AgentFailed, CommandTimeout, HostError, ShoalError, UsageError
from shoal.hosts.api import Process
from shoal.network import links as matrix
from shoal.network.addresses import addresses_in
from shoal.network.links import LINKS, LinkSpeed, Pair
from shoal.plan.connections import Fleet
from shoal.plan.progress import Phase
from shoal.remote import python_command
from shoal.roles.current_conf import HOSTS, HOSTS_BLOCK
from shoal.slurm.conf import SRUN_PORTS
from shoal.verbs.context import Context, compute_hosts

PINGS = 20
PROBE_TIMEOUT_S = 60.0
"""Beyond the seconds that the measurement itself takes."""


@dataclass(frozen=True)
class LinksResult:
    """The outcome of `shoal bench links`."""

    cluster: str
    hosts: tuple[str, ...]
    links: tuple[LinkSpeed, ...]
    groups: tuple[tuple[str, ...], ...]
    """Hosts that are near each other, by all measured links; one group where all are alike."""
    failures: Mapping[str, HostError] = field(default_factory=dict)

    @property
    def whole(self) -> bool:
        return not self.failures and not any(link.problem for link in self.links)


@dataclass(frozen=True)
class LinkProbe:
    """The measuring program on one host, and where it listens."""

    name: str
    process: Process
    address: str
    port: int
    token: str


async def bench_links(context: Context, hosts: str | None = None, seconds: float = 1.0) -> LinksResult:
    """Measure every pair in both directions, save the result on the controller, and group near hosts."""
    members = context.choose(hosts)
    if len(members) < 2:
        raise UsageError(
            f"{members[0].name} alone has no link to measure", hint="name two hosts or more, or leave out --hosts"
        )
    controller = context.controller
    async with await context.fleet(members if controller in members else [controller, *members]) as fleet:
        addresses, earlier_links = await _read_state(fleet, controller.name)
        missing_names = [member.name for member in members if member.name not in addresses]
        if missing_names:
            raise ShoalError(
                f"{', '.join(missing_names)} has no address in the cluster yet", hint="run `shoal up` first"
            )
        programs: list[Process] = []
        try:
            with context.progress.phase("measuring programs", len(members)) as phase:
                probes = await _start(fleet, {m.name: addresses[m.name] for m in members}, programs, phase)
            plan = matrix.rounds(list(probes), {member.name: member.shape.site for member in members})
            with context.progress.phase("links", sum(map(len, plan))) as phase:
                links = await _measure_all(plan, probes, seconds, phase)
        finally:
            # A program also ends by itself when its connection closes.
            await asyncio.gather(*(program.kill() for program in programs), return_exceptions=True)
        merged_links = matrix.merge_measurements(earlier_links, links, [member.name for member in context.members])
        await _save(fleet, controller.name, merged_links)
        groups = matrix.groups(merged_links, compute_hosts(context))
        return LinksResult(context.cluster, tuple(probes), links, groups, dict(fleet.failures))


async def _read_state(fleet: Fleet, controller: str) -> tuple[dict[str, str], tuple[LinkSpeed, ...]]:
    """The members' current addresses, and the links that an earlier run measured."""
    host = await fleet.host(controller)
    names, links = await asyncio.gather(host.run(("cat", HOSTS)), host.run(("cat", LINKS)))
    return addresses_in(names.text, HOSTS_BLOCK), matrix.read_links(links.text)


async def _start(
    fleet: Fleet, addresses: Mapping[str, str], programs: list[Process], phase: Phase
) -> dict[str, LinkProbe]:
    """Start the program on every host, on a port that is open to members. It answers only with its token."""
    token = os.urandom(16).hex()
    first_port, last_port = (int(port) for port in SRUN_PORTS.split("-"))

    async def start(name: str) -> LinkProbe:
        host = await fleet.host(name)
        process = await host.start(python_command("link_probe"), root=False)
        programs.append(process)
        request = {"op": "listen", "address": addresses[name], "first": first_port, "last": last_port, "token": token}
        answer = await _ask(name, process, request)
        if "problem" in answer:
            raise AgentFailed(
                name,
                f"cannot listen on {addresses[name]}: {answer['problem']}",
                hint="run `shoal up`: the host's address may have changed",
            )
        return LinkProbe(name, process, addresses[name], answer["port"], token)

    return await fleet.each(addresses, start, phase)


async def _measure_all(
    plan: Sequence[tuple[Pair, ...]], probes: Mapping[str, LinkProbe], seconds: float, phase: Phase
) -> tuple[LinkSpeed, ...]:
    """Round after round; in a round all pairs at once, each in one direction and then in the other."""
    links: list[LinkSpeed] = []

    async def measure_pair(probe: LinkProbe, peer: LinkProbe) -> None:
        phase.update(probe.name, f"and {peer.name}")
        pair_links = [await _measure(probe, peer, seconds), await _measure(peer, probe, seconds)]
        links.extend(pair_links)
        phase.done(probe.name, next((link.problem for link in pair_links if link.problem), ""))

    for pairs in plan:
        await asyncio.gather(*(measure_pair(probes[source], probes[target]) for source, target in pairs))
    order = {name: place for place, name in enumerate(probes)}
    return tuple(sorted(links, key=lambda link: (order[link.source], order[link.target])))


async def _measure(source: LinkProbe, target: LinkProbe, seconds: float) -> LinkSpeed:
    """One direction. A host that fails is a link with a problem, and stops no other pair."""
    request = {"op": "measure", "address": target.address, "port": target.port, "token": target.token}
    request |= {"seconds": seconds, "pings": PINGS, "many": matrix.PARALLEL_CONNECTIONS}
    try:
        answer = await _ask(source.name, source.process, request, 2 * seconds + PROBE_TIMEOUT_S)
    except HostError as error:
        return LinkSpeed(source.name, target.name, problem=error.message)
    return LinkSpeed(source.name, target.name, **answer)


async def _ask(name: str, process: Process, request: Mapping[str, object], timeout: float = PROBE_TIMEOUT_S) -> Any:
    """Send a request to a measuring program, and return its answer."""
    try:
        async with asyncio.timeout(timeout):
            await process.write(json.dumps(request).encode() + b"\n")
            line = await process.readline()
    except TimeoutError:
        raise CommandTimeout(
            name, f"the measuring program does not answer within {timeout:g} s", hint="is the host up?"
        ) from None
    if not line:
        output = (await process.wait()).error_text.strip().splitlines()
        raise AgentFailed(
            name,
            f"the measuring program ended: {output[-1] if output else 'no output'}",
            hint="Shoal needs python3, 3.8 or newer, on the host",
        )
    return json.loads(line)


async def _save(fleet: Fleet, controller: str, links: Sequence[LinkSpeed]) -> None:
    """Save the links on the controller, where `shoal up` reads them."""
    agent = await fleet.agent(controller)
    report = await agent.apply((File(LINKS, matrix.links_text(links)),), {}, lambda event: None)
    report.raise_failed(controller, "shoal bench links")
