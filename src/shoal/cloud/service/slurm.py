"""The interface to slurmctld: what it wants of nodes that come and go, and the changes that the service makes.

Slurm decides what is wanted: a node that it powers up must get a machine, one that it powers down must lose it. Reasons
that the service sets on nodes begin with a mark and say when the node may be retried, so that a restarted service finds
its state in Slurm:

    shoal: lambda us-west-1 is out of gpu_8x_h100 [again 2026-11-15T14:20:00Z]
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
from typing import Protocol

from shoal.contract import WARNING_SIGNAL, WARNINGS_VARIABLE
from shoal.errors import HostError, SlurmError
from shoal.hostlist import HostlistError, compress, expand
from shoal.hosts.api import Host
from shoal.jobs.record import JobComment
from shoal.slurm.state import ACTIVE_STATES, JOB_RECORD, NODES_COMMAND, NodeState, parse_nodes

MARK = "shoal: "
RESUME_TIMEOUT = "ResumeTimeout reached"
"""Slurm's reason for a node that did not register in time."""
SLURM_TIMEOUT_S = 60.0
"""As long as Slurm's own MessageTimeout."""
MAX_NODES_PER_COMMAND = 500
"""The most nodes in one scontrol: command lines are limited."""
_REASON_LENGTH = 400

_FIELD = "\x1f"
JOBS_COMMAND = ("squeue", "-h", "-o", JOB_RECORD + _FIELD.join(("%i", "%T", "%u", "%N", "%k")))
"""The comment comes last, as its owner can put anything in it."""

_RETRY_TIME = re.compile(r"\s\[again ([0-9TZ:-]+)\]")


@dataclass(frozen=True)
class QueuedJob:
    """A job in the queue."""

    id: str
    """`17`, or `17_3` for a task of an array."""
    state: str
    nodes: tuple[str, ...] = ()
    """Empty while it is pending."""
    user: str = ""
    saves: bool = False
    """Started by `shoal run`: it handles the warning signal and saves its work."""

    @property
    def active(self) -> bool:
        """Whether it holds nodes and has work to lose."""
        return self.state in ACTIVE_STATES


class Slurm(Protocol):
    """Queries and changes of slurmctld. Every method raises SlurmError if it does not answer or rejects the request."""

    async def nodes(self) -> list[NodeState]:
        """All nodes, including those without a machine."""

    async def jobs(self) -> list[QueuedJob]:
        """All jobs in the queue."""

    async def down(self, nodes: Sequence[str], reason: str) -> None:
        """Set nodes down: their jobs are requeued."""

    async def drain(self, nodes: Sequence[str], reason: str) -> None:
        """Drain nodes: no new jobs; running ones continue."""

    async def power_down(self, nodes: Sequence[str]) -> None:
        """Power nodes down, whatever they run."""

    async def resume(self, nodes: Sequence[str]) -> None:
        """Resume nodes that are down or drained."""

    async def keep_features(self, nodes: Sequence[str], features: Sequence[str]) -> None:
        """Leave nodes these of the features that slurm.conf declares. Slurm has all again when it reads that anew."""

    async def requeue(self, job: str) -> None:
        """Requeue a running job."""

    async def warn(self, job: str) -> None:
        """Send a job's ranks the signal to save and stop."""

    async def comment(self, job: str, text: str) -> None:
        """Set a job's admin comment."""


def wants_machine(node: NodeState) -> bool:
    """Whether Slurm is powering the node up."""
    return "POWERING_UP" in node.state and not is_down(node)


def is_powering_down(node: NodeState) -> bool:
    """Whether Slurm has powered the node down, or is about to."""
    return "POWERING_UP" not in node.state and bool({"POWERED_DOWN", "POWERING_DOWN"} & set(node.state))


def lacks_features(node: NodeState) -> bool:
    """Whether a node without a machine still lacks features that its last machine did not have."""
    sleeps = is_powering_down(node) and "POWERED_DOWN" in node.state
    return sleeps and bool(set(node.declared_features) - set(node.features))


def is_down(node: NodeState) -> bool:
    return "DOWN" in node.state


def is_registered(node: NodeState) -> bool:
    """Whether the node has registered, so that Slurm relies on its machine."""
    return not ({"DOWN", "POWERING_UP", "POWERED_DOWN", "POWERING_DOWN", "FUTURE", "UNKNOWN"} & set(node.state))


def set_by_us(node: NodeState) -> bool:
    """Whether the service set the node's reason."""
    return node.reason.startswith(MARK)


def set_by_slurm(node: NodeState) -> bool:
    """Whether slurmctld set the node down; a node that a person set down is left alone."""
    return not node.reason or node.reason_by == "slurm" or node.reason in (RESUME_TIMEOUT, "Not responding")


def format_reason(text: str, again: float = 0.0) -> str:
    """A reason for a node, with the time of the next attempt."""
    plain = " ".join(re.sub(r"[^ -~]", " ", text).split())[:_REASON_LENGTH]
    when = datetime.fromtimestamp(again, UTC).strftime("%Y-%m-%dT%H:%M:%SZ")
    return f"{MARK}{plain} [again {when}]"


def reason_text(node: NodeState) -> str:
    """A reason of the service without its marks."""
    return _RETRY_TIME.sub("", node.reason.removeprefix(MARK))


def refused_by_budget(node: NodeState) -> bool:
    """Whether the service set the node down because a budget did not allow its machine."""
    return is_down(node) and set_by_us(node) and "budget" in node.reason


def retry_time(node: NodeState) -> float:
    """When a node that the service set down may be retried."""
    match = _RETRY_TIME.search(f" {node.reason}")
    try:
        return datetime.strptime(match[1], "%Y-%m-%dT%H:%M:%SZ").replace(tzinfo=UTC).timestamp() if match else 0.0
    except ValueError:
        return 0.0


class LiveSlurm:
    """The slurmctld of this controller, by its command-line tools."""

    def __init__(self, host: Host) -> None:
        self._host = host

    async def nodes(self) -> list[NodeState]:
        return parse_nodes(await run_slurm(self._host, NODES_COMMAND))

    async def jobs(self) -> list[QueuedJob]:
        return parse_jobs(await run_slurm(self._host, JOBS_COMMAND))

    async def down(self, nodes: Sequence[str], reason: str) -> None:
        await self._update(nodes, "state=down", f"reason={reason}")

    async def drain(self, nodes: Sequence[str], reason: str) -> None:
        await self._update(nodes, "state=drain", f"reason={reason}")

    async def power_down(self, nodes: Sequence[str]) -> None:
        await self._update(nodes, "state=power_down_force")

    async def resume(self, nodes: Sequence[str]) -> None:
        await self._update(nodes, "state=resume")

    async def keep_features(self, nodes: Sequence[str], features: Sequence[str]) -> None:
        await self._update(nodes, f"activefeatures={','.join(features)}")

    async def requeue(self, job: str) -> None:
        await run_slurm(self._host, ("scontrol", "requeue", job))

    async def warn(self, job: str) -> None:
        # The batch script passes it to those processes of the ranks that handle it. Any other would end.
        script = await run_slurm(self._host, ("scontrol", "write", "batch_script", job, "-"))
        batch = ("--batch",) if WARNINGS_VARIABLE in script else ()
        await run_slurm(self._host, ("scancel", *batch, f"--signal={WARNING_SIGNAL}", job))

    async def comment(self, job: str, text: str) -> None:
        await run_slurm(self._host, ("scontrol", "update", f"jobid={job}", f"admincomment={text}"))

    async def _update(self, nodes: Sequence[str], *changes: str) -> None:
        for start in range(0, len(nodes), MAX_NODES_PER_COMMAND):
            names = compress(nodes[start : start + MAX_NODES_PER_COMMAND])
            await run_slurm(self._host, ("scontrol", "update", f"nodename={names}", *changes))


async def run_slurm(host: Host, argv: Sequence[str]) -> str:
    """The output of one of Slurm's commands. Raises SlurmError."""
    try:
        done = await host.run(argv, timeout=SLURM_TIMEOUT_S)
    except HostError as error:
        raise SlurmError(error.message, hint=error.hint) from error
    if done.status != 0:
        message = " ".join((done.error_text or done.text).split())
        raise SlurmError(f"{argv[0]} {argv[1]}: {message or f'exit status {done.status}'}")
    return done.text


def parse_jobs(text: str) -> list[QueuedJob]:
    """The answer to JOBS_COMMAND."""
    jobs: list[QueuedJob] = []
    for record in text.split(JOB_RECORD)[1:]:
        fields = record.removesuffix("\n").split(_FIELD, 4)
        if len(fields) != 5:
            continue  # a comment with our separator in it
        job_id, state, user, nodes, comment = fields
        try:
            names = tuple(expand(nodes))
        except HostlistError:
            continue  # as above
        jobs.append(QueuedJob(job_id, state, names, user, JobComment.parse(comment) is not None))
    return jobs
