"""`shoal run`: a script of your working tree as a Slurm job."""

from __future__ import annotations

import asyncio
from dataclasses import dataclass
from pathlib import Path

from shoal.errors import SlurmError, UsageError
from shoal.hosts.api import Host
from shoal.jobs.bundle import DEFAULT_LIMIT, Bundle, runtime, working_tree
from shoal.jobs.model import JobSpec, ResolvedJob, Shipped, job_root
from shoal.jobs.resolve import resolve
from shoal.jobs.script import sbatch_script
from shoal.jobs.ship import Found, look, mark, refuse_partly, send, who_needs_it
from shoal.plan.fleet import Fleet
from shoal.slurm.state import NODES_COMMAND, PARTITIONS_COMMAND, parse_nodes, parse_partitions
from shoal.verbs.context import Context
from shoal.verbs.status import ask


@dataclass(frozen=True)
class Prepared:
    """A job that is ready to be sent: what `--dry-run` shows and what is submitted are this one value."""

    job: ResolvedJob
    shipped: Shipped
    tree: Bundle
    runtime: Bundle
    script: str


@dataclass(frozen=True)
class Submitted:
    """A job in the queue."""

    id: str
    name: str
    partition: str
    nodes: int
    world_size: int
    code: str
    """The content hash of the working tree."""
    sent: int
    """Bytes that were not on the nodes yet."""
    script: str


async def dry_run(context: Context, job: JobSpec, here: Path, limit: int = DEFAULT_LIMIT) -> Prepared:
    """What `run` would submit. Asks Slurm, changes nothing."""
    async with await context.fleet([context.controller]) as fleet:
        return await _prepare(context, await fleet.host(context.controller.name), job, here, limit)


async def run(context: Context, job: JobSpec, here: Path, limit: int = DEFAULT_LIMIT) -> Submitted:
    """Send the working tree to the nodes and queue the job. Whatever can be refused is refused before."""
    async with await context.fleet() as fleet:
        controller = await fleet.host(context.controller.name)
        prepared = await _prepare(context, controller, job, here, limit)
        sent = await _ship(context, fleet, prepared)
        number = await _sbatch(controller, prepared.script)
    resolved = prepared.job
    return Submitted(
        number,
        job.name,
        resolved.partition,
        resolved.nodes,
        resolved.world_size,
        prepared.tree.hash,
        sent,
        prepared.script,
    )


async def _prepare(context: Context, controller: Host, job: JobSpec, here: Path, limit: int) -> Prepared:
    tree = working_tree(here, job.script, limit)
    nodes, partitions = await asyncio.gather(ask(controller, NODES_COMMAND), ask(controller, PARTITIONS_COMMAND))
    resolved = resolve(job, parse_nodes(nodes), parse_partitions(partitions))
    ours = runtime()
    shipped = Shipped(context.cluster, job_root(job, context.cluster), tree.hash, ours.hash, tree.workdir)
    return Prepared(resolved, shipped, tree, ours, sbatch_script(resolved, shipped))


async def _ship(context: Context, fleet: Fleet, prepared: Prepared) -> int:
    """The code on every node that Slurm may choose; how many bytes were sent."""
    root, tree, ours = prepared.shipped.root, prepared.tree, prepared.runtime
    wanted = prepared.job.hosts
    strangers = [name for name in wanted if name not in fleet.targets]
    if strangers:
        raise UsageError(
            f"the file does not name {', '.join(strangers)}, so the code cannot be sent there",
            hint="`shoal up` brings Slurm to what the file says",
        )

    async def see(name: str) -> Found:
        return await look(await fleet.host(name), root, tree.hash, ours.hash)

    found = await fleet.each(wanted, see)
    refuse_partly(wanted, found, fleet.failures)
    shared = len(found) > 1 and len({state.id for state in found.values()}) == 1

    async def give(name: str) -> int:
        host = await fleet.host(name)
        if found[name].shared != shared:
            await mark(host, root, shared)
        return await send(host, root, tree, ours, found[name])

    chosen = who_needs_it(found)
    sent = await fleet.each(chosen, give)
    refuse_partly(chosen, sent, fleet.failures)
    return sum(sent.values())


async def _sbatch(controller: Host, script: str) -> str:
    result = await controller.run(["sbatch", "--parsable"], stdin=script.encode(), timeout=60, root=False)
    if result.status != 0:
        said = result.error_text.strip().removeprefix("sbatch: error: ")
        raise SlurmError(f"sbatch refused the job: {said}", hint="`shoal run --dry-run` shows the script")
    return result.text.strip().partition(";")[0]
