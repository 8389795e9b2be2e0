"""What Slurm wants of nodes that come and go, and the few things we tell it: the seam to slurmctld on the controller.

Slurm is what is wanted: a node that it powers up must get a machine, one that it powers down must lose it. Reasons that
we give to a node begin with a mark of ours and say when the node may be tried again, so that a service that was killed
finds in Slurm where it was:

    shoal: lambda us-west-1 is out of gpu_8x_h100 [again 2026-11-15T14:20:00Z]
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
from typing import Protocol

from shoal.errors import HostError, SlurmError
from shoal.hostlist import HostlistError, compress, expand
from shoal.hosts.api import Host, Result
from shoal.jobs.model import Note
from shoal.slurm.state import ACTIVE_STATES, NODES_COMMAND, NodeState, parse_nodes
from shoal.train.contract import WARNING_SIGNAL

MARK = "shoal: "
RESUME_TIMEOUT = "ResumeTimeout reached"
"""What Slurm says of a node that it has given up on."""
PATIENCE = 60.0
"""Seconds for slurmctld to answer: as long as its own MessageTimeout."""
BATCH = 500
"""So many nodes or so in one scontrol: a command line is not endless."""
_REASON_LENGTH = 400

_RECORD, _FIELD = "\x1e", "\x1f"
JOBS_COMMAND = ("squeue", "-h", "-o", _RECORD + _FIELD.join(("%i", "%T", "%u", "%N", "%k")))
"""The comment, which its owner may choose, comes last."""

_AGAIN = re.compile(r"\s\[again ([0-9TZ:-]+)\]")


@dataclass(frozen=True)
class Job:
    """A job in the queue."""

    id: str
    """`17`, or `17_3` for a task of an array."""
    state: str
    nodes: tuple[str, ...] = ()
    """Empty while it waits."""
    user: str = ""
    saves: bool = False
    """It was started by `shoal run`, so it takes the warning signal and saves its work."""

    @property
    def active(self) -> bool:
        """Whether it holds its nodes, and has work to lose."""
        return self.state in ACTIVE_STATES


class Slurm(Protocol):
    """What we ask slurmctld and tell it. Every method raises SlurmError when it does not answer or refuses."""

    async def nodes(self) -> list[NodeState]:
        """All nodes, those that have no machine included."""

    async def jobs(self) -> list[Job]:
        """All jobs in the queue."""

    async def down(self, nodes: Sequence[str], reason: str) -> None:
        """Take nodes out at once: their jobs go back into the queue."""

    async def drain(self, nodes: Sequence[str], reason: str) -> None:
        """Give nodes no more jobs; those that run go on."""

    async def power_down(self, nodes: Sequence[str]) -> None:
        """Send nodes through power saving, whatever they do: a little later they are idle and without a machine."""

    async def resume(self, nodes: Sequence[str]) -> None:
        """Nodes that are down or drained may be used again."""

    async def requeue(self, job: str) -> None:
        """Put a running job back into the queue."""

    async def warn(self, job: str) -> None:
        """Send a job's ranks the signal that asks them to save and stop."""

    async def comment(self, job: str, text: str) -> None:
        """Leave word on a job, where `squeue -O admin_comment` and `scontrol show job` show it."""


def wants_machine(node: NodeState) -> bool:
    """Whether Slurm is waking the node and waits for it."""
    return "POWERING_UP" in node.state and not is_down(node) and not leaving(node)


def leaving(node: NodeState) -> bool:
    """Whether Slurm has put the node to sleep, or is about to."""
    return "POWERING_UP" not in node.state and bool({"POWERED_DOWN", "POWERING_DOWN"} & set(node.state))


def is_down(node: NodeState) -> bool:
    return "DOWN" in node.state


def in_use(node: NodeState) -> bool:
    """Whether Slurm counts on a machine behind the node: it has registered."""
    return not ({"DOWN", "POWERING_UP", "POWERED_DOWN", "POWERING_DOWN", "FUTURE", "UNKNOWN"} & set(node.state))


def ours(node: NodeState) -> bool:
    """Whether the reason on the node is one that we gave."""
    return node.reason.startswith(MARK)


def by_slurm(node: NodeState) -> bool:
    """Whether slurmctld itself took the node out: what a person took out is left alone."""
    return not node.reason or node.reason_by == "slurm" or node.reason in (RESUME_TIMEOUT, "Not responding")


def reason(text: str, again: float = 0.0) -> str:
    """A reason for a node: why, and from when on it may be tried again."""
    plain = " ".join(re.sub(r"[^ -~]", " ", text).split())[:_REASON_LENGTH]
    when = datetime.fromtimestamp(again, UTC).strftime("%Y-%m-%dT%H:%M:%SZ")
    return f"{MARK}{plain} [again {when}]"


def text(node: NodeState) -> str:
    """What a reason of ours says, without our marks."""
    return _AGAIN.sub("", node.reason.removeprefix(MARK))


def again(node: NodeState) -> float:
    """From when on a node that we took out may be tried again."""
    said = _AGAIN.search(f" {node.reason}")
    try:
        return datetime.strptime(said[1], "%Y-%m-%dT%H:%M:%SZ").replace(tzinfo=UTC).timestamp() if said else 0.0
    except ValueError:
        return 0.0


class LiveSlurm:
    """The slurmctld of this controller, by its own commands."""

    def __init__(self, host: Host) -> None:
        self._host = host

    async def nodes(self) -> list[NodeState]:
        return parse_nodes((await self._ask(NODES_COMMAND)).text)

    async def jobs(self) -> list[Job]:
        return parse_jobs((await self._ask(JOBS_COMMAND)).text)

    async def down(self, nodes: Sequence[str], reason: str) -> None:
        await self._update(nodes, "state=down", f"reason={reason}")

    async def drain(self, nodes: Sequence[str], reason: str) -> None:
        await self._update(nodes, "state=drain", f"reason={reason}")

    async def power_down(self, nodes: Sequence[str]) -> None:
        await self._update(nodes, "state=power_down_force")

    async def resume(self, nodes: Sequence[str]) -> None:
        await self._update(nodes, "state=resume")

    async def requeue(self, job: str) -> None:
        await self._ask(("scontrol", "requeue", job))

    async def warn(self, job: str) -> None:
        # Without --batch the ranks get it, and not the script around them: as by --signal.
        await self._ask(("scancel", f"--signal={WARNING_SIGNAL}", job))

    async def comment(self, job: str, text: str) -> None:
        await self._ask(("scontrol", "update", f"jobid={job}", f"admincomment={text}"))

    async def _update(self, nodes: Sequence[str], *changes: str) -> None:
        for some in _portions(nodes):
            await self._ask(("scontrol", "update", f"nodename={compress(some)}", *changes))

    async def _ask(self, argv: Sequence[str]) -> Result:
        try:
            done = await self._host.run(argv, timeout=PATIENCE)
        except HostError as error:
            raise SlurmError(error.message, hint=error.hint) from error
        if done.status != 0:
            said = " ".join((done.error_text or done.text).split())
            raise SlurmError(f"{argv[0]} {argv[1]}: {said or f'exit status {done.status}'}")
        return done


def parse_jobs(text: str) -> list[Job]:
    """The answer to JOBS_COMMAND."""
    jobs: list[Job] = []
    for record in text.split(_RECORD)[1:]:
        fields = record.removesuffix("\n").split(_FIELD, 4)
        if len(fields) != 5:
            continue  # the rest of a comment that has our separator in it
        job_id, state, user, nodes, comment = fields
        try:
            names = tuple(expand(nodes))
        except HostlistError:
            continue  # as above
        jobs.append(Job(job_id, state, names, user, Note.parse(comment) is not None))
    return jobs


def _portions(nodes: Iterable[str]) -> list[list[str]]:
    names = list(nodes)
    return [names[start : start + BATCH] for start in range(0, len(names), BATCH)]
