"""What is wrong with a cluster, from what Slurm and its hosts report: each fault with its evidence. Pure."""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from datetime import datetime

from shoal.health.consistency import (
    COMPLETING_S,
    failed_cgroups,
    unlike_nodes,
    wrong_clocks,
    wrong_confs,
    wrong_versions,
)
from shoal.health.faults import JOB_FAULTS, PERSON_DRAIN, REGISTER, REJECTED_NODE, RESUME, UNEXPLAINED, Fault
from shoal.health.node_faults import NODE_FAULTS
from shoal.health.reasons import FAULTS, LEVELS, faults_in, is_written_by_person
from shoal.health.reliability import unreliable_nodes
from shoal.health.report import CHANGE_OF_NODE, HostReport
from shoal.hostlist import expand
from shoal.network.tunnel import LOOPBACK
from shoal.plan.model import Cost
from shoal.plan.nodes import LEAVING_REASON, NOT_READY
from shoal.remote.node_health.node import INTERVAL_S
from shoal.slurm.state import JobState, NodeState
from shoal.spec.finding import Level

MIN_FREE_PERCENT = 2
"""A file system with less free space, or free inodes, is full."""
RECENT_S = 900
"""A host fault is shown with lines of logs that are not older."""
MAX_HEALTH_AGE_S = 3 * INTERVAL_S
"""The health program of a node does not run if its last result is older."""
NODE_FAULT_IDS = frozenset(fault.id for fault in NODE_FAULTS)
CHANGING = {"POWERED_DOWN", "POWERING_DOWN", "POWERING_UP"}
"""States of a rented node without a machine, or whose machine comes or goes: the rental service watches that."""
DECODED = "Success"
REJECTED = "Invalid credential"
"""What munge says to a credential of its own key, and of another."""
SILENT = ("unreachable", "slurmd-stopped", "gpu-missing", "munge-stopped", "munge-key")
"""Faults of a host that explain why Slurm does not hear of it."""
UNHEARD = ("not-responding", UNEXPLAINED.id)
"""Faults of its node that come with them."""
NO_DEVICE = ("can't stat gres.conf file", "Waiting for gres.conf file")
"""What slurmd logs before it ends, and when it starts again, where a device file of a GPU is missing."""
Key = tuple[str, str, str]


@dataclass(frozen=True)
class Diagnosis:
    """A fault of the table, and where it was found."""

    id: str
    level: Level
    host: str
    what: str
    job: str = ""
    since: str = ""
    """As Slurm writes it; empty where nothing tells."""
    reason: str = ""
    """Slurm's reason, whole."""
    evidence: tuple[str, ...] = ()
    cause: str = ""
    fix: str = ""
    cost: Cost = Cost.NOTHING
    """What it costs if Shoal applies the fix."""
    action: str = ""
    """What `--fix` does; empty where a person must act."""
    explicit: bool = False
    """`--fix` must name it."""
    blocked: str = ""
    """Why `--fix` cannot be applied now."""

    @property
    def key(self) -> Key:
        """What and where it is."""
        return self.id, self.host, self.job


@dataclass(frozen=True)
class ClusterView:
    """A cluster as Slurm and its hosts report it."""

    controller: str
    nodes: Mapping[str, NodeState] = field(default_factory=dict)
    jobs: Sequence[JobState] = ()
    slurm_error: str = ""
    """Why Slurm does not answer. Then nothing is known of nodes and jobs."""
    reports: Mapping[str, HostReport] = field(default_factory=dict)
    unreached: Mapping[str, str] = field(default_factory=dict)
    """Hosts that could not be checked, with the cause."""
    credentials: Mapping[str, str] = field(default_factory=dict)
    """What the controller's munge says to the credential of each host."""
    clocks: Mapping[str, float] = field(default_factory=dict)
    """How many seconds the clock of each host is ahead of this machine's."""
    nodesets: Mapping[str, Sequence[str]] = field(default_factory=dict)
    """The nodes of each nodeset, which should be alike."""


def diagnose(view: ClusterView) -> list[Diagnosis]:
    """Everything that is wrong, worst first."""
    host_diagnoses = [
        *(_diagnosis("unreachable", host, evidence=(cause,)) for host, cause in view.unreached.items()),
        *(diagnosis for host, report in view.reports.items() for diagnosis in _host_faults(view, host, report)),
        *(_diagnosis(id, host, evidence=evidence) for id, host, evidence in _misfits(view)),
    ]
    newcomers = _newcomers(view)
    host_diagnoses = [
        *(diagnosis for diagnosis in host_diagnoses if diagnosis.host not in newcomers),
        *(_diagnosis("not-joined", host) for host in newcomers),
    ]
    if view.slurm_error and not any(diagnosis.id == "slurmctld-stopped" for diagnosis in host_diagnoses):
        host_diagnoses.append(_diagnosis("slurmctld-silent", view.controller, evidence=(view.slurm_error,)))
    nodes = [diagnosis for node in view.nodes.values() for diagnosis in _node_faults(view, node, host_diagnoses)]
    # A host that cannot be checked explains why Slurm does not hear of it.
    silent_hosts = {diagnosis.host for diagnosis in host_diagnoses if diagnosis.id in SILENT}
    nodes = [diagnosis for diagnosis in nodes if diagnosis.id not in UNHEARD or diagnosis.host not in silent_hosts]
    host_keys = {diagnosis.key for diagnosis in host_diagnoses}
    nodes = [diagnosis for diagnosis in nodes if diagnosis.key not in host_keys]
    records = view.reports.get(view.controller, HostReport()).records
    stops = {name: report.stops for name, report in view.reports.items()}
    for name, numbers in unreliable_nodes(records, stops):
        if name in view.nodes and not view.nodes[name].cloud:  # a rented node is another machine each time
            nodes.append(_diagnosis("node-unreliable", name, evidence=(numbers,)))
    jobs = [diagnosis for job in view.jobs for diagnosis in _job_faults(job)]
    for entry in view.reports.get(view.controller, HostReport()).completing:
        if entry.seconds >= COMPLETING_S:
            text = f"job {entry.job} of {entry.user} on {entry.nodes} ended {entry.seconds // 60} min ago"
            jobs.append(replace(_diagnosis("job-completing", "", evidence=(text,)), job=entry.job))
    return sorted(
        [*host_diagnoses, *nodes, *jobs],
        key=lambda diagnosis: (LEVELS.index(diagnosis.level), diagnosis.host, diagnosis.job),
    )


def concerning_jobs(diagnoses: Iterable[Diagnosis], jobs: Sequence[JobState]) -> list[Diagnosis]:
    """Those about these jobs and about nodes that they run on or wait for."""
    ids = {job.id for job in jobs}
    nodes = {name for job in jobs for name in (*job.node_names, *_nodes_in(job.reason))}
    return [
        diagnosis for diagnosis in diagnoses if diagnosis.job in ids or (not diagnosis.job and diagnosis.host in nodes)
    ]


def hint(node: NodeState) -> str:
    """What is behind the reason of a node, in a few words; empty where the reason says it all, or is a person's."""
    if is_written_by_person(node.reason):
        return ""
    return REJECTED_NODE.what if _is_rejected(node) else next((fault.what for fault in faults_in(node.reason)), "")


def job_hint(reason: str) -> str:
    """The same for the reason why a job waits."""
    return next((fault.what for fault in JOB_FAULTS if fault.matches(reason)), "")


def _host_faults(view: ClusterView, host: str, report: HostReport) -> Iterator[Diagnosis]:
    for name, state in report.services.items():
        # A daemon that fails over and over is `activating`.
        problem = "" if state in ("active", "reloading") else f"{name} is {state}"
        if name == "munge":
            problem = problem or report.munge.get("error", "")
        if problem:
            fault = FAULTS[f"{name}-stopped"]
            lines = report.log_lines(fault.log, RECENT_S) if fault.log else ()
            if name == "slurmd" and lines and any(words in lines[-1] for words in NO_DEVICE):
                fault = FAULTS["gpu-missing"]  # a start would fail again
            reason = view.nodes[host].reason if host in view.nodes else ""
            since = state.partition(" since ")[2]
            yield _diagnosis(fault.id, host, evidence=(problem, *lines), since=since, reason=reason)
    answer = view.credentials.get(host, DECODED)
    if answer == REJECTED:
        lines = report.log_lines(FAULTS["munge-key"].log, RECENT_S)
        yield _diagnosis("munge-key", host, evidence=(f"munge on {view.controller}: {answer}", *lines))
    yield from _space_faults(host, report)
    if names := _missing_names(view, host, report):
        yield _diagnosis("name-unresolved", host, evidence=(f"does not resolve: {', '.join(names)}",))
    expected = view.reports[view.controller].users if view.controller in view.reports else {}
    wrong_users = [
        f"{name} has no account" if number is None else f"{name} is {number}, on {view.controller} {expected[name]}"
        for name, number in report.users.items()
        if expected.get(name) not in (None, number)
    ]
    if wrong_users:
        yield _diagnosis("user-missing", host, evidence=tuple(wrong_users))
    yield from _health_faults(host, report)
    if report.unfinished:
        checks = ", ".join(report.unfinished)
        yield _diagnosis("unreachable", host, evidence=(f"these checks did not end: {checks}",))


def _newcomers(view: ClusterView) -> list[str]:
    """Hosts that `shoal up` is about to make nodes: nothing is wrong with what they do not have yet."""
    names = [name for nodes in view.nodesets.values() for name in nodes if name in view.reports]
    return [name for name in names if view.nodes and name not in view.nodes]


def _missing_names(view: ClusterView, host: str, report: HostReport) -> list[str]:
    """The names that a host should know and does not. A container behind a tunnel knows only the controller, and no
    other host knows it."""
    behind_tunnel = {node.name for node in view.nodes.values() if node.address == LOOPBACK} - {view.controller}
    future_nodes = {name for nodes in view.nodesets.values() for name in nodes if view.nodes and name not in view.nodes}
    hidden = {*behind_tunnel, *future_nodes}
    return [
        name for name in report.names if name == view.controller or (host not in behind_tunnel and name not in hidden)
    ]


def _misfits(view: ClusterView) -> Iterator[tuple[str, str, tuple[str, ...]]]:
    """Hosts that do not fit the others."""
    for id, host, evidence in wrong_clocks(view.controller, view.clocks):
        answer = view.credentials.get(host, DECODED)
        yield id, host, evidence if answer == DECODED else (*evidence, f"munge on {view.controller}: {answer}")
    yield from wrong_versions(view.controller, view.reports)
    yield from wrong_confs(view.controller, view.reports)
    yield from unlike_nodes(view.nodesets, view.reports)
    for host, report in view.reports.items():
        if lines := failed_cgroups(report, report.services.get("slurmd") == "active"):
            yield "cgroups", host, lines


def _health_faults(host: str, report: HostReport) -> Iterator[Diagnosis]:
    """What the node's own program found, except what was just checked again."""
    if report.health is None:
        return
    if report.health.age_s > MAX_HEALTH_AGE_S:
        yield _diagnosis("health-stale", host, evidence=(f"its last result is {report.health.age_s / 60:.0f} min old",))
    for entry in report.health.findings:
        if entry.id in NODE_FAULT_IDS:  # a node may have a newer program
            since = f"{datetime.fromtimestamp(entry.since):%Y-%m-%dT%H:%M:%S}"
            yield _diagnosis(entry.id, host, evidence=entry.evidence, since=since)


def _space_faults(host: str, report: HostReport) -> Iterator[Diagnosis]:
    full_mounts = set()
    for mount, space in {space.mount: space for space in report.directories}.items():
        if space.total_mb and space.free_mb * 100 < MIN_FREE_PERCENT * space.total_mb:
            full_mounts.add(mount)
            room = f"{space.free_mb} of {space.total_mb} MB free"
            yield _diagnosis("disk-full", host, f"{mount} is full", (room,))
        elif space.files and space.free_files * 100 < MIN_FREE_PERCENT * space.files:
            full_mounts.add(mount)
            room = f"{space.free_files} of {space.files} inodes free"
            yield _diagnosis("inodes-full", host, f"{mount} has no room for more files", (room,))
    for space in report.directories:
        if space.problem and space.mount not in full_mounts:
            what = f"Slurm or its jobs cannot write to {space.path}"
            yield _diagnosis("read-only", host, what, (space.problem,))


def _node_faults(view: ClusterView, node: NodeState, host_diagnoses: Sequence[Diagnosis]) -> Iterator[Diagnosis]:
    # One that was not there in time has no machine, either; Slurm says so until the next job that needs it.
    is_late = "DOWN" in node.state and FAULTS["resume-timeout"].matches(node.reason)
    if (CHANGING & set(node.state) and not is_late) or not _is_out_of_service(node):
        return
    since, reason = node.reason_time, node.reason
    faults, rejection = faults_in(reason), tuple[str, ...]()
    if "INVALID_REG" in node.state:
        # It may have a person's reason or, from 23.02 on, one of an earlier time, also of an earlier rejection. That of
        # this one is in the log alone.
        line = _rejected_registration(view, node.name)
        rejected = [fault for text in line for fault in faults_in(text)]
        if rejected and rejected != faults:
            faults, rejection = rejected, line
        elif _is_rejected(node):
            faults = [REJECTED_NODE]
    if is_written_by_person(reason):
        text = f"{reason} ({node.reason_by})" if node.reason_by else reason
        yield _diagnosis(PERSON_DRAIN.id, node.name, evidence=(text,), since=since, reason=reason)
        if not rejection:
            return
    if not faults:
        faults = [FAULTS["not-responding"] if "NOT_RESPONDING" in node.state else UNEXPLAINED]
    report = view.reports.get(node.name, HostReport())
    note = reason if is_written_by_person(reason) else earlier_note(view, node.name)
    for fault in faults:
        lines = report.log_lines(fault.log) if fault.log else ()
        state = ": ".join(filter(None, ("+".join(node.state).lower(), reason)))
        diagnosis = _diagnosis(fault.id, node.name, evidence=(state, *rejection, *lines), since=since, reason=reason)
        if note:
            kept = replace(diagnosis, evidence=(*diagnosis.evidence, f"a person's note before it: {note}"), action="")
            yield replace(kept, fix=f"{fault.fix.partition('; then ')[0]}; then `shoal node resume {node.name}`")
        else:
            yield replace(diagnosis, blocked=_obstacle(view, node, fault, report, host_diagnoses))


def _obstacle(
    view: ClusterView, node: NodeState, fault: Fault, report: HostReport, host_diagnoses: Sequence[Diagnosis]
) -> str:
    """Why the node cannot be resumed yet: something on the host is still wrong, or processes are left."""
    if not fault.action:
        return ""
    other = next(
        (diagnosis for diagnosis in host_diagnoses if diagnosis.host == node.name and diagnosis.level == "error"), None
    )
    if other is not None:
        return f"first: {other.what} ({other.id})"
    if fault.action == RESUME and node.name not in view.reports:
        return "its host was not checked"
    busy = any(node.name in job.node_names for job in view.jobs)
    if fault.id in ("kill-task-failed", "duplicate-job") and report.steps and not busy:
        return f"still there: {', '.join(report.steps)}"
    return ""


def earlier_note(view: ClusterView, node: str) -> str:
    """A person's reason that slurmd or slurmstepd has replaced by its own since the node was last resumed."""
    controller = view.reports.get(view.controller, HostReport())
    note = ""
    for line in controller.logs:
        match = CHANGE_OF_NODE.search(line.text)
        if match and match[1] == node:
            if match[2] == "state" and match[3].startswith(("IDLE", "ALLOC", "MIXED")):
                note = ""
            elif match[2] == "reason" and is_written_by_person(match[3].partition(" [")[0]):
                note = match[3]
    return note


def _is_rejected(node: NodeState) -> bool:
    """Whether Slurm rejects its registration for another reason than it shows."""
    return "INVALID_REG" in node.state and not any(fault.action == REGISTER for fault in faults_in(node.reason))


def _rejected_registration(view: ClusterView, node: str) -> tuple[str, ...]:
    """The line in slurmctld's log about the last registration of the node that it rejected."""
    lines = view.reports.get(view.controller, HostReport()).logs
    return tuple(line.text for line in lines if f"Setting node {node} state to INVAL with reason:" in line.text)[-1:]


def _job_faults(job: JobState) -> Iterator[Diagnosis]:
    for fault in JOB_FAULTS:
        if job.state == "PENDING" and fault.matches(job.reason):
            evidence = (f"job {job.id} of {job.user}: {job.reason}",)
            yield replace(_diagnosis(fault.id, "", evidence=evidence, reason=job.reason), job=job.id)


def _is_out_of_service(node: NodeState) -> bool:
    return bool((NOT_READY | {"DRAIN", "FAIL"}) & set(node.state)) or LEAVING_REASON in node.reason


def _nodes_in(reason: str) -> list[str]:
    """The nodes that a reason of a job names: `ReqNodeNotAvail, UnavailableNodes:n[1-2]`."""
    names = re.search(r"UnavailableNodes:([^\s()]+)", reason)
    try:
        return expand(names[1]) if names else []
    except ValueError:
        return []


def _diagnosis(
    id: str, host: str, what: str = "", evidence: tuple[str, ...] = (), since: str = "", reason: str = ""
) -> Diagnosis:
    fault = FAULTS[id]
    return Diagnosis(
        id=id,
        level=fault.level,
        host=host,
        what=what or fault.what,
        since=since,
        reason=reason,
        evidence=evidence,
        cause=fault.cause,
        fix=fault.fix.replace("{host}", host),
        cost=fault.cost,
        action=fault.action,
        explicit=fault.explicit,
    )
