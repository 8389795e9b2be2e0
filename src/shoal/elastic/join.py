"""From a machine that answers to a node that takes jobs: the documents that every host gets, sent by the controller.

Only the controller and rented machines are changed. The controller learns the new members' names, lets them through its
firewall and into its network; other rented nodes that are there do so too; then the new ones become nodes:

    SSH answers ─▶ name, packages ─▶ all know it, and it all: keys, network ─▶ GPUs work ─▶ slurmd registers

Hosts that are always there are left alone. What they must know was said by `shoal up`.
"""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from pathlib import Path

from shoal.agent.document import Command, Document, File
from shoal.elastic.connect import MachineConnector, meet
from shoal.elastic.node_checks import broken_gpus, unregistered
from shoal.elastic.settings import KNOWN_HOSTS, Settings
from shoal.elastic.with_rented import barred, unfit_versions, with_rented
from shoal.errors import HostError, ShoalError
from shoal.hosts.api import Connector
from shoal.plan.fleet import Fleet
from shoal.plan.observe import observe
from shoal.plan.prepare import prepare
from shoal.plan.progress import Silence
from shoal.plan.secrets import secrets_for
from shoal.providers.rental import Rented
from shoal.roles.base import installation, munge_kept
from shoal.roles.cluster import Cluster
from shoal.roles.documents import documents, membership
from shoal.roles.parts import kept_secrets
from shoal.roles.stage import Stage
from shoal.roles.tailscale_rented import LOGOUT, on_controller, rented_machines
from shoal.roles.watchdog import watchdog
from shoal.spec.members import members
from shoal.spec.rented import rented_sets

ANSWER_SECONDS = 20.0
"""How long machines that the provider calls up are waited for at a time; then those that answer go on."""
RECENT_SECONDS = 120.0
"""Within this time the ledger has what has joined."""
PART_SECONDS = 10.0
_PAUSE = 0.5


@dataclass(eq=False)
class _Ready:
    """Machines of one join that have their packages, with the connections to them."""

    machines: Mapping[str, Rented]
    fleet: Fleet
    cluster: Cluster | None = None
    """The cluster with them in it, once it has been told of them."""
    refused: dict[str, str] = field(default_factory=dict)
    """Those that could not be entered, with the reason."""


class LiveJoiner:
    """Joins machines over SSH, with the controller's own key for them."""

    def __init__(
        self,
        settings: Settings,
        others: Callable[[], Mapping[str, Rented | None]],
        *,
        known_hosts: Path = KNOWN_HOSTS,
        here: Connector | None = None,
        there: Callable[[Path], Connector] | None = None,
    ) -> None:
        """`others` tells the rented nodes that have joined, with their machines as far as these are known now.

        `here` and `there` are how hosts are reached, for tests.
        """
        self._spec = on_controller(settings.spec)
        self._others = others
        self._controller = members(settings.spec)[0]
        self._connector = MachineConnector(self._controller.name, settings.identity, known_hosts, here, there)
        self._one_at_a_time = asyncio.Lock()
        self._ready: list[_Ready] = []
        """What has its packages, and is to be entered into the cluster."""
        self._joining: dict[str, Rented] = {}
        """What is in some join."""
        self._entered: dict[str, tuple[float, Rented]] = {}
        """What the others were told of, with the time: so long until `others` tells it, too."""
        self._told: frozenset[str] | None = None
        """Whom the controller and rented nodes know of; None until we have told them."""

    async def join(self, nodes: Mapping[str, Rented]) -> Mapping[str, str]:
        """Implements `shoal.elastic.fleet.Joiner`."""
        self._joining |= nodes
        try:
            return await self._join(nodes)
        finally:
            for name in nodes:
                self._joining.pop(name, None)

    async def part(self, nodes: Mapping[str, Rented]) -> None:
        """Implements `shoal.elastic.fleet.Joiner`: a tailnet goes on listing machines that did not log out."""
        due = [name for name in rented_machines(self._spec) if name in nodes]
        if self._spec.network.kind != "tailscale" or not due:
            return

        async def log_out(name: str) -> None:
            await (await fleet.host(name)).run(LOGOUT, timeout=PART_SECONDS, root=True)

        with contextlib.suppress(ShoalError, TimeoutError):
            async with (
                asyncio.timeout(PART_SECONDS),
                self._connector.fleet({name: nodes[name] for name in due}) as fleet,
            ):
                await fleet.each(due, log_out)

    async def settle(self) -> None:
        """Have the controller and rented nodes forget those that are gone. Raises ShoalError where that fails."""
        async with self._one_at_a_time:
            neighbours = self._neighbours()
            if self._told == self._known():
                return
            async with self._connector.fleet(neighbours) as fleet:
                await self._enter(fleet, [])
            self._told = self._known()

    async def _join(self, nodes: Mapping[str, Rented]) -> dict[str, str]:
        said = dict.fromkeys(nodes, "")

        def due() -> dict[str, Rented]:
            return {name: machine for name, machine in nodes.items() if not said[name]}

        async with self._connector.fleet(nodes) as fleet:
            try:
                said |= await self._answering(fleet, nodes)
                if due():
                    said |= await self._install(fleet, list(due()))
                if due():
                    cluster, refused = await self._enter_with_others(due(), fleet)
                    said |= refused
                if due():
                    said |= await self._start(fleet, cluster, due())
            except ShoalError as error:
                said |= dict.fromkeys(due(), error.message)
        for name, problem in said.items():
            if problem:
                self._entered.pop(name, None)
        return said

    async def _answering(self, fleet: Fleet, names: Iterable[str]) -> dict[str, str]:
        """Which machines let us in, and what keeps us out of the others, which are left out from here on."""

        async def answer(name: str) -> str:
            end = asyncio.get_running_loop().time() + ANSWER_SECONDS
            while True:
                try:
                    await meet(fleet, name)
                except HostError as error:
                    if asyncio.get_running_loop().time() > end:
                        del fleet.targets[name]
                        return error.cause
                    await asyncio.sleep(_PAUSE)
                else:
                    return ""

        return dict(zip(names, await asyncio.gather(*map(answer, names)), strict=True))

    async def _enter_with_others(self, machines: Mapping[str, Rented], fleet: Fleet) -> tuple[Cluster, dict[str, str]]:
        """Enter machines into the cluster, with all others that are ready by now: who is told of one is told of all.

        It is done one after another, so that each knows all that came before it, and they learn of it.
        """
        own = _Ready(machines, fleet)
        self._ready.append(own)
        try:
            async with self._one_at_a_time:
                if own.cluster is None:
                    await self._enter_ready()
        finally:
            self._ready.remove(own)
        assert own.cluster is not None
        return own.cluster, own.refused

    async def _enter_ready(self) -> None:
        """Enter all that are ready. What fails for all of them is raised, and the next one tries with the others."""
        group = [one for one in self._ready if one.cluster is None]
        machines = {name: machine for one in group for name, machine in one.machines.items()}
        async with self._connector.fleet({**self._neighbours(), **machines}) as fleet:
            for one in group:
                fleet.take(one.fleet)
            try:
                cluster, refused = await self._enter(fleet, list(machines))
            finally:
                for one in group:
                    one.fleet.take(fleet)
        now = time.monotonic()
        self._entered |= {name: (now, machine) for name, machine in machines.items() if name not in refused}
        self._told = self._known()
        for one in group:
            one.cluster = cluster
            one.refused = {name: why for name, why in refused.items() if name in one.machines}

    def _neighbours(self) -> dict[str, Rented]:
        """The rented nodes that take jobs or are about to. Whoever else was known is forgotten."""
        joined = {name: machine for name, machine in self._others().items() if machine is not None}
        recent = time.monotonic() - RECENT_SECONDS
        self._entered = {
            name: (at, machine)
            for name, (at, machine) in self._entered.items()
            if name not in joined and (name in self._joining or at > recent)
        }
        entered = {name: machine for name, (_, machine) in self._entered.items()}
        if None not in self._others().values():
            self._connector.forget_others([*joined.values(), *entered.values(), *self._joining.values()])
        return {**entered, **joined}

    def _known(self) -> frozenset[str]:
        """The rented nodes that are there, whether or not we know where."""
        return frozenset((*self._others(), *self._entered))

    async def _install(self, fleet: Fleet, new: list[str]) -> dict[str, str]:
        """Names and packages, which take longest, and of which nobody else has to know."""
        await self._name(fleet, new)
        observed = await observe(fleet, self._spec)
        fleet.require(self._controller.name)
        if await prepare(self._spec, observed.facts, fleet, Silence()):
            observed = await observe(fleet, self._spec)
            fleet.require(self._controller.name)
        cluster = with_rented(self._spec, fleet, observed.facts, self._known())
        refused = unfit_versions(cluster, new)
        there = [member for member in cluster.members if member.name in new and member.name in fleet.live]
        wanted = {member.name: installation(cluster, member) for member in there if member.name not in refused}
        await self._converge(fleet, wanted)
        return {name: fleet.failures[name].cause for name in new if name in fleet.failures} | refused

    async def _enter(self, fleet: Fleet, new: list[str]) -> tuple[Cluster, dict[str, str]]:
        """Tell the controller and rented nodes of the new ones, and these of everybody."""
        controller = self._controller.name
        observed = await observe(fleet, self._spec)
        fleet.require(controller)
        cluster = with_rented(self._spec, fleet, observed.facts, self._known())
        refused = barred(cluster, new)
        by_name = {member.name: member for member in cluster.members}
        due = [name for name in fleet.live if name not in refused]
        stages = {name: documents(cluster, by_name[name]) for name in due if name in new}
        others = {name: membership(cluster, by_name[name]) for name in due if name not in new}
        await self._converge(fleet, others | {name: found.get(Stage.BASE, ()) for name, found in stages.items()})
        fleet.require(controller)  # who is to let the new ones in has been told of them
        await self._converge(fleet, {name: found.get(Stage.SERVICES, ()) for name, found in stages.items()})
        failed = {name: fleet.failures[name].cause for name in new if name in fleet.failures}
        return cluster, failed | refused

    async def _start(self, fleet: Fleet, cluster: Cluster, new: Mapping[str, Rented]) -> dict[str, str]:
        """Look at the GPUs, start slurmd, and wait for Slurm to have heard of it."""
        unfit = await broken_gpus(self._spec, fleet, new)
        last = {
            member.name: (
                *documents(cluster, member).get(Stage.NODES, ()),
                *self._watchdog(member.name, new[member.name], member.name not in cluster.tunnels),
            )
            for member in cluster.members
            if member.name in new and member.name not in fleet.failures and member.name not in unfit
        }
        await self._converge(fleet, last)
        started = [name for name in last if name not in fleet.failures]
        unheard = await unregistered(await fleet.host(self._controller.name), started)
        failed = {name: fleet.failures[name].cause for name in new if name in fleet.failures}
        return dict.fromkeys(new, "") | unheard | failed | unfit

    async def _name(self, fleet: Fleet, new: Iterable[str]) -> None:
        """Give machines their nodes' names: Slurm's daemons and training jobs go by them."""

        async def rename(name: str) -> None:
            document: Document = (
                File("/etc/hostname", f"{name}\n"),
                # A container cannot, and does without.
                Command(
                    "take the node's name",
                    ("sh", "-c", f"hostname {name} || test ! -d /run/systemd/system"),
                    unless=("sh", "-c", f'test "$(hostname)" = {name}'),
                ),
            )
            with Silence().phase("", 1) as phase:
                await fleet.converge(name, document, {}, phase)

        await fleet.each(new, rename)

    async def _converge(self, fleet: Fleet, wanted: Mapping[str, Document]) -> None:
        due = {name: document for name, document in wanted.items() if document and name not in fleet.failures}
        kept = {**munge_kept(self._controller.name), **kept_secrets(self._spec)}
        secrets = await secrets_for(due.values(), kept, {}, fleet)

        async def converge(name: str) -> None:
            with Silence().phase("", 1) as phase:
                await fleet.converge(name, due[name], secrets, phase, "shoal up")

        await fleet.each(due, converge)

    def _watchdog(self, name: str, machine: Rented, systemd: bool) -> Document:
        nodeset = next(one for one in rented_sets(self._spec).values() if name in one.nodes)
        return watchdog(name, int((machine.created or time.time()) + nodeset.lifetime), systemd=systemd)
