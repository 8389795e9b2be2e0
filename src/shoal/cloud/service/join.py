"""Turns a machine that is up into a node that takes jobs, with the same documents as every host.

First the controller learns the new members' names and lets them through its firewall and into its network, and so do
the other rented nodes; then the new machines become nodes:

    SSH answers ─▶ host key ─▶ name, Slurm; GPUs work ─▶ membership: keys, network ─▶ slurmd registers

Permanent hosts learn of them afterwards, and no join waits for that.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path

from shoal.agent.document import Command, Document, File
from shoal.agent.facts import Facts
from shoal.cloud.providers.api import RentedInstance
from shoal.cloud.service import join_checks as checks
from shoal.cloud.service.connections import MachineConnector, connect_to
from shoal.cloud.service.context import UNFIT_PREFIX, log
from shoal.cloud.service.machine_keys import REPLACE
from shoal.cloud.service.membership import (
    T,
    cluster_with_rented_nodes,
    membership_change,
    permanent_changes,
    permanent_targets,
    without_faulty_machines,
)
from shoal.cloud.service.settings import KNOWN_HOSTS, ServiceSettings
from shoal.errors import HostError, HostKeyChanged, ShoalError
from shoal.hosts.api import Connector
from shoal.hosts.host_keys import HostKey
from shoal.plan.apply import prepare
from shoal.plan.connections import Fleet
from shoal.plan.observe import observe
from shoal.plan.progress import NoProgress
from shoal.plan.secret_values import fetch_secrets
from shoal.roles.base import installation, munge_secret
from shoal.roles.component import Cluster, Stage
from shoal.roles.documents import documents
from shoal.roles.registry import shared_secrets
from shoal.roles.rented import end_program, spot_notice, watchdog
from shoal.roles.slurm_tree import tree_secrets
from shoal.roles.tailscale import LOGOUT, controller_spec, rented_machines
from shoal.spec.members import members, rented_sets

SSH_WAIT_S = 20.0
"""How long one join waits for SSH; machines that answer by then continue."""
RECENT_JOIN_S = 120.0
"""After this time the ledger has what joined."""
LOGOUT_TIMEOUT_S = 10.0
RESTART_SLURMD = ("systemctl", "restart", "slurmd")
RESTART_TIMEOUT_S = 60.0
OTHER_KEY_TIMEOUT_S = 180.0
"""How long a machine may show another host key: SSH may answer before the boot script has run."""
REPLACE_TIMEOUT_S = 60.0
UPDATE_RETRY_S = 300.0
"""The pause before a permanent host that could not be updated is tried again. The next `shoal up` updates it, too."""
_POLL_INTERVAL_S = 0.2


@dataclass(eq=False)
class _Ready:
    """The machines of one join that have their packages, with their connections."""

    machines: Mapping[str, RentedInstance]
    fleet: Fleet
    cluster: Cluster | None = None
    """The cluster that includes them, once it has been changed."""
    refused: dict[str, str] = field(default_factory=dict)
    """Machines that could not become members, with the reason."""


class LiveJoiner:
    """Joins machines over SSH."""

    def __init__(
        self,
        settings: ServiceSettings,
        others: Callable[[], Mapping[str, RentedInstance | None]],
        *,
        known_hosts: Path = KNOWN_HOSTS,
        here: Connector | None = None,
        there: Callable[[Path], Connector] | None = None,
        record_host_key: Callable[[str, str], None] = lambda token, key: None,
    ) -> None:
        """`others` returns the joined rented nodes, with their machines if known. Tests replace `here` and `there`.

        `record_host_key` stores the key that the machine of a rental, by its token, shows from now on.
        """
        self.record_host_key = record_host_key
        self._spec = controller_spec(settings.spec)
        self._others = others
        self._controller = members(settings.spec)[0]
        self._connector = MachineConnector(self._controller.name, settings.identity, known_hosts, here, there)
        self._membership_lock = asyncio.Lock()
        self._ready: list[_Ready] = []
        """Joins whose machines wait for membership."""
        self._joining: dict[str, RentedInstance] = {}
        """The machines of all running joins."""
        self._recent: dict[str, tuple[float, RentedInstance]] = {}
        """Recent members, with the time, until `others` returns them."""
        self._announced: frozenset[str] | None = None
        """The rented nodes that the others know; None before the first change."""
        self.members_changed = asyncio.Event()
        """Set when permanent hosts must learn of other rented nodes."""
        self._cluster: Cluster | None = None
        """The cluster since the last change of its members."""
        self._updated: dict[str, Cluster] = {}
        """What permanent hosts know."""
        self._update_at: dict[str, float] = {}
        """When permanent hosts that failed are tried again."""
        self._other_key_since: dict[str, float] = {}
        """Since when machines show another host key than the expected one, by id."""

    async def join(self, nodes: Mapping[str, RentedInstance]) -> Mapping[str, str]:
        """Implements `shoal.cloud.service.context.Joiner`."""
        self._joining |= nodes
        try:
            return await self._join(nodes)
        finally:
            for name in nodes:
                self._joining.pop(name, None)

    async def leave(self, nodes: Mapping[str, RentedInstance]) -> None:
        """Implements `shoal.cloud.service.context.Joiner`: a tailnet keeps listing machines that did not log out."""
        due = [name for name in rented_machines(self._spec) if name in nodes]
        if self._spec.network.kind == "tailscale" and due:
            await self._connector.run_on({name: nodes[name] for name in due}, LOGOUT, LOGOUT_TIMEOUT_S)

    async def register(self, nodes: Mapping[str, RentedInstance]) -> None:
        """Implements `shoal.cloud.service.context.Joiner`: slurmd registers when it starts. Its jobs go on."""
        await self._connector.run_on(nodes, RESTART_SLURMD, RESTART_TIMEOUT_S)

    async def remove_departed(self) -> None:
        """Remove nodes that are gone from the controller and the rented nodes. Raises ShoalError."""
        async with self._membership_lock:
            neighbours = self._neighbours()
            if self._announced == self._known() or self._joining:  # a join removes them as well
                return
            async with self._connector.fleet(neighbours) as fleet:
                await self._change_membership(fleet, [])
            self._announced = self._known()

    async def update_permanent_hosts(self) -> None:
        """Give permanent hosts the names, addresses and host keys of the rented nodes. Raises ShoalError."""
        self.members_changed.clear()
        cluster, now = self._cluster, time.monotonic()
        targets = {
            name: target
            for name, target in (permanent_targets(cluster) if cluster else {}).items()
            if self._updated.get(name) is not cluster and now >= self._update_at.get(name, 0.0)
        }
        if cluster is None or not targets:
            return
        async with self._connector.fleet(self._neighbours(), targets) as fleet:
            documents = await self._build(
                fleet,
                lambda facts: permanent_changes(self._spec, fleet, facts, self._known(), targets),
                reachability=False,
            )
            await self._converge(fleet, documents)
        for name in targets:
            if (error := fleet.failures.get(name)) is None:
                self._updated[name] = cluster
                self._update_at.pop(name, None)
                continue
            if name not in self._update_at:
                log.info("%s: cannot update its list of rented nodes: %s; `shoal up` does", name, error.cause)
            self._update_at[name] = now + UPDATE_RETRY_S

    async def _join(self, machines: Mapping[str, RentedInstance]) -> dict[str, str]:
        nodes = dict(machines)
        errors = dict.fromkeys(nodes, "")

        def due() -> dict[str, RentedInstance]:
            return {name: machine for name, machine in nodes.items() if not errors[name]}

        async with self._connector.fleet(nodes) as fleet:
            try:
                errors |= await self._wait_for_ssh(fleet, nodes)
                if given := {name: machine for name, machine in due().items() if machine.host_key}:
                    replaced, failed = await self._replace_host_keys(fleet, given)
                    nodes |= replaced
                    errors |= failed
                if due():
                    errors |= await self._install(fleet, list(due()))
                if due():
                    cluster, refused = await self._add_members(due(), fleet)
                    errors |= refused
                if due():
                    errors |= await self._start(fleet, cluster, due())
            except ShoalError as error:
                errors |= dict.fromkeys(due(), error.message)
        for name, problem in errors.items():
            if problem:
                self._recent.pop(name, None)
        return errors

    async def _wait_for_ssh(self, fleet: Fleet, machines: Mapping[str, RentedInstance]) -> dict[str, str]:
        """Wait for SSH. Returns the error of each machine; those that do not answer are dropped."""

        async def answer(name: str, machine: RentedInstance) -> str:
            end = asyncio.get_running_loop().time() + SSH_WAIT_S
            while True:
                try:
                    await connect_to(fleet, name)
                except HostError as error:
                    cause = self._other_key(machine) if isinstance(error, HostKeyChanged) else error.cause
                    if asyncio.get_running_loop().time() > end or cause.startswith(UNFIT_PREFIX):
                        del fleet.targets[name]
                        return cause
                    await asyncio.sleep(_POLL_INTERVAL_S)
                else:
                    self._other_key_since.pop(machine.id, None)
                    return ""

        answers = await asyncio.gather(*(answer(name, machine) for name, machine in machines.items()))
        return dict(zip(machines, answers, strict=True))

    def _other_key(self, machine: RentedInstance) -> str:
        """The error of a machine that shows another host key; final once its boot script must have run."""
        now = time.monotonic()
        late = now - self._other_key_since.setdefault(machine.id, now) >= OTHER_KEY_TIMEOUT_S
        where = f"{machine.host}:{machine.port} shows another host key than the one that the machine got at boot"
        why = "another machine answers there, or the boot script did not run"
        return f"{UNFIT_PREFIX if late else ''}{where}: {why}"

    async def _replace_host_keys(
        self, fleet: Fleet, machines: Mapping[str, RentedInstance]
    ) -> tuple[dict[str, RentedInstance], dict[str, str]]:
        """Give machines host keys of their own. Returns the machines with these, and the errors of the others."""

        async def replace_key(name: str) -> str:
            result = await (await fleet.host(name)).run(REPLACE, timeout=REPLACE_TIMEOUT_S, root=True)
            try:
                HostKey.parse(result.text)
            except ValueError:
                cause = f"cannot replace its host key: {result.error_text.strip() or f'status {result.status}'}"
                raise HostError(name, cause, hint="look at the machine's /etc/ssh") from None
            self.record_host_key(machines[name].token, result.text.strip())
            return result.text.strip()

        keys = await fleet.each(machines, replace_key)
        replaced = {name: replace(machines[name], host_key=key) for name, key in keys.items()}
        self._joining |= replaced
        return replaced, {name: fleet.failures[name].cause for name in machines if name in fleet.failures}

    async def _add_members(
        self, machines: Mapping[str, RentedInstance], fleet: Fleet
    ) -> tuple[Cluster, dict[str, str]]:
        """Make machines members, together with all others that are ready by now.

        Memberships change one at a time, so that each new member knows all before it, and they know it.
        """
        own = _Ready(machines, fleet)
        self._ready.append(own)
        try:
            async with self._membership_lock:
                if own.cluster is None:
                    await self._add_ready()
        finally:
            self._ready.remove(own)
        assert own.cluster is not None
        return own.cluster, own.refused

    async def _add_ready(self) -> None:
        """Make all ready machines members. An error that concerns all of them is raised."""
        group = [one for one in self._ready if one.cluster is None]
        machines = {name: machine for one in group for name, machine in one.machines.items()}
        async with self._connector.fleet({**self._neighbours(), **machines}) as fleet:
            for one in group:
                fleet.take_over(one.fleet)
            try:
                cluster, refused = await self._change_membership(fleet, list(machines))
            finally:
                for one in group:
                    one.fleet.take_over(fleet)
        now = time.monotonic()
        self._recent |= {name: (now, machine) for name, machine in machines.items() if name not in refused}
        self._announced = self._known()
        for one in group:
            one.cluster = cluster
            one.refused = {name: why for name, why in refused.items() if name in one.machines}

    def _neighbours(self) -> dict[str, RentedInstance]:
        """The rented nodes that take jobs or are about to. Host keys of others are removed."""
        joined = {name: machine for name, machine in self._others().items() if machine is not None}
        recent = time.monotonic() - RECENT_JOIN_S
        self._recent = {
            name: (at, machine)
            for name, (at, machine) in self._recent.items()
            if name not in joined and (name in self._joining or at > recent)
        }
        entered = {name: machine for name, (_, machine) in self._recent.items()}
        if None not in self._others().values():
            self._connector.forget_others([*joined.values(), *entered.values(), *self._joining.values()])
        return {**entered, **joined}

    def _known(self) -> frozenset[str]:
        """The names of the rented nodes, including those without a known address."""
        return frozenset((*self._others(), *self._recent))

    async def _install(self, fleet: Fleet, new: list[str]) -> dict[str, str]:
        """Set names, install Slurm and check the GPUs: the slowest part, which needs no other host."""
        observed = await observe(fleet, self._spec)
        fleet.require(self._controller.name)
        unfit = checks.unfit_machines(self._spec, observed.facts, self._controller.name, new)
        new = [name for name in new if name not in unfit]
        fit = {name: fact for name, fact in observed.facts.items() if name not in unfit}
        if await prepare(self._spec, fit, fleet, NoProgress()):
            observed = await observe(fleet, self._spec)
            fleet.require(self._controller.name)

        def plan(facts: Mapping[str, Facts]) -> tuple[dict[str, str], dict[str, Document]]:
            cluster = cluster_with_rented_nodes(self._spec, fleet, facts, self._known())
            refused = checks.incompatible_versions(cluster, new)
            due = [one for one in cluster.members if one.name in new and one.name in facts and one.name not in refused]
            return refused, {member.name: (*_naming(member.name), *installation(cluster, member)) for member in due}

        refused, by_host = without_faulty_machines(fleet, self._controller.name, observed.facts, plan)
        broken, _ = await asyncio.gather(checks.broken_gpus(self._spec, fleet, by_host), self._converge(fleet, by_host))
        failed = {name: fleet.failures[name].cause for name in new if name in fleet.failures}
        return failed | refused | unfit | broken

    async def _change_membership(self, fleet: Fleet, new: list[str]) -> tuple[Cluster, dict[str, str]]:
        """Change the membership on the controller, the rented nodes and the new machines."""
        controller = self._controller.name
        change = await self._build(fleet, lambda facts: membership_change(self._spec, fleet, facts, self._known(), new))
        stages = change.stages
        first = {name: by_stage.get(Stage.BASE, ()) for name, by_stage in stages.items()}
        await self._converge(fleet, {**change.others, **first})
        fleet.require(controller)  # it must accept the new ones first
        await self._converge(fleet, {name: by_stage.get(Stage.SERVICES, ()) for name, by_stage in stages.items()})
        failed = {name: fleet.failures[name].cause for name in new if name in fleet.failures}
        self._cluster = change.cluster
        self.members_changed.set()
        return change.cluster, {**failed, **change.refused}

    async def _build(self, fleet: Fleet, build: Callable[[Mapping[str, Facts]], T], *, reachability: bool = True) -> T:
        """Build something from the facts of the controller and of all machines that do not make it fail."""
        observed = await observe(fleet, self._spec, reachability=reachability)
        fleet.require(self._controller.name)
        return without_faulty_machines(fleet, self._controller.name, observed.facts, build)

    async def _start(self, fleet: Fleet, cluster: Cluster, new: Mapping[str, RentedInstance]) -> dict[str, str]:
        """Start slurmd, and wait for its registration."""
        last = {
            member.name: (
                *documents(cluster, member).get(Stage.NODES, ()),
                *self._watchdog(member.name, new[member.name], member.name not in cluster.tunnels),
            )
            for member in cluster.members
            if member.name in new and member.name not in fleet.failures
        }
        limit = checks.limit_image_features(cluster, fleet, last)
        await asyncio.gather(limit, self._converge(fleet, last))
        started = [name for name in last if name not in fleet.failures]
        unheard = await checks.unregistered(await fleet.host(self._controller.name), started)
        failed = {name: fleet.failures[name].cause for name in new if name in fleet.failures}
        return dict.fromkeys(new, "") | unheard | failed

    async def _converge(self, fleet: Fleet, by_host: Mapping[str, Document]) -> None:
        due = {name: document for name, document in by_host.items() if document and name not in fleet.failures}
        kept = {**munge_secret(self._controller.name), **shared_secrets(self._spec)}
        secrets = await fetch_secrets(due.values(), kept, tree_secrets(self._spec), fleet)

        async def converge(name: str) -> None:
            with NoProgress().phase("", 1) as phase:
                await fleet.converge(name, due[name], secrets, phase)

        await fleet.each(due, converge)

    def _watchdog(self, name: str, machine: RentedInstance, systemd: bool) -> Document:
        nodeset = next(one for one in rented_sets(self._spec).values() if name in one.nodes)
        until = int((machine.created or time.time()) + nodeset.lifetime)
        notice = spot_notice(self._spec, machine.account, name) if systemd and machine.market == "spot" else ()
        ends = watchdog(name, until, systemd=systemd, end=end_program(self._spec, machine.account))
        return (*ends, *notice)


def _naming(name: str) -> Document:
    """Sets the host name to the node's name, which Slurm and training jobs use."""
    # a container cannot, and does not need to
    rename = ("sh", "-c", f"hostname {name} || test ! -d /run/systemd/system")
    unless = ("sh", "-c", f'test "$(hostname)" = {name}')
    return File("/etc/hostname", f"{name}\n"), Command("take the node's name", rename, unless=unless)
