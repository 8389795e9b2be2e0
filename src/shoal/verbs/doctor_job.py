"""`shoal doctor --job`: why a job failed that has ended, and why one makes no step that runs."""

from __future__ import annotations

import time
from collections.abc import Iterable, Sequence

from shoal.errors import UsageError
from shoal.health.diagnosis import Diagnosis
from shoal.health.reasons import FAULTS
from shoal.health.report import MAX_EVIDENCE
from shoal.hostlist import expand
from shoal.jobs.hang import RankStack, describe_stacks, hung_text, parse_stacks
from shoal.remote import python_command
from shoal.slurm.state import JobState
from shoal.verbs.context import Context
from shoal.verbs.jobs import jobs
from shoal.verbs.logs import logs

STACKS_TIMEOUT_S = 60.0
MAX_RANKS = 16
"""Of so many ranks it is shown what they do."""


async def explain_ended_job(context: Context, job: str, diagnoses: Iterable[Diagnosis]) -> list[Diagnosis]:
    """Why a job failed that has left the queue, and what is wrong with its nodes now."""
    result = await logs(context, job)
    if result.record is None:
        raise UsageError(f"there is no job {job}", hint="`shoal jobs --all` lists those that Slurm has records of")
    nodes = expand(result.record.nodes) if result.record.nodes else []
    node_diagnoses = [diagnosis for diagnosis in diagnoses if diagnosis.host in nodes]
    if result.reason is None:
        return node_diagnoses
    reason = result.reason
    explanation = Diagnosis(
        "job-failed",
        FAULTS["job-failed"].level,
        "",
        reason.text,
        job,
        evidence=reason.details[-MAX_EVIDENCE:],
        cause=f"{reason.kind}{f', on {reason.node}' if reason.node else ''}",
        fix=reason.fix or f"`shoal logs {job}` shows all that it printed",
    )
    return [explanation, *node_diagnoses]


async def explain_hung_job(context: Context, tasks: Sequence[JobState]) -> list[Diagnosis]:
    """The task of a job that runs and makes no step, with what its ranks do; none if it goes on."""
    running = [task for task in tasks if task.state == "RUNNING"]
    if not running:
        return []
    fault, diagnoses = FAULTS["job-hung"], []
    try:
        views = (await jobs(context, [task.id for task in running])).jobs
    except UsageError:
        return []  # it has ended meanwhile
    for view in views:
        text = hung_text(view.progress, time.time())
        if text:
            # Users cannot log in to the nodes.
            stacks = (
                [] if context.joined is not None else await _read_stacks(context, view.record.id, view.record.nodes)
            )
            ranks = tuple(describe_stacks(stacks))[:MAX_RANKS]
            diagnosis = Diagnosis(
                fault.id,
                fault.level,
                "",
                fault.what,
                view.record.id,
                evidence=(text, *ranks),
                cause=fault.cause,
                fix=fault.fix.replace("JOB", view.record.id),
            )
            diagnoses.append(diagnosis)
    return diagnoses


async def _read_stacks(context: Context, job: str, nodes: str) -> list[RankStack]:
    """What each rank does now. A node that does not answer is left out."""
    stacks: list[RankStack] = []
    async with await context.connections() as fleet:

        async def read(name: str) -> None:
            result = await (await fleet.host(name)).run(python_command("job_stacks", job), timeout=STACKS_TIMEOUT_S)
            stacks.extend(parse_stacks(name, result.text))

        await fleet.each([name for name in expand(nodes) if name in fleet.targets], read)
    return stacks
