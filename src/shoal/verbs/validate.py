"""`shoal validate`: run the tests that people run by hand on a new cluster, as jobs of the user, and judge them.

All jobs are queued at once, each with its nodes for itself: Slurm runs them one after the other, and while one runs the
next is on its way.
"""

from __future__ import annotations

import asyncio
import json
import tempfile
import time
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any

from shoal.errors import UsageError
from shoal.hostlist import compress, expand
from shoal.hosts.api import Host
from shoal.jobs.model import JobSpec, job_from_options
from shoal.jobs.record import JobRecord
from shoal.jobs.resolve import gpus_of
from shoal.plan.progress import NestedProgress, Phase
from shoal.remote import program_text, shell_command
from shoal.slurm.conf import SRUN_PORTS
from shoal.slurm.state import NODES_COMMAND, PARTITIONS_COMMAND, NodeState, parse_nodes, parse_partitions
from shoal.spec.finding import Finding
from shoal.validation.compare import compare_rows
from shoal.validation.rows import read_environments, read_mpiruns, read_rows
from shoal.validation.types import JobOutcome, ValidationJob, ValidationResult, read_result
from shoal.verbs.context import Context
from shoal.verbs.jobs import cancel
from shoal.verbs.logs import find_records, logs
from shoal.verbs.run import run
from shoal.verbs.slurmctld import current_jobs, gather_answers, slurm_output
from shoal.verbs.usage import parse_when

LAUNCHERS = ("srun", "torchrun", "mpirun")
PROGRAMS = ("collectives", "gpus", "links", "main", "mpi", "node_tests", "place")
SCRIPT = "validate.py"
START = "import sys\n\nfrom programs.validation.main import main\n\nmain(sys.argv[1:])\n"
POLL_INTERVAL_S = 0.5
KEEP_TIMEOUT_S = 60.0
MAX_KEPT_RUNS = 500
_KEPT = "file=${XDG_STATE_HOME:-$HOME/.local/state}/shoal/validate/$1.jsonl; umask 077"
KEEP_SCRIPT = _KEPT + '; mkdir -p "${file%/*}" && cat >> "$file"'
READ_SCRIPT = _KEPT + f'; [ ! -e "$file" ] || tail -n {MAX_KEPT_RUNS} "$file"'
"""In the home of the login: results are the user's own."""
_UNUSABLE_STATES = {"DOWN", "DRAIN", "FAIL", "NOT_RESPONDING", "UNKNOWN", "MAINT", "INVALID_REG"}
QUICK_OPTIONS = {
    **{"sizes": [1 << 10, 1 << 16, 1 << 20, 1 << 22], "iterations": 5, "seconds": 0.3},
    **{"hpl_order": 362, "hpl_memory": 0.0, "fio_size": "16M", "fio_seconds": 5},
}
FULL_OPTIONS = {
    **{"sizes": [1 << power for power in range(10, 29, 2)], "iterations": 20, "seconds": 2.0},
    **{"hpl_order": 0, "hpl_memory": 0.1, "fio_size": "1G", "fio_seconds": 60},
}
GPU_SIZES = [1 << power for power in range(20, 33, 2)]
"""To 4 GiB: published limits are of large messages."""
QUICK_TIME, FULL_TIME = "10", "120"
"""Time limits of each job, in minutes."""


@dataclass(frozen=True)
class ValidationSettings:
    """What `shoal validate` is asked for."""

    quick: bool = False
    launchers: tuple[str, ...] = LAUNCHERS
    nodelist: str | None = None
    partition: str | None = None
    image: str = ""
    options: Mapping[str, Any] = field(default_factory=dict)
    """What all jobs have in common: fields of a job."""


@dataclass(frozen=True)
class ValidationHistory:
    """The results of earlier runs."""

    cluster: str
    since: float
    runs: tuple[ValidationResult, ...]


async def validate(context: Context, settings: ValidationSettings) -> ValidationResult:
    """Run all tests, compare them with each other and with earlier runs, and keep the result."""
    began = time.time()
    async with context.controller_host() as host:
        answers = await gather_answers(host, slurm_output(host, NODES_COMMAND), slurm_output(host, PARTITIONS_COMMAND))
        history = await read_history(host, context.cluster)
    nodes, skipped = choose_nodes(settings, parse_nodes(answers[0]), default_partition(settings, answers[1]))
    jobs = plan_jobs(settings, nodes)
    outcomes = await _run_jobs(context, settings, jobs)
    rows = tuple(row for outcome in outcomes for row in read_rows(outcome))
    names = tuple(node.name for node in nodes)
    result = ValidationResult(context.cluster, began, settings.quick, names, rows, mpiruns=read_mpiruns(outcomes))
    result = replace(result, environments=read_environments(outcomes))
    result = replace(result, findings=(*skipped, *compare_rows(result, history)))
    async with context.controller_host() as host:
        problem = await _keep(host, result)
    return replace(result, findings=(*result.findings, problem)) if problem else result


async def validation_history(context: Context, since: str) -> ValidationHistory:
    """The results that were kept since then, oldest first."""
    begin = parse_when("--since", since, time.time())
    async with context.controller_host() as host:
        history = await read_history(host, context.cluster)
    return ValidationHistory(context.cluster, begin, tuple(result for result in history if result.time >= begin))


def default_partition(settings: ValidationSettings, text: str) -> str:
    partitions = parse_partitions(text)
    name = settings.partition or next((partition.name for partition in partitions if partition.default), "")
    if not name:
        names = ", ".join(partition.name for partition in partitions)
        raise UsageError("the cluster has no default partition", hint=f"use --partition: {names}")
    return name


def choose_nodes(
    settings: ValidationSettings, nodes: Sequence[NodeState], partition: str
) -> tuple[list[NodeState], list[Finding]]:
    """The nodes to test: those that are named, or all of the partition that take jobs; and findings about the others.

    Rented nodes are tested only where they are named: renting them costs money.
    """
    inside = {node.name: node for node in nodes if partition in node.partitions}
    if settings.nodelist is not None:
        names = expand(settings.nodelist)
        if unknown := [name for name in names if name not in inside]:
            raise UsageError(
                f"partition {partition} has no node {compress(unknown)}", hint=f"it has {compress(inside) or 'none'}"
            )
        return [inside[name] for name in names], []
    permanent = [node for node in inside.values() if not node.cloud]
    usable = [node for node in permanent if not _UNUSABLE_STATES & set(node.state)]
    skipped = [node for node in permanent if node not in usable]
    if not usable:
        raise UsageError(
            f"partition {partition} has no node that takes jobs",
            hint="`shoal status` says why; rented nodes are tested where --nodelist names them",
        )
    findings = [
        Finding("warning", "not tested: the node takes no jobs", "+".join(node.state), "`shoal doctor`", host=node.name)
        for node in skipped
    ]
    return usable, findings


def plan_jobs(settings: ValidationSettings, nodes: Sequence[NodeState]) -> list[ValidationJob]:
    """The jobs: the launchers on each group of nodes with as many GPUs, then each node alone, and all links."""
    jobs: list[ValidationJob] = []
    groups: dict[int, list[NodeState]] = {}
    for node in nodes:
        groups.setdefault(gpus_of(node), []).append(node)
    for gpus, group in sorted(groups.items(), reverse=True):
        names = tuple(node.name for node in group)
        cpus = max(1, min(node.cpus for node in group) // (gpus or 1))
        common = ("cpu", *(("gpu",) if gpus else ()))
        mpirun_row = ("mpirun",) if "mpirun" in settings.launchers else ()
        for title, launcher, tests in (
            ("srun", "srun", (*common, *mpirun_row, "torch")),
            ("torchrun", "torchrun", (*common, "torch")),
            ("srun --mpi=pmix", "pmix", ("cpu", "mpi")),
            ("mpirun", "mpirun", (*common, "torch", "mpi")),
        ):
            wanted = "mpirun" if launcher == "pmix" else launcher
            if wanted in settings.launchers:
                jobs.append(ValidationJob(title, launcher, tests, names, gpus, cpus))
        if settings.image:
            jobs.append(ValidationJob("srun, image", "srun", (*common, "torch"), names, gpus, cpus, settings.image))
            for title, launcher, tests in (
                ("srun --mpi=pmix, image", "pmix", ("cpu", "mpi")),
                ("mpirun, image", "mpirun", (*common, "torch", "mpi")),
            ):
                if mpirun_row:
                    jobs.append(ValidationJob(title, launcher, tests, names, gpus, cpus, settings.image))
    names = tuple(node.name for node in nodes)
    links = ("links",) if len(names) > 1 else ()
    memory_mb = min(node.memory_mb for node in nodes)
    jobs.append(ValidationJob("srun", "srun", (*links, "hpcc", "fio"), names, memory_mb=memory_mb))
    return jobs


def job_options(context: Context, settings: ValidationSettings, job: ValidationJob) -> dict[str, Any]:
    """What the tests of a job are told."""
    options: dict[str, Any] = dict(QUICK_OPTIONS if settings.quick else FULL_OPTIONS)
    if job.gpus and not settings.quick:
        options["sizes"] = GPU_SIZES
    ports = [int(port) for port in SRUN_PORTS.split("-")]
    return {**options, "gpus": job.gpus, "ports": ports, "shares": _shares(context), "memory_mb": job.memory_mb}


def _shares(context: Context) -> list[str]:
    """The directories that all hosts share, where jobs may write."""
    if context.joined is not None:
        return [path for path, share in context.joined.record.shares.items() if share.writable]
    return [*context.spec.storage]


def job_spec(context: Context, settings: ValidationSettings, job: ValidationJob) -> JobSpec:
    values: dict[str, Any] = {
        **{"script": SCRIPT, "launcher": job.launcher, "nodelist": compress(job.nodes), "nodes": len(job.nodes)},
        **{"args": [",".join(job.tests), json.dumps(job_options(context, settings, job), separators=(",", ":"))]},
        **{"gpus_per_node": job.gpus, "ntasks_per_node": job.ranks_per_node, "exclusive": True, "requeue": False},
        **{"job_name": f"validate-{job.launcher}", "time": QUICK_TIME if settings.quick else FULL_TIME},
        **({"switches": len(job.nodes)} if len(job.nodes) > 1 else {}),
        **({"partition": settings.partition} if settings.partition else {}),
        **settings.options,
        **({"image": job.image} if job.image else {}),
    }
    return job_from_options(values)


def write_tree(directory: Path) -> None:
    """The code of the jobs: programs of this package, which the nodes run as they are."""
    package = directory / "programs"
    (package / "validation").mkdir(parents=True)
    (directory / SCRIPT).write_text(START)
    for path in (package / "__init__.py", package / "validation/__init__.py"):
        path.touch()
    (package / "link_probe.py").write_text(program_text("link_probe"))
    for name in PROGRAMS:
        (package / f"validation/{name}.py").write_text(program_text(f"validation/{name}.py"))


async def _run_jobs(context: Context, settings: ValidationSettings, jobs: Sequence[ValidationJob]) -> list[JobOutcome]:
    """Queue all jobs, wait until they have ended, and read what they printed. Who stops it leaves no job behind."""
    numbers: list[str] = []
    try:
        with tempfile.TemporaryDirectory(prefix="shoal-validate-") as scratch:
            write_tree(Path(scratch))
            with context.progress.phase("queue jobs", len(jobs)) as phase:
                for job in jobs:
                    phase.update(job.launcher, "queue")
                    nested = replace(context, progress=NestedProgress(phase))  # it may pull an image
                    await _submit(nested, job_spec(context, settings, job), Path(scratch), numbers)
                    phase.done(job.launcher)
        with context.progress.phase("run tests", len(jobs)) as phase:
            return await _wait(context, numbers, jobs, phase)
    except BaseException:
        if numbers:
            await cancel(context, numbers)
        raise


async def _submit(context: Context, spec: JobSpec, here: Path, numbers: list[str]) -> None:
    submission = asyncio.ensure_future(run(context, spec, here))
    try:
        # Shielded: a job that is queued before its number is known must be cancelled too.
        numbers.append((await asyncio.shield(submission)).id)
    except asyncio.CancelledError:
        numbers.append((await submission).id)
        raise


async def _wait(
    context: Context, numbers: Sequence[str], jobs: Sequence[ValidationJob], phase: Phase
) -> list[JobOutcome]:
    """What came of every job, once all have ended. What one printed is read while the next runs."""
    outcomes: dict[ValidationJob, asyncio.Task[JobOutcome]] = {}
    try:
        async with context.controller_host() as host:
            while len(outcomes) < len(jobs):
                listed = {record.id: record for record in await current_jobs(host)}
                for number, job in zip(numbers, jobs, strict=True):
                    if job in outcomes:
                        continue
                    record = listed.get(number) or next(iter(await find_records(host, number)), None)
                    if record is None or not record.active:
                        outcomes[job] = asyncio.create_task(_outcome(context, job, number, record))
                        phase.done(f"{job.launcher}-{number}", _failure(record))
                    else:
                        phase.update(f"{job.launcher}-{number}", f"{', '.join(job.tests)}: {_progress(record)}")
                if len(outcomes) < len(jobs):
                    await asyncio.sleep(POLL_INTERVAL_S)
        return [await outcomes[job] for job in jobs]
    finally:
        for task in outcomes.values():
            task.cancel()
        await asyncio.gather(*outcomes.values(), return_exceptions=True)


def _progress(record: JobRecord) -> str:
    reason = record.reason.replace("_", " ").partition(",")[0]
    return record.state.lower() + (f" ({reason})" if record.state == "PENDING" and reason else "")


def _failure(record: JobRecord | None) -> str:
    if record is None:
        return "Slurm does not know it any more"
    return record.state.lower().replace("_", " ") if record.failed else ""


async def _outcome(context: Context, job: ValidationJob, number: str, record: JobRecord | None) -> JobOutcome:
    result = await logs(context, number)
    lines = tuple(line.text for line in result.lines)
    if result.reason is not None:
        return JobOutcome(job, number, True, result.reason.text, result.reason.fix, lines)
    return JobOutcome(job, number, record is None or record.failed, _failure(record), "", lines)


async def read_history(host: Host, cluster: str) -> list[ValidationResult]:
    """The results that this user's validations of the cluster left, oldest first."""
    result = await host.run(shell_command(READ_SCRIPT, cluster), timeout=KEEP_TIMEOUT_S, root=False)
    return list(parse_history(result.text.splitlines()))


def parse_history(lines: Iterable[str]) -> Iterable[ValidationResult]:
    for line in lines:
        try:
            values = json.loads(line)
            if isinstance(values, dict):
                yield read_result(values)
        except ValueError:  # a line that was not written to its end
            continue


async def _keep(host: Host, result: ValidationResult) -> Finding | None:
    """Keep the result for later runs; a finding where that failed."""
    data = (json.dumps(asdict(result), separators=(",", ":")) + "\n").encode()
    answer = await host.run(shell_command(KEEP_SCRIPT, result.cluster), stdin=data, timeout=KEEP_TIMEOUT_S, root=False)
    if answer.status == 0:
        return None
    fix = "free space in your home directory there, or make it writable"
    return Finding("warning", "the result was not kept", answer.error_text.strip(), fix, host=host.name)
