"""`shoal doctor --job`: why a job failed that has ended, and why one makes no step that runs."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Iterable, Sequence

from shoal.errors import HostError, UsageError
from shoal.health.diagnosis import Diagnosis
from shoal.health.reasons import FAULTS
from shoal.health.report import MAX_EVIDENCE
from shoal.hostlist import expand
from shoal.jobs.hang import describe_stacks, hung_text, parse_nccl, parse_stacks
from shoal.jobs.record import JobRecord
from shoal.remote import python_command
from shoal.slurm.state import JobState
from shoal.verbs.context import Context
from shoal.verbs.jobs import jobs
from shoal.verbs.logs import logs
from shoal.verbs.node_files import reader_command

STACKS_PROGRAM = "node_health/job_stacks.py"
STACKS_TIMEOUT_S = 60.0
ASKED_MIN_S = 60.0
"""Who asks about a job is told of a shorter pause than `shoal jobs` shows by itself."""
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
        now = time.time()
        if hung_text(view.progress, now, ASKED_MIN_S):
            answers = await _read_ranks(context, view.record)
            ranks = [stack for node, answer in answers for stack in parse_stacks(node, answer)]
            text = hung_text(view.progress, now, ASKED_MIN_S, ranks)
            counters = next(filter(None, (parse_nccl(answer) for _, answer in answers)), [])
            diagnosis = Diagnosis(
                fault.id,
                fault.level,
                "",
                fault.what,
                view.record.id,
                evidence=(text, *describe_stacks(ranks)[:MAX_RANKS], *counters),
                cause=fault.cause,
                fix=fault.fix.replace("JOB", view.record.id),
            )
            diagnoses.append(diagnosis)
    return diagnoses


async def _read_ranks(context: Context, record: JobRecord) -> list[tuple[str, str]]:
    """What each node says of its ranks. One that does not answer is left out.

    Users cannot log in to the nodes: for them it is a step of their own job, which names its node itself.
    """
    command, nodes = python_command(STACKS_PROGRAM, record.number), expand(record.nodes)
    answers: list[tuple[str, str]] = []
    if context.joined is not None:
        async with context.controller_host() as host:
            line = reader_command(record, nodes, command)
            with contextlib.suppress(HostError):
                answers.append(("", (await host.run(line, timeout=STACKS_TIMEOUT_S, root=False)).text))
        return answers
    async with await context.connections() as fleet:

        async def read(name: str) -> None:
            result = await (await fleet.host(name)).run(command, timeout=STACKS_TIMEOUT_S)
            answers.append((name, result.text))

        await fleet.each([name for name in nodes if name in fleet.targets], read)
    return answers
