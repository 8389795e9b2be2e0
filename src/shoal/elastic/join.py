"""From a machine that answers to a node that takes jobs: the documents that every host gets, sent by the controller.

Only the controller and rented machines are changed. The controller learns the new members' names, lets them through its
firewall and into its network; other rented nodes that are there do so too; then the new ones become nodes:

    SSH answers ─▶ name ─▶ facts ─▶ controller knows it ─▶ packages, keys, network ─▶ GPUs work ─▶ slurmd registers

Hosts that are always there are left alone. What they must know was said by `shoal up`.
"""

from __future__ import annotations

import asyncio
import logging
import os
import time
from collections.abc import Callable, Iterable, Mapping
from dataclasses import replace
from pathlib import Path

from shoal.agent.document import Command, Document, File
from shoal.agent.facts import Facts
from shoal.elastic.fleet import UNFIT
from shoal.elastic.settings import KNOWN_HOSTS, Settings
from shoal.errors import HostError, ShoalError, Unreachable
from shoal.hosts.api import Connector, Host, Target
from shoal.hosts.local import LocalConnector
from shoal.hosts.ssh import SshConnector
from shoal.plan.fleet import Fleet
from shoal.plan.observe import observe
from shoal.plan.pairs import reached_addresses
from shoal.plan.prepare import prepare
from shoal.plan.progress import Silence
from shoal.plan.secrets import secrets_for
from shoal.providers.rental import Rented
from shoal.roles.base import munge_kept
from shoal.roles.cluster import Cluster, assemble
from shoal.roles.documents import documents, membership
from shoal.roles.ids import choose_ids
from shoal.roles.in_force import in_force
from shoal.roles.parts import kept_secrets, part_findings
from shoal.roles.rented import promised
from shoal.roles.stage import Stage
from shoal.roles.watchdog import health_command, watchdog
from shoal.slurm.state import NODES_COMMAND, parse_nodes
from shoal.slurm.versions import window_findings
from shoal.spec.member import Member
from shoal.spec.members import members, rented_members
from shoal.spec.rented import rented_sets

log = logging.getLogger("shoal.elastic.join")

ANSWER_SECONDS = 30.0
"""How long machines that the provider calls up are waited for at a time; those that answer go on without the rest."""
HEALTH_SECONDS = 180.0
REGISTER_SECONDS = 60.0
_PAUSE = 0.5


class LiveJoiner:
    """Joins machines over SSH, with the controller's own key for them."""

    def __init__(
        self,
        settings: Settings,
        others: Callable[[], Mapping[str, Rented]],
        *,
        known_hosts: Path = KNOWN_HOSTS,
        here: Connector | None = None,
        there: Callable[[Path], Connector] | None = None,
    ) -> None:
        """`others` tells the rented nodes that have joined. `here` and `there` are how hosts are reached: tests."""
        self._spec = settings.spec
        self._identity = settings.identity
        self._others = others
        self._known_hosts = known_hosts
        self._here = here or LocalConnector()
        self._there = there or _by_ssh
        self._controller = members(settings.spec)[0]
        self._one_at_a_time = asyncio.Lock()
        self._joining: set[str] = set()

    async def join(self, nodes: Mapping[str, Rented]) -> Mapping[str, str]:
        """Implements `shoal.elastic.fleet.Joiner`."""
        ids = {_file_name(machine.id) for machine in nodes.values()}
        self._joining |= ids
        try:
            return await self._join_all(nodes)
        finally:
            self._joining -= ids

    async def _join_all(self, nodes: Mapping[str, Rented]) -> Mapping[str, str]:
        said = dict.fromkeys(nodes, "")
        answering = await self._answering(nodes)
        said |= {name: why for name, why in answering.items() if why}
        new = [name for name, why in answering.items() if not why]
        if not new:
            return said
        live = {name: one for name, one in self._others().items() if name not in nodes}
        try:
            async with self._fleet({**live, **{name: nodes[name] for name in new}}) as fleet:
                found = await self._join(fleet, new, nodes)
        except ShoalError as error:
            found = dict.fromkeys(new, error.message)
        return said | found

    async def _answering(self, nodes: Mapping[str, Rented]) -> dict[str, str]:
        """Which machines let us in, and what keeps us out of the others. Who is up is not kept by who is not."""

        async def meet(name: str) -> str:
            end = asyncio.get_running_loop().time() + ANSWER_SECONDS
            while True:
                try:
                    await (await self._connector(nodes[name]).connect(self._target(name, nodes[name]))).close()
                except HostError as error:
                    if asyncio.get_running_loop().time() > end:
                        return error.cause
                    await asyncio.sleep(_PAUSE)
                else:
                    return ""

        return dict(zip(nodes, await asyncio.gather(*map(meet, nodes)), strict=True))

    async def _join(self, fleet: Fleet, new: list[str], nodes: Mapping[str, Rented]) -> dict[str, str]:
        controller = self._controller.name
        await self._name(fleet, new)
        # The controller's files are written by one join after another: each must know what the former wrote.
        async with self._one_at_a_time:
            observed = await observe(fleet, self._spec)
            fleet.require(controller)
            prepared = await prepare(self._spec, observed.facts, fleet, Silence())
            if prepared:
                observed = await observe(fleet, self._spec)
                fleet.require(controller)
            cluster = self._assemble(fleet, observed.facts)
            refused = self._refused(cluster, new)
            due = [name for name in fleet.live if name not in refused]
            neighbours = [name for name in due if name not in new]
            by_name = {member.name: member for member in cluster.members}
            known = {name: membership(cluster, by_name[name]) for name in neighbours}
            await self._converge(fleet, known)
            fleet.require(controller)
        stages = {name: documents(cluster, by_name[name]) for name in due if name in new}
        for stage in (Stage.BASE, Stage.SERVICES):
            await self._converge(fleet, {name: found.get(stage, ()) for name, found in stages.items()})
        unfit = await self._unfit(fleet, [name for name in stages if name not in fleet.failures])
        fit = [name for name in stages if name not in fleet.failures and name not in unfit]
        inside = cluster.tunnels
        last = {
            name: (*stages[name].get(Stage.NODES, ()), *self._watchdog(name, nodes[name], name not in inside))
            for name in fit
        }
        await self._converge(fleet, last)
        unregistered = await self._register(await fleet.host(controller), [n for n in fit if n not in fleet.failures])
        failed = {name: fleet.failures[name].cause for name in new if name in fleet.failures}
        return dict.fromkeys(new, "") | unregistered | failed | unfit | refused

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
        gone = {member.name for member in rented_members(self._spec)} - {*fleet.targets}
        kept = {name: address for name, address in before.addresses.items() if name not in gone}
        own = self._spec.network.kind == "wireguard"  # there a node's address is its own whether or not it is there
        before = before if own else replace(before, addresses=kept)
        reached = {**reached_addresses(fleet), controller: before.addresses.get(controller, "")}
        cluster = assemble(self._spec, facts, reached, before)
        addresses = {**cluster.addresses, **{m.name: kept[m.name] for m in members(self._spec) if m.name in kept}}
        ids = choose_ids(controller, {controller: facts[controller]})
        return replace(cluster, addresses=addresses, ids=ids)

    def _refused(self, cluster: Cluster, new: Iterable[str]) -> dict[str, str]:
        """Machines whose Slurm the controller cannot talk to, or that have no way into the network."""
        controller = self._controller.name
        others = {name: version for name, version in cluster.versions.items() if name != controller and name in new}
        findings = window_findings((controller, cluster.versions[controller]), others)
        refused = {finding.host: f"{UNFIT}{finding.what}: {finding.found}" for finding in findings}
        barred = [finding for finding in part_findings(cluster) if finding.level == "error"]
        refused |= {finding.host: f"{finding.what} {finding.found}".strip() for finding in barred}
        return {name: refused[name] for name in new if name in refused}

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

    def _fleet(self, machines: Mapping[str, Rented]) -> Fleet:
        targets = {self._controller.name: Target(self._controller.name)}
        targets |= {name: self._target(name, machine) for name, machine in machines.items()}
        self._forget(machines)
        return Fleet(targets, _Ways(self._controller, self._here, self._connectors(machines)))

    def _target(self, name: str, machine: Rented) -> Target:
        return Target(name, machine.host, machine.port, machine.user, self._identity)

    def _connectors(self, machines: Mapping[str, Rented]) -> dict[str, Connector]:
        return {name: self._connector(machine) for name, machine in machines.items()}

    def _connector(self, machine: Rented) -> Connector:
        """Trusts a machine's key when it is first met. Another machine at the same address is another one."""
        self._known_hosts.mkdir(mode=0o700, parents=True, exist_ok=True)
        return self._there(self._known_hosts / _file_name(machine.id))

    def _forget(self, machines: Mapping[str, Rented]) -> None:
        """Keys of machines that are gone."""
        kept = {_file_name(machine.id) for machine in machines.values()} | self._joining
        for path in self._known_hosts.glob("*") if self._known_hosts.is_dir() else ():
            if path.name.partition(".")[0] not in kept and path.name not in kept:
                path.unlink(missing_ok=True)


class _Ways:
    """The controller is this machine; rented ones are reached by SSH."""

    def __init__(self, controller: Member, here: Connector, there: Mapping[str, Connector]) -> None:
        self._controller, self._here, self._there = controller.name, here, there

    async def connect(self, target: Target) -> Host:
        if target.name == self._controller:
            return await self._here.connect(target)
        if target.name not in self._there:
            raise Unreachable(target.name, "is not there any more", hint="the next node is another machine")
        return await self._there[target.name].connect(target)


def _by_ssh(known_hosts: Path) -> Connector:
    return SshConnector(known_hosts, ssh_config=Path(os.devnull), agent=False, connect_timeout=10.0)


def _file_name(id: str) -> str:
    return "".join(letter if letter.isalnum() or letter in "-_" else "_" for letter in id)[:100]
