"""`shoal status`: nodes, partitions and queue at a glance, asked of Slurm itself."""

from __future__ import annotations

import asyncio
from dataclasses import dataclass
from typing import TYPE_CHECKING

from shoal.errors import SlurmError, TimedOut
from shoal.hosts.api import Host, Result
from shoal.slurm.state import (
    JOBS_COMMAND,
    NODES_COMMAND,
    PARTITIONS_COMMAND,
    JobState,
    NodeState,
    PartitionState,
    parse_jobs,
    parse_nodes,
    parse_partitions,
)
from shoal.slurm.versions import Version
from shoal.verbs.context import Context, computing

if TYPE_CHECKING:
    from shoal.verbs.accounting_health import AccountingHealth
    from shoal.verbs.health import Clocks, TrackingHealth
    from shoal.verbs.rented import RentedView
    from shoal.verbs.shares import ShareState
    from shoal.verbs.tailnet import TailnetView
    from shoal.verbs.wireguard import WireGuardView

NO_CONFIGURATION = "Could not establish a configuration source"
"""Slurm's own words."""
PATIENCE = 30.0
"""Seconds until a command of Slurm's must have answered."""


@dataclass(frozen=True)
class Status:
    cluster: str
    controller: str
    version: str
    """The controller's Slurm."""
    nodes: tuple[NodeState, ...]
    partitions: tuple[PartitionState, ...]
    jobs: tuple[JobState, ...]
    absent: tuple[str, ...] = ()
    """Nodes that the spec names and Slurm does not know."""
    extra: tuple[str, ...] = ()
    """Nodes that Slurm knows and the spec does not name."""
    clocks: Clocks | None = None
    tracking: TrackingHealth | None = None
    shares: tuple[ShareState, ...] = ()
    tailnet: TailnetView | None = None
    wireguard: WireGuardView | None = None
    accounting: AccountingHealth | None = None
    rented: RentedView | None = None


async def status(context: Context) -> Status:
    """What Slurm says of the cluster now."""
    from shoal.spec.rented import rented_sets
    from shoal.verbs.accounting_health import accounting_health
    from shoal.verbs.health import clocks, present, tracking_health
    from shoal.verbs.rented import rented_view
    from shoal.verbs.shares import share_states
    from shoal.verbs.tailnet import tailnet_members, tailnet_view
    from shoal.verbs.wireguard import wireguard_view

    async with await context.fleet(await present(context)) as fleet:
        host = await fleet.host(context.controller.name)
        version = await running_version(host)
        looking = asyncio.ensure_future(clocks(fleet, fleet.targets, context.controller.name))
        try:
            nodes, partitions, jobs = await asyncio.gather(
                ask(host, NODES_COMMAND), ask(host, PARTITIONS_COMMAND), ask(host, JOBS_COMMAND)
            )
            shares = await share_states(context.spec, fleet)
            tracking, times = await tracking_health(host, context.spec), await looking
            tailnet = await tailnet_view(context, host)
            wireguard = await wireguard_view(context.spec, host)
            accounting = await accounting_health(fleet, context.spec)
            rented = await rented_view(context.spec, host)
        finally:
            looking.cancel()
            await asyncio.gather(looking, return_exceptions=True)
    found = tuple(parse_nodes(nodes))
    wanted = computing(context)
    known = {node.name for node in found}
    may_come = {name for one in rented_sets(context.spec).values() for name in one.nodes}
    return Status(
        cluster=context.cluster,
        controller=context.controller.name,
        version=version,
        nodes=found,
        partitions=tuple(parse_partitions(partitions)),
        jobs=tuple(parse_jobs(jobs)),
        absent=tuple(name for name in wanted if name not in known),
        extra=tuple(node.name for node in found if node.name not in (*wanted, *may_come)),
        clocks=times,
        tracking=tracking,
        shares=shares,
        tailnet=tailnet_members(context, tailnet, found),
        wireguard=wireguard,
        accounting=accounting,
        rented=rented,
    )


async def running_version(host: Host) -> str:
    """The version of a controller's Slurm. Raises SlurmError when it has none, or when its slurmctld does not run:
    Slurm's own commands wait long before they say so."""
    version, service = await asyncio.gather(
        host.run(("scontrol", "--version"), timeout=PATIENCE),
        host.run(("systemctl", "is-active", "slurmctld"), timeout=PATIENCE),
    )
    said = accepted(host, ("scontrol", "--version"), version)
    state = service.text.strip()
    # Where there is no systemd it prints nothing, and Slurm has to be asked itself.
    if state and state not in ("active", "reloading"):
        raise SlurmError(f"slurmctld does not run on {host.name} ({state})", hint=look_at_slurmctld(host.name))
    return str(Version.parse(said))


def look_at_slurmctld(controller: str) -> str:
    """What to do about a slurmctld that does not run or does not answer."""
    return f"run `shoal up`; its log: `shoal ssh {controller} journalctl -u slurmctld`"


async def ask(host: Host, command: tuple[str, ...], patience: float = PATIENCE) -> str:
    """What Slurm's command says. Raises SlurmError where Slurm is not there, or says no."""
    try:
        result = await host.run(command, timeout=patience)
    except TimedOut:
        raise SlurmError(
            f"slurmctld on {host.name} does not answer within {patience:g} s", hint=look_at_slurmctld(host.name)
        ) from None
    return accepted(host, command, result)


def refuse_without_cluster(controller: str, result: Result) -> None:
    """Raise SlurmError where Slurm is installed, and no cluster was built yet, or it was taken down."""
    if result.status != 0 and NO_CONFIGURATION in result.error_text:
        raise SlurmError(f"Slurm on {controller} is not set up: it has no configuration", hint="run `shoal up`")


def accepted(host: Host, command: tuple[str, ...], result: Result) -> str:
    """What a command of Slurm's printed. Raises SlurmError where it is not there, not set up, or said no."""
    if result.status == 127:
        raise SlurmError(f"{host.name} has no Slurm yet", hint="run `shoal up`")
    refuse_without_cluster(host.name, result)
    if result.status != 0:
        raise SlurmError(
            f"`{' '.join(command[:3])}` on {host.name} failed: {result.error_text.strip() or result.text.strip()}",
            hint="run `shoal up`; if that does not help, `shoal check` says what is wrong",
        )
    return result.text
