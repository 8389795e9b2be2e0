"""`shoal status`: nodes, partitions and queue at a glance, as Slurm reports them."""

from __future__ import annotations

import asyncio
from dataclasses import dataclass

from shoal.slurm import state
from shoal.slurm.versions import Version
from shoal.spec.members import rented_sets
from shoal.verbs import health
from shoal.verbs.context import Context, compute_hosts
from shoal.verbs.rentals import RentedView, rented_view
from shoal.verbs.shares import ShareState, share_states
from shoal.verbs.slurmctld import gather_answers, running_version, slurm_output


@dataclass(frozen=True)
class ClusterStatus:
    cluster: str
    controller: str
    version: str
    """The controller's Slurm."""
    nodes: tuple[state.NodeState, ...]
    partitions: tuple[state.PartitionState, ...]
    jobs: tuple[state.JobState, ...]
    absent: tuple[str, ...] = ()
    """Nodes that the spec names and Slurm does not know."""
    extra: tuple[str, ...] = ()
    """Nodes that Slurm knows and the spec does not name."""
    clocks: health.Clocks | None = None
    tracking: health.TrackingHealth | None = None
    shares: tuple[ShareState, ...] = ()
    tailnet: health.TailnetView | None = None
    wireguard: health.WireGuardView | None = None
    accounting: health.AccountingHealth | None = None
    rented: RentedView | None = None


async def status(context: Context) -> ClusterStatus:
    """The state of the cluster now. Ordinary users see what Slurm says; services are the operator's."""
    if context.joined is not None:
        return await _user_status(context)
    spec = context.spec
    async with await context.fleet(await health.existing_members(context)) as fleet:
        host = await fleet.host(context.controller.name)
        version = await running_version(host)
        clocks_task = asyncio.ensure_future(health.clocks(fleet, fleet.targets, context.controller.name))
        try:
            nodes_text, partitions, jobs = await asyncio.gather(
                slurm_output(host, state.NODES_COMMAND),
                slurm_output(host, state.PARTITIONS_COMMAND),
                slurm_output(host, state.JOBS_COMMAND),
            )
            shares = await share_states(spec, fleet)
            tracking, offsets = await health.tracking_health(host, spec), await clocks_task
            tailnet = await health.tailnet_view(context, host)
            wireguard = await health.wireguard_view(spec, host)
            accounting = await health.accounting_health(fleet, spec)
            rentals = await rented_view(spec, host)
        finally:
            clocks_task.cancel()
            await asyncio.gather(clocks_task, return_exceptions=True)
    nodes = tuple(state.parse_nodes(nodes_text))
    names = compute_hosts(context)
    elastic = {name for nodeset in rented_sets(spec).values() for name in nodeset.nodes}
    return ClusterStatus(
        cluster=context.cluster,
        controller=context.controller.name,
        version=version,
        nodes=nodes,
        partitions=tuple(state.parse_partitions(partitions)),
        jobs=tuple(state.parse_jobs(jobs)),
        absent=tuple(name for name in names if name not in {node.name for node in nodes}),
        extra=tuple(node.name for node in nodes if node.name not in (*names, *elastic)),
        clocks=offsets,
        tracking=tracking,
        shares=shares,
        tailnet=health.tailnet_members(context, tailnet, nodes),
        wireguard=wireguard,
        accounting=accounting,
        rented=rentals,
    )


async def _user_status(context: Context) -> ClusterStatus:
    async with context.controller_host() as host:
        version, nodes, partitions, jobs = await gather_answers(
            host,
            slurm_output(host, ("scontrol", "--version")),
            slurm_output(host, state.NODES_COMMAND),
            slurm_output(host, state.PARTITIONS_COMMAND),
            slurm_output(host, state.JOBS_COMMAND),
        )
    return ClusterStatus(
        cluster=context.cluster,
        controller=context.controller.name,
        version=str(Version.parse(version)),
        nodes=tuple(state.parse_nodes(nodes)),
        partitions=tuple(state.parse_partitions(partitions)),
        jobs=tuple(state.parse_jobs(jobs)),
    )
