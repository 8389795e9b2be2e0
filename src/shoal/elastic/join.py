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
from contextlib import AsyncExitStack
from dataclasses import replace
from pathlib import Path

from shoal.agent.document import Command, Document, File
from shoal.agent.facts import Facts, FileFact
from shoal.elastic.fleet import UNFIT
from shoal.elastic.settings import KNOWN_HOSTS, Settings
from shoal.elastic.ways import Ways
from shoal.errors import HostError, ShoalError
from shoal.hosts.api import Connector, Host
from shoal.network.wireguard import PEERS, peers_conf, peers_in
from shoal.plan.fleet import Fleet
from shoal.plan.observe import observe
from shoal.plan.pairs import reached_addresses
from shoal.plan.prepare import prepare
from shoal.plan.progress import Silence
from shoal.plan.secrets import secrets_for
from shoal.providers.rental import Rented
from shoal.roles.base import installation, munge_kept
from shoal.roles.cluster import Cluster, assemble
from shoal.roles.documents import documents, membership
from shoal.roles.ids import choose_ids
from shoal.roles.in_force import in_force
from shoal.roles.parts import kept_secrets, part_findings
from shoal.roles.rented import promised
from shoal.roles.stage import Stage
from shoal.roles.tailscale_rented import LOGOUT, on_controller, rented_machines
from shoal.roles.watchdog import health_command, watchdog
from shoal.roles.wireguard import file_text
from shoal.slurm.state import NODES_COMMAND, parse_nodes
from shoal.slurm.versions import window_findings
from shoal.spec.members import members, rented_members
from shoal.spec.rented import rented_sets

ANSWER_SECONDS = 20.0
"""How long machines that the provider calls up are waited for at a time; then those that answer go on."""
RECENT_SECONDS = 120.0
"""Within this time the ledger has what has joined."""
HEALTH_SECONDS = 180.0
REGISTER_SECONDS = 60.0
PART_SECONDS = 10.0
_PAUSE = 0.5


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
        self._ways = Ways(self._controller.name, settings.identity, known_hosts, here, there)
        self._one_at_a_time = asyncio.Lock()
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
            async with asyncio.timeout(PART_SECONDS), self._ways.fleet({name: nodes[name] for name in due}) as fleet:
                await fleet.each(due, log_out)

    async def settle(self) -> None:
        """Have the controller and rented nodes forget those that are gone. Raises ShoalError where that fails."""
        async with self._one_at_a_time:
            neighbours = self._neighbours()
            if self._told == self._known():
                return
            async with self._ways.fleet(neighbours) as fleet:
                await self._enter(fleet, [])
            self._told = self._known()

    async def _join(self, nodes: Mapping[str, Rented]) -> dict[str, str]:
        said = await self._answering(nodes)

        def due() -> dict[str, Rented]:
            return {name: machine for name, machine in nodes.items() if not said[name]}

        try:
            if due():
                async with self._ways.fleet(due()) as fleet:
                    said |= await self._install(fleet, list(due()))
            if due():
                async with AsyncExitStack() as stack:
                    # One after another, so that each knows all that came before it, and they learn of it.
                    async with self._one_at_a_time:
                        everyone = {**self._neighbours(), **due()}
                        fleet = await stack.enter_async_context(self._ways.fleet(everyone))
                        cluster, refused = await self._enter(fleet, list(due()))
                        said |= refused
                        self._entered |= {name: (time.monotonic(), machine) for name, machine in due().items()}
                        self._told = self._known()
                    said |= await self._start(fleet, cluster, due())
        except ShoalError as error:
            said |= dict.fromkeys(due(), error.message)
        for name, problem in said.items():
            if problem:
                self._entered.pop(name, None)
        return said

    async def _answering(self, nodes: Mapping[str, Rented]) -> dict[str, str]:
        """Which machines let us in, and what keeps us out of the others."""

        async def meet(name: str) -> str:
            end = asyncio.get_running_loop().time() + ANSWER_SECONDS
            while True:
                try:
                    await self._ways.meet(name, nodes[name])
                except HostError as error:
                    if asyncio.get_running_loop().time() > end:
                        return error.cause
                    await asyncio.sleep(_PAUSE)
                else:
                    return ""

        return dict(zip(nodes, await asyncio.gather(*map(meet, nodes)), strict=True))

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
            self._ways.forget_others([*joined.values(), *entered.values(), *self._joining.values()])
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
        cluster = self._assemble(fleet, observed.facts)
        refused = self._refused(cluster, new)
        there = [member for member in cluster.members if member.name in new and member.name in fleet.live]
        wanted = {member.name: installation(cluster, member) for member in there if member.name not in refused}
        await self._converge(fleet, wanted)
        return {name: fleet.failures[name].cause for name in new if name in fleet.failures} | refused

    async def _enter(self, fleet: Fleet, new: list[str]) -> tuple[Cluster, dict[str, str]]:
        """Tell the controller and rented nodes of the new ones, and these of everybody."""
        controller = self._controller.name
        observed = await observe(fleet, self._spec)
        fleet.require(controller)
        cluster = self._assemble(fleet, observed.facts)
        refused = self._barred(cluster, new)
        by_name = {member.name: member for member in cluster.members}
        due = [name for name in fleet.live if name not in refused]
        await self._converge(fleet, {name: membership(cluster, by_name[name]) for name in due if name not in new})
        fleet.require(controller)
        stages = {name: documents(cluster, by_name[name]) for name in due if name in new}
        for stage in (Stage.BASE, Stage.SERVICES):
            await self._converge(fleet, {name: found.get(stage, ()) for name, found in stages.items()})
        failed = {name: fleet.failures[name].cause for name in new if name in fleet.failures}
        return cluster, failed | refused

    async def _start(self, fleet: Fleet, cluster: Cluster, new: Mapping[str, Rented]) -> dict[str, str]:
        """Look at the GPUs, start slurmd, and wait for Slurm to have heard of it."""
        unfit = await self._unfit(fleet, new)
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
        unregistered = await self._register(await fleet.host(self._controller.name), started)
        failed = {name: fleet.failures[name].cause for name in new if name in fleet.failures}
        return dict.fromkeys(new, "") | unregistered | failed | unfit

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

    def _assemble(self, fleet: Fleet, facts: Mapping[str, Facts]) -> Cluster:
        """The cluster with these rented nodes in it, and no others. Hosts that are always there stay as they are."""
        controller = self._controller.name
        before = in_force(facts[controller])
        gone = {member.name for member in rented_members(self._spec)} - {*fleet.targets} - self._known()
        kept = {name: address for name, address in before.addresses.items() if name not in gone}
        own = self._spec.network.kind == "wireguard"  # there a node's address is its own whether or not it is there
        before = before if own else replace(before, addresses=kept)
        reached = {**reached_addresses(fleet), controller: before.addresses.get(controller, "")}
        facts = {name: _without_peers(fact, gone, self._spec.network.port) for name, fact in facts.items()}
        cluster = assemble(self._spec, facts, reached, before)
        addresses = {**cluster.addresses, **{m.name: kept[m.name] for m in members(self._spec) if m.name in kept}}
        ids = choose_ids(controller, {controller: facts[controller]})
        return replace(cluster, addresses=addresses, ids=ids)

    def _refused(self, cluster: Cluster, new: Iterable[str]) -> dict[str, str]:
        """Machines whose Slurm the controller cannot talk to."""
        controller = self._controller.name
        others = {name: version for name, version in cluster.versions.items() if name in new}
        findings = window_findings((controller, cluster.versions[controller]), others)
        return {finding.host: f"{UNFIT}{finding.what}: {finding.found}" for finding in findings if finding.host in new}

    def _barred(self, cluster: Cluster, new: Iterable[str]) -> dict[str, str]:
        """Machines that have no way into the network, or else cannot be what they should."""
        found = [finding for finding in part_findings(cluster) if finding.level == "error" and finding.host in new]
        return {finding.host: f"{finding.what} {finding.found}".strip() for finding in found}

    async def _converge(self, fleet: Fleet, wanted: Mapping[str, Document]) -> None:
        due = {name: document for name, document in wanted.items() if document and name not in fleet.failures}
        kept = {**munge_kept(self._controller.name), **kept_secrets(self._spec)}
        secrets = await secrets_for(due.values(), kept, {}, fleet)

        async def converge(name: str) -> None:
            with Silence().phase("", 1) as phase:
                await fleet.converge(name, due[name], secrets, phase, "shoal up")

        await fleet.each(due, converge)

    async def _unfit(self, fleet: Fleet, names: Iterable[str]) -> dict[str, str]:
        """Machines whose GPUs do not work."""
        promises = {
            name: promised(self._spec, one).gpus for one in rented_sets(self._spec).values() for name in one.nodes
        }

        async def look(name: str) -> str:
            done = await (await fleet.host(name)).run(health_command(promises[name]), timeout=HEALTH_SECONDS, root=True)
            said = " ".join((done.error_text or done.text).split())
            return f"{UNFIT}{said or 'the look at its GPUs failed'}" if done.status else ""

        return {name: said for name, said in (await fleet.each(names, look)).items() if said}

    def _watchdog(self, name: str, machine: Rented, systemd: bool) -> Document:
        nodeset = next(one for one in rented_sets(self._spec).values() if name in one.nodes)
        return watchdog(name, int((machine.created or time.time()) + nodeset.lifetime), systemd=systemd)

    async def _register(self, controller: Host, names: Iterable[str]) -> dict[str, str]:
        """Wait until slurmctld has heard from the nodes."""
        waiting = dict.fromkeys(names, "slurmd has not registered")
        end = asyncio.get_running_loop().time() + REGISTER_SECONDS
        while waiting and asyncio.get_running_loop().time() < end:
            done = await controller.run(NODES_COMMAND, timeout=30)
            states = {node.name: node for node in parse_nodes(done.text)} if done.status == 0 else {}
            for name in [*waiting]:
                node = states.get(name)
                if node is None:
                    continue
                if "INVAL" in node.state or "INVALID_REG" in node.state:
                    waiting[name] = f"{UNFIT}Slurm does not take it: {node.reason}"
                elif not {"POWERING_UP", "POWERED_DOWN", "POWERING_DOWN", "DOWN", "NOT_RESPONDING"} & set(node.state):
                    del waiting[name]
            if waiting:
                await asyncio.sleep(_PAUSE)
        return waiting


def _without_peers(facts: Facts, gone: Iterable[str], port: int) -> Facts:
    """The facts of a host as if it had never heard of machines that are gone: their keys are not kept for them."""
    written = peers_in(file_text(facts, PEERS))
    if not written.keys() & {*gone}:
        return facts
    kept = [peer for name, peer in written.items() if name not in gone]
    return replace(facts, files={**facts.files, PEERS: FileFact(text=peers_conf(kept, port))})
