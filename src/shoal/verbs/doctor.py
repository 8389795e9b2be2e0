"""`shoal doctor`: what is wrong with the running cluster, and why. Changes nothing: fixes are in `doctor_fixes.py`."""

from __future__ import annotations

import asyncio
import contextlib
import json
import time
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace
from typing import Any

from shoal.errors import AgentFailed, CommandTimeout, SlurmError, UsageError
from shoal.health.diagnosis import REJECTED, ClusterView, Diagnosis, concerning_jobs, diagnose
from shoal.health.reliability import RECORD_DAYS
from shoal.health.report import HostReport
from shoal.hostlist import HostlistError, expand
from shoal.hosts.api import Host
from shoal.plan.connections import Connections
from shoal.plan.observe import SLURM_DIRECTORIES
from shoal.remote import python_command
from shoal.remote.node_health.node import CONFIG, RESULT, STATE
from shoal.slurm.conf import LOG_DIRECTORY
from shoal.slurm.state import JOBCOMP, JOBS_COMMAND, NODES_COMMAND, JobState, NodeState, parse_jobs, parse_nodes
from shoal.spec.member import Member
from shoal.verbs.context import Context
from shoal.verbs.doctor_job import explain_ended_job, explain_hung_job
from shoal.verbs.health import existing_members
from shoal.verbs.logs import check_job
from shoal.verbs.slurmctld import gather_answers, slurm_output

PROBE_TIMEOUT_S = 10.0
"""For the checks of a host, once it is connected."""
SLURM_TIMEOUT_S = 10.0
KEY_CHECKS, KEY_CHECK_INTERVAL_S = 3, 2.0
"""How often a host whose munge key differs is asked again, and after how long."""
ALL_NODES_COMMAND = (NODES_COMMAND[0], "--future", *NODES_COMMAND[1:])
"""slurmctld hides a node whose name it cannot resolve."""
JOB_DIRECTORIES = ("/tmp", "/var/tmp")  # nosec B108 - only checked
PROBE = "health_probe"
OPERATOR_FIX = "tell the operator, who can run `shoal doctor`"


@dataclass(frozen=True)
class FixOutcome:
    """What came of one fix."""

    id: str
    host: str
    job: str
    action: str
    fixed: bool
    detail: str = ""
    """Why it was not applied, or did not help."""
    time: float = 0.0
    by: str = ""
    """Who ran it, as `user@machine`."""


@dataclass(frozen=True)
class DoctorResult:
    cluster: str
    findings: tuple[Diagnosis, ...] = ()
    checked: tuple[str, ...] = ()
    """The hosts that were checked."""
    unchecked: tuple[str, ...] = ()
    """Hosts that could not be checked, or not completely."""
    fixes: tuple[FixOutcome, ...] = ()
    history: tuple[FixOutcome, ...] = ()


async def doctor(context: Context, hosts: str | None = None, job: str | None = None) -> DoctorResult:
    """Everything that is wrong, worst first: of these hosts, or of what concerns this job."""
    if job is not None:
        check_job(job)
    if context.joined is not None:
        return await _user_doctor(context, hosts, job)
    names = _expand(hosts) if hosts is not None else None
    view = await observe_health(context, names)
    diagnoses = diagnose(view)
    if names is not None:
        all_names = {*(member.name for member in context.members), *view.nodes}
        if unknown := [name for name in names if name not in all_names]:
            raise UsageError(
                f"cluster {context.cluster} has no node {', '.join(unknown)}", hint="`shoal status` lists them"
            )
        diagnoses = [diagnosis for diagnosis in diagnoses if diagnosis.host in names]
    if job is not None:
        tasks = _find_job(view.jobs, job)
        diagnoses = (
            [*await explain_hung_job(context, tasks), *concerning_jobs(diagnoses, tasks)]
            if tasks
            else await explain_ended_job(context, job, diagnoses)
        )
    unchecked = {*view.unreached, *(name for name, report in view.reports.items() if report.unfinished)}
    return DoctorResult(context.cluster, tuple(diagnoses), tuple(view.reports), tuple(sorted(unchecked)))


async def observe_health(context: Context, names: Iterable[str] | None = None) -> ClusterView:
    """Check these hosts, or all, and ask Slurm: one round trip each, all at once."""
    controller = context.controller.name
    limits = {*names, controller} if names is not None else None
    existing = await existing_members(context)
    members = [member for member in existing if limits is None or member.name in limits]
    requests = {member.name: _request(context, member, existing) for member in members}
    nodes: list[NodeState] = []
    jobs: list[JobState] = []
    slurm_error = ""
    clocks: dict[str, float] = {}
    async with await context.connections(members) as fleet:

        async def check_host(name: str) -> HostReport:
            nonlocal nodes, jobs, slurm_error
            host = await fleet.host(name)
            try:
                report = HostReport.parse(await _probe(host, requests[name]))
            except ValueError as error:
                raise AgentFailed(name, f"its checks give an answer that cannot be read: {error}") from error
            if report.clock is not None:
                clocks[name] = report.clock - time.time()
            if name == controller and report.services.get("slurmctld", "active") == "active":
                try:
                    nodes, jobs = await _ask_slurm(host)
                except SlurmError as error:
                    slurm_error = error.message
            return report

        with context.progress.phase("check hosts", len(members)) as phase:
            reports = await fleet.each(fleet.targets, check_host, phase)
        credentials = {
            name: report.munge["credential"] for name, report in reports.items() if report.munge.get("credential")
        }
        answers = await _decode(fleet, controller, credentials) if credentials.get(controller) else {}
        unreached = {name: error.cause for name, error in fleet.failures.items()}
    by_name = {node.name: node for node in nodes}
    nodesets: dict[str, list[str]] = {}
    for member in existing:
        if "compute" in member.roles:
            nodesets.setdefault(member.nodeset, []).append(member.name)
    return ClusterView(controller, by_name, tuple(jobs), slurm_error, reports, unreached, answers, clocks, nodesets)


def _request(context: Context, member: Member, others: Iterable[Member]) -> dict[str, list[str]]:
    """What to check on a member. A machine that does not exist yet needs no name."""
    daemons = [name for name, role in (("slurmctld", "controller"), ("slurmd", "compute")) if role in member.roles]
    munge = ["munge"] if context.spec.auth == "munge" else []
    runs_jobs = "compute" in member.roles
    is_controller = "controller" in member.roles
    programs = [context.spec.slurm.options.get(key, "") for key in ("Prolog", "Epilog", "TaskProlog", "TaskEpilog")]
    files = [path for path in programs if path.startswith("/") and " " not in path and "*" not in path]
    return {
        "services": [*munge, *daemons],
        "directories": [*JOB_DIRECTORIES, *SLURM_DIRECTORIES],
        "names": [other.name for other in others],
        "users": [*context.spec.users],
        "steps": [],
        **({"records": [JOBCOMP, str(RECORD_DAYS)], "completing": []} if is_controller else {}),
        "clock": [],
        **({"version": [daemons[0]]} if daemons else {}),
        "confs": ["" if is_controller else "cached"],
        **({"facts": files, "stops": [f"{LOG_DIRECTORY}/slurmd.log", str(RECORD_DAYS)]} if runs_jobs else {}),
        "logs": [f"{LOG_DIRECTORY}/{name}.log" for name in daemons],
        **({"munge": []} if munge else {}),
        **({"health": [CONFIG, f"{STATE}/{RESULT}"]} if context.spec.health.mode != "off" and runs_jobs else {}),
    }


async def _decode(fleet: Connections, controller: str, credentials: Mapping[str, str]) -> dict[str, str]:
    """What the controller's munge says to the credential of each host.

    One of another key is made anew: while keys are rotated, hosts have different ones for a moment.
    """
    answers: dict[str, str] = {}

    async def ask_munge(name: str) -> dict[str, Any]:
        return await _probe(await fleet.host(name), {"munge": []})

    with contextlib.suppress(CommandTimeout):  # the next run tells
        host = await fleet.host(controller)
        answers |= await _probe(host, credentials, "decode")
        for _ in range(KEY_CHECKS):
            others = [name for name, answer in answers.items() if answer == REJECTED]
            if not others:
                break
            await asyncio.sleep(KEY_CHECK_INTERVAL_S)
            again = await fleet.each(others, ask_munge)  # a check that hangs is not in the answer
            made = {name: report.get("munge", {}).get("credential", "") for name, report in again.items()}
            answers |= await _probe(host, {name: text for name, text in made.items() if text}, "decode")
    return answers


async def _probe(host: Host, request: Mapping[str, Any], *mode: str) -> dict[str, Any]:
    slowness = host.target.slowness
    command = python_command(PROBE, *mode, *([f"--slowness={slowness}"] if slowness > 1 else []))
    result = await host.run(command, stdin=json.dumps(request).encode(), timeout=PROBE_TIMEOUT_S * slowness)
    try:
        values = json.loads(result.text)
    except ValueError:
        values = None
    if not isinstance(values, dict):
        output = (result.error_text.strip().splitlines() or [f"status {result.status}"])[-1]
        raise AgentFailed(host.name, f"its checks failed: {output}", hint=f"see `shoal ssh {host.name} python3`")
    return values


async def _ask_slurm(host: Host, *more: str) -> tuple[list[NodeState], list[JobState]]:
    nodes, jobs = await asyncio.gather(
        slurm_output(host, ALL_NODES_COMMAND, SLURM_TIMEOUT_S * host.target.slowness),
        slurm_output(host, (*JOBS_COMMAND, *more), SLURM_TIMEOUT_S * host.target.slowness),
    )
    return parse_nodes(nodes), parse_jobs(jobs)


async def _user_doctor(context: Context, hosts: str | None, job: str | None) -> DoctorResult:
    """What Slurm says about the user's jobs and their nodes. Users cannot log in to the hosts."""
    async with context.controller_host() as host:
        [(nodes, jobs)] = await gather_answers(host, _ask_slurm(host, "--me"))
    tasks = jobs if job is None else _find_job(jobs, job)
    view = ClusterView(context.controller.name, {node.name: node for node in nodes}, tuple(tasks))
    diagnoses = concerning_jobs(diagnose(view), tasks)
    if job is not None:
        diagnoses = (
            [*await explain_hung_job(context, tasks), *diagnoses]
            if tasks
            else await explain_ended_job(context, job, diagnose(view))
        )
    if hosts is not None:
        diagnoses = [diagnosis for diagnosis in diagnoses if diagnosis.host in _expand(hosts)]
    own = [
        replace(
            diagnosis, fix=OPERATOR_FIX if diagnosis.host or diagnosis.action else diagnosis.fix, action="", blocked=""
        )
        for diagnosis in diagnoses
    ]
    return DoctorResult(context.cluster, tuple(own))


def _find_job(jobs: Iterable[JobState], number: str) -> list[JobState]:
    """The job of this number in the queue; of an array, every task."""
    return [job for job in jobs if number in (job.id, job.id.partition("_")[0])]


def _expand(hosts: str) -> list[str]:
    try:
        return expand(hosts)
    except HostlistError as error:
        raise UsageError(f"{hosts!r} is not a hostlist: {error.problem}", hint="write gpu01 or gpu[01-16]") from None
