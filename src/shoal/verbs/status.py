"""`shoal status`: nodes, partitions and queue at a glance, asked of Slurm itself."""

from __future__ import annotations

import asyncio
from dataclasses import dataclass

from shoal.errors import SlurmError
from shoal.hosts.api import Host
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
from shoal.verbs.context import Context


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


async def status(context: Context) -> Status:
    """What Slurm says of the cluster now."""
    async with await context.fleet([context.controller]) as fleet:
        host = await fleet.host(context.controller.name)
        nodes, partitions, jobs, version = await asyncio.gather(
            ask(host, NODES_COMMAND),
            ask(host, PARTITIONS_COMMAND),
            ask(host, JOBS_COMMAND),
            ask(host, ("scontrol", "--version")),
        )
    found = tuple(parse_nodes(nodes))
    wanted = [member.name for member in context.members if "compute" in member.roles]
    known = {node.name for node in found}
    return Status(
        cluster=context.cluster,
        controller=context.controller.name,
        version=str(Version.parse(version)),
        nodes=found,
        partitions=tuple(parse_partitions(partitions)),
        jobs=tuple(parse_jobs(jobs)),
        absent=tuple(name for name in wanted if name not in known),
        extra=tuple(node.name for node in found if node.name not in wanted),
    )


async def ask(host: Host, command: tuple[str, ...]) -> str:
    """What Slurm's command says. Raises SlurmError where Slurm is not there, or says no."""
    result = await host.run(command, timeout=30)
    if result.status == 127:
        raise SlurmError(f"{host.name} has no Slurm yet", hint="run `shoal up`")
    if result.status != 0:
        raise SlurmError(
            f"`{' '.join(command[:3])}` on {host.name} failed: {result.error_text.strip() or result.text.strip()}",
            hint="run `shoal up`; if that does not help, `shoal check` says what is wrong",
        )
    return result.text
