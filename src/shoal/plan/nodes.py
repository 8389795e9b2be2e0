"""The state of Slurm's nodes, read and changed with commands on the controller."""

from __future__ import annotations

from collections.abc import Sequence

from shoal.errors import SlurmError
from shoal.hostlist import compress
from shoal.hosts.api import Host
from shoal.slurm import state

LEAVING_REASON = "shoal: leaving the cluster"
"""The drain reason of nodes that the spec no longer names. Nodes drained for another reason are left alone."""

NOT_READY = frozenset({"DOWN", "UNKNOWN", "NOT_RESPONDING", "FUTURE", "INVALID_REG", "INVAL"})

AWAITED = "idle+not_responding"
"""The state of a node that was resumed, or whose slurmctld was started, until it answers. A silent one becomes DOWN."""

RESUMABLE = NOT_READY | {"DRAIN", "FAIL"}
"""States that `resume` ends."""

UNSCHEDULED = RESUMABLE | {"POWERING_DOWN", "POWERED_DOWN"}
"""States in which a node takes no job at once: a rented one gets a machine first."""


async def drain_nodes(host: Host, names: Sequence[str], reason: str = LEAVING_REASON) -> None:
    """Take nodes out of scheduling; running jobs go on."""
    await _update(host, names, "state=drain", f"reason={reason}")


async def resume_nodes(host: Host, names: Sequence[str]) -> list[str]:
    """Put nodes back into scheduling. Returns the names of those that were out of it: Slurm rejects the others."""
    result = await host.run(state.NODES_COMMAND, timeout=30)
    scheduled = {node.name for node in state.parse_nodes(result.text) if not RESUMABLE & set(node.state)}
    names_to_resume = [name for name in names if name not in scheduled]
    await _update(host, names_to_resume, "state=resume")
    return names_to_resume


async def resume_not_responding(host: Host, names: Sequence[str]) -> None:
    """Resume nodes that Slurm marked DOWN for silence: it would ping them only after half an hour."""
    result = await host.run(state.NODES_COMMAND, timeout=30)
    silent_names = [
        node.name
        for node in state.parse_nodes(result.text)
        if set(node.state) == {"DOWN", "NOT_RESPONDING"} and node.reason.startswith(state.NOT_RESPONDING_REASON)
    ]
    await _update(host, [name for name in names if name in silent_names], "state=resume")


async def jobs_on(host: Host, node: str) -> list[str]:
    """The ids of the jobs that hold a node, completing ones included."""
    return [
        job.id for job in await _jobs(host, "--nodelist", node) if job.state in state.ACTIVE_STATES | {"COMPLETING"}
    ]


async def active_jobs(host: Host) -> list[str]:
    """The ids of the jobs that would lose their work if the cluster stopped now."""
    return [job.id for job in await _jobs(host) if job.state in state.ACTIVE_STATES]


async def unready_nodes(host: Host, names: Sequence[str]) -> dict[str, str]:
    """Which of these nodes cannot take a job, and why. A drained node counts as ready: an administrator drained it."""
    result = await host.run(state.NODES_COMMAND, timeout=30)
    if result.status != 0:
        raise SlurmError(
            f"slurmctld on {host.name} does not answer: {result.error_text.strip()}",
            hint=f"look at `shoal ssh {host.name} journalctl -u slurmctld`",
        )
    nodes = {node.name: node for node in state.parse_nodes(result.text)}
    reasons: dict[str, str] = {}
    for name in names:
        node = nodes.get(name)
        if node is None:
            reasons[name] = "not in Slurm's configuration"
        elif NOT_READY & set(node.state) or LEAVING_REASON in node.reason:
            reasons[name] = node.reason or "+".join(node.state).lower()
    return reasons


async def _jobs(host: Host, *options: str) -> list[state.JobState]:
    result = await host.run((*state.JOBS_COMMAND, *options), timeout=30)
    if result.status != 0:
        raise SlurmError(
            f"squeue on {host.name} failed: {result.error_text.strip()}",
            hint=f"look at `shoal ssh {host.name} journalctl -u slurmctld`",
        )
    return state.parse_jobs(result.text)


async def _update(host: Host, names: Sequence[str], *settings: str) -> None:
    if not names:
        return
    result = await host.run(("scontrol", "update", f"nodename={compress(names)}", *settings), timeout=30)
    if result.status != 0:
        output = result.error_text.strip() or result.text.strip()
        raise SlurmError(
            f"{host.name}: Slurm rejected `scontrol update nodename={compress(names)} {settings[0]}`: {output}",
            hint="`shoal status` shows the nodes that Slurm knows; `shoal up` repairs the rest",
        )
