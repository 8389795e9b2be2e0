"""`shoal run`: a script of your working tree as a Slurm job."""

from __future__ import annotations

import asyncio
import contextlib
import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from shoal.errors import ShoalError, SlurmError, UsageError
from shoal.hostlist import compress
from shoal.hosts.api import Host
from shoal.jobs.bundle import DEFAULT_LIMIT, Bundle, runtime, working_tree
from shoal.jobs.model import SECRETS, JobSpec, ResolvedJob, Shipped, job_root
from shoal.jobs.profilers import lacks_profiler, refuse_without_profiler
from shoal.jobs.record import parse_records, show_command
from shoal.jobs.resolve import resolve
from shoal.jobs.script import SUBMISSION, sbatch_script
from shoal.jobs.ship import Found, clean, look, mark, refuse_partly, send, who_needs_it
from shoal.plan.connections import Connections
from shoal.slurm.state import parse_nodes, parse_partitions
from shoal.tracking.mlflow import job_variables
from shoal.train.contract import PROFILE_DIRECTORY
from shoal.verbs.connect_early import AT_ONCE, Reached, reach, reach_controller
from shoal.verbs.context import Context, computing
from shoal.verbs.status import ask

if TYPE_CHECKING:
    from shoal.environments.place import Made


@dataclass(frozen=True)
class Prepared:
    """A job that is ready to be sent: what `--dry-run` shows and what is submitted are this one value."""

    job: ResolvedJob
    shipped: Shipped
    tree: Bundle
    runtime: Bundle
    script: str
    environment: Made | None = None


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
    traces: str = ""
    """The directory on its nodes where the profiler's files will be."""
    shared: bool = True
    """Its nodes have the jobs' directory in common. Checkpoints of several nodes need that."""
    array: bool = False
    """It is as many jobs as `--array` says, each with a number behind its own."""


async def dry_run(context: Context, job: JobSpec, here: Path, limit: int = DEFAULT_LIMIT) -> Prepared:
    """What `run` would submit. Asks Slurm, changes nothing."""
    async with await reach_controller(context) as reached:
        tree, ours = await _bundles(job, here, limit)
        return await _resolve(context, reached, job, tree, ours)


async def run(
    context: Context,
    job: JobSpec,
    here: Path,
    limit: int = DEFAULT_LIMIT,
    environ: Mapping[str, str] = os.environ,
) -> Submitted:
    """Send the working tree to the nodes and queue the job. Whatever can be refused is refused before."""
    check_secrets(job, environ)
    async with await reach(context) as reached:
        return await submit(context, reached, job, here, limit, environ)


async def submit(
    context: Context,
    reached: Reached,
    job: JobSpec,
    here: Path,
    limit: int = DEFAULT_LIMIT,
    environ: Mapping[str, str] = os.environ,
) -> Submitted:
    """The same over connections that are there, or on their way."""
    secrets = check_secrets(job, environ)
    fleet = reached.fleet
    prepared, found = await _prepare_and_look(context, reached, job, here, limit)
    controller = await fleet.host(context.controller.name)
    if prepared.environment is not None:
        from shoal.verbs.env_use import expect_environment

        await expect_environment(fleet, prepared.environment, prepared.job.hosts)
    await _expect_profiler(fleet, prepared.job)
    sent, tracking = await asyncio.gather(_ship(fleet, prepared, found), _tracking(reached, prepared.job, environ))
    number = await _sbatch(controller, prepared.script, {**secrets, **tracking})
    await _clean(fleet, controller, prepared, found)
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
        f"{prepared.shipped.root}/{number}/{PROFILE_DIRECTORY}" if job.profile and not job.array else "",
        _in_common(found, prepared.job),
        bool(job.array),
    )


async def _prepare_and_look(
    context: Context, reached: Reached, job: JobSpec, here: Path, limit: int
) -> tuple[Prepared, dict[str, Found]]:
    """The job, and what every node that Slurm may choose has already. Small clusters are looked at meanwhile."""
    tree, ours = await _bundles(job, here, limit)
    fleet, root = reached.fleet, job_root(job, context.cluster)
    looking: dict[str, asyncio.Future[Found]] = {}

    async def see(name: str) -> Found:
        return await look(await fleet.host(name), root, tree.hash, ours.hash)

    try:
        if len(fleet.targets) <= AT_ONCE:
            looking = {name: asyncio.ensure_future(see(name)) for name in computing(context)}
        prepared = await _resolve(context, reached, job, tree, ours)
        wanted = prepared.job.hosts
        _refuse_strangers(wanted, fleet)
        if prepared.job.rented or prepared.job.containers:
            wanted = tuple(dict.fromkeys((*wanted, context.controller.name)))
        found = await fleet.each(wanted, lambda name: looking.get(name) or see(name))
    finally:
        for answer in looking.values():
            answer.cancel()
        await asyncio.gather(*looking.values(), return_exceptions=True)
    refuse_partly(wanted, found, fleet.failures)
    if prepared.job.rented and len({state.id for state in found.values()}) > 1:
        raise UsageError(
            f"{root} is not the same on all hosts, so {compress(prepared.job.rented)} would not have the job's code",
            hint="name a directory on a share of all hosts with --directory, or other nodes with --nodelist",
        )
    return prepared, found


async def _bundles(job: JobSpec, here: Path, limit: int) -> tuple[Bundle, Bundle]:
    return await asyncio.to_thread(lambda: (working_tree(here, job.script, limit), runtime()))


async def _resolve(context: Context, reached: Reached, job: JobSpec, tree: Bundle, ours: Bundle) -> Prepared:
    _refuse_without_accounting(context, job)
    environment = await _environment(context, reached.fleet, job)
    if environment is not None:
        job = job.model_copy(update={"python": environment.program})
    said, partitions = await reached.slurm
    nodes = parse_nodes(said)
    root, place = job_root(job, context.cluster), environment.path if environment else ""
    if any(node.cloud for node in nodes):
        from shoal.verbs.run_rented import resolve_rented  # it reads the whole spec

        resolved = resolve_rented(context, job, nodes, parse_partitions(partitions), environment)
    else:
        resolved = resolve(job, nodes, parse_partitions(partitions))
    staged = bool(resolved.containers)
    shipped = Shipped(context.cluster, root, tree.hash, ours.hash, tree.workdir, place, context.shares, staged)
    return Prepared(resolved, shipped, tree, ours, sbatch_script(resolved, shipped), environment)


def _refuse_without_accounting(context: Context, job: JobSpec) -> None:
    given = [f"--{name}" for name in ("account", "qos") if getattr(job, name) is not None]
    if given and context.spec.accounting is None:
        raise UsageError(
            f"the cluster has no accounting, and Slurm would ignore {' and '.join(given)} without a word",
            hint="put `accounting: true` into the file and run `shoal up`, or leave it out",
        )


async def _environment(context: Context, fleet: Connections, job: JobSpec) -> Made | None:
    if job.environment is None:
        return None
    from shoal.verbs.env_use import environment_of  # it reads the whole spec, which no other job needs

    return await environment_of(context, fleet, job)


def _refuse_strangers(wanted: Sequence[str], fleet: Connections) -> None:
    strangers = [name for name in wanted if name not in fleet.targets]
    if strangers:
        raise UsageError(
            f"the file does not name {', '.join(strangers)}, so the code cannot be sent there",
            hint="`shoal up` brings Slurm to what the file says",
        )


async def _expect_profiler(fleet: Connections, job: ResolvedJob) -> None:
    if job.spec.profile is None:
        return

    async def one(name: str) -> bool:
        return await lacks_profiler(await fleet.host(name), job.spec)

    lacking = await fleet.each(job.hosts, one)
    refuse_without_profiler(job.spec, [name for name, lacks in lacking.items() if lacks])


async def _ship(fleet: Connections, prepared: Prepared, found: Mapping[str, Found]) -> int:
    """The code to every node, or once to the storage they share; how many bytes were sent."""
    root = prepared.shipped.root
    shared = _in_common(found, prepared.job)

    async def give(name: str) -> int:
        host = await fleet.host(name)
        if found[name].shared != shared:
            await mark(host, root, shared)
        return await send(host, root, prepared.tree, prepared.runtime, found[name])

    chosen = who_needs_it(found)
    sent = await fleet.each(chosen, give)
    refuse_partly(chosen, sent, fleet.failures)
    return sum(sent.values())


def _in_common(found: Mapping[str, Found], job: ResolvedJob) -> bool:
    return len(found) + len(job.rented) > 1 and len({state.id for state in found.values()}) == 1


async def _clean(fleet: Connections, controller: Host, prepared: Prepared, found: Mapping[str, Found]) -> None:
    """Remove old code where there is much of it. The job is in the queue: nothing that fails here may stop it."""
    crowded = [name for name in who_needs_it(found) if found[name].old]
    if not crowded:
        return
    with contextlib.suppress(ShoalError):
        active = [record for record in parse_records(await ask(controller, show_command())) if record.active]
        hashes = {part for record in active if record.note for part in (record.note.code, record.note.runtime)}

        async def one(name: str) -> None:
            await clean(await fleet.host(name), prepared.shipped.root, [record.id for record in active], hashes)

        await fleet.each(crowded, one)


async def _tracking(reached: Reached, job: ResolvedJob, environ: Mapping[str, str]) -> dict[str, str]:
    """The cluster's own tracking server, for a job that names no other. Its password goes by no script or argument.

    Rented containers do not reach it, and are not told its password.
    """
    if job.spec.tracking_uri or job.containers:
        return {}
    found = job_variables(await reached.tracking)
    # A server that somebody else set up has a password that only the operator knows.
    known = {} if "MLFLOW_TRACKING_USERNAME" in found or not found else _given(environ)
    return {**known, **found}


def check_secrets(job: JobSpec, environ: Mapping[str, str] = os.environ) -> dict[str, str]:
    """What the job's tracker wants to know and nobody else may."""
    return _given(environ) if job.tracking_uri else {}


def _given(environ: Mapping[str, str]) -> dict[str, str]:
    found = {name: environ[name] for name in SECRETS if environ.get(name)}
    broken = [name for name, value in found.items() if not value.isprintable()]
    if broken:
        raise UsageError(f"{', '.join(broken)} is not a single line of text", hint="set it again, or unset it")
    return found


SUBMIT = r"""
while IFS= read -r line && [ -n "$line" ]; do export "$line"; done
exec sbatch --parsable
"""
"""Takes variables from standard input until an empty line; the rest is the script."""


async def _sbatch(controller: Host, script: str, secrets: Mapping[str, str]) -> str:
    """Queue the job. Slurm keeps the environment of sbatch with it, where only its user and root can read it."""
    variables = {SUBMISSION: os.urandom(4).hex(), **secrets}
    told = "".join(f"{name}={value}\n" for name, value in variables.items())
    stdin = f"{told}\n{script}".encode()
    result = await controller.run(["sh", "-c", SUBMIT], stdin=stdin, timeout=60, root=False)
    if result.status != 0:
        said = result.error_text.strip().removeprefix("sbatch: error: ")
        raise SlurmError(f"sbatch refused the job: {said}", hint="`shoal run --dry-run` shows the script")
    return result.text.strip().partition(";")[0]
