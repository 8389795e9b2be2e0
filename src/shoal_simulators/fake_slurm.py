"""A clock, a Slurm and a joiner in memory, for tests and benches of the rental service.

`FakeSlurm` plays power saving as slurmctld 22.05 does it; `tick` lets it do what is due. With a path it keeps its state
there, as slurmctld does, and another process goes on from it.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path

from shoal.cloud.providers.api import RentedInstance
from shoal.cloud.service.scheduling import Clock
from shoal.cloud.service.slurm import QueuedJob
from shoal.cloud.service.slurm_requests import PowerRequest
from shoal.errors import SlurmError
from shoal.local_files import write_atomic
from shoal.slurm.state import ACTIVE_STATES, NodeState


class FakeClock:
    """A clock that tests advance."""

    def __init__(self, now: float = 1_800_000_000.0) -> None:
        self._now = now

    def now(self) -> float:
        return self._now

    def advance(self, seconds: float) -> None:
        self._now += seconds


@dataclass
class FakeJob:
    """A job, and what became of it."""

    id: str
    count: int
    seconds: float
    state: str = "PENDING"
    nodes: list[str] = field(default_factory=list)
    begin: float = 0.0
    started: float = 0.0
    restarts: int = 0
    comment: str = ""
    comments: list[str] = field(default_factory=list)
    warned: int = 0
    """How often it got the warning signal."""
    saves: bool = True
    among: list[str] = field(default_factory=list)
    """The nodes it may run on; empty for all."""


@dataclass
class FakeNode:
    """A node, and since when it is as it is."""

    name: str
    base: str = "IDLE"
    flags: list[str] = field(default_factory=lambda: ["CLOUD", "POWERED_DOWN"])
    reason: str = ""
    reason_by: str = ""
    since: float = 0.0
    reasons: list[str] = field(default_factory=list)
    """Every reason it was ever given."""
    features: list[str] = field(default_factory=list)
    declared_features: list[str] = field(default_factory=list)


class FakeSlurm:
    """slurmctld without a machine."""

    resume_timeout = 1800.0
    suspend_timeout = 30.0
    requeue_delay = 120.0
    idle_s = 600.0

    def __init__(self, clock: Clock, nodes: Sequence[str] = (), path: Path | None = None) -> None:
        self._clock = clock
        self._path = path
        self.silent = False
        """slurmctld does not answer."""
        self.requests: list[PowerRequest] = []
        """What Slurm's programs were started for."""
        self.node_by_name = {name: FakeNode(name) for name in nodes}
        self.job_by_id: dict[str, FakeJob] = {}
        if path and path.exists():
            stored = json.loads(path.read_text())
            self.node_by_name = {node["name"]: FakeNode(**node) for node in stored["nodes"]}
            self.job_by_id = {job["id"]: FakeJob(**job) for job in stored["jobs"]}

    # ---- called by tests

    def submit(self, job: str, count: int, seconds: float = 60.0, **more: object) -> FakeJob:
        """A job for so many nodes, which runs so long."""
        made = FakeJob(job, count, seconds, **more)  # type: ignore[arg-type]
        self.job_by_id[job] = made
        self._save()
        return made

    def cancel(self, job: str) -> None:
        self._end(self.job_by_id[job], "CANCELLED")
        self._save()

    def register(self, node: str) -> None:
        """Its slurmd has come up."""
        starting = self.node_by_name[node]
        if "POWERING_UP" in starting.flags:
            starting.flags.remove("POWERING_UP")
            starting.since = self._clock.now()
        self._save()

    def forget_registration(self, node: str) -> None:
        """slurmctld's machine lost power before it wrote down that the node is up."""
        self.node_by_name[node].flags.append("POWERING_UP")
        self._save()

    def lose(self, node: str) -> None:
        """Its slurmd has not answered for SlurmdTimeout."""
        self._down(self.node_by_name[node], "Not responding", "slurm")
        self._save()

    def tick(self) -> None:
        """What slurmctld does by itself, up to now."""
        now = self._clock.now()
        for node in self.node_by_name.values():
            self._node_tick(node, now)
        for job in self.job_by_id.values():
            self._job_tick(job, now)
        self._save()

    def state(self, node: str) -> set[str]:
        return {self.node_by_name[node].base, *self.node_by_name[node].flags}

    @property
    def settled(self) -> bool:
        """Whether every job has ended and every node sleeps, ready to be woken."""
        ended = all(job.state in ("COMPLETED", "CANCELLED") for job in self.job_by_id.values())
        return ended and all(self.state(node) == {"IDLE", "CLOUD", "POWERED_DOWN"} for node in self.node_by_name)

    # ---- called by the service

    async def nodes(self) -> list[NodeState]:
        self._answer()
        return [
            NodeState(
                node.name,
                (node.base, *node.flags),
                node.reason,
                node.reason_by,
                features=tuple(node.features),
                declared_features=tuple(node.declared_features),
            )
            for node in self.node_by_name.values()
        ]

    async def jobs(self) -> list[QueuedJob]:
        self._answer()
        queued = [job for job in self.job_by_id.values() if job.state == "PENDING" or job.state in ACTIVE_STATES]
        return [QueuedJob(job.id, job.state, tuple(job.nodes), "ada", job.saves) for job in queued]

    async def down(self, nodes: Sequence[str], reason: str) -> None:
        self._answer()
        for node in nodes:
            self._down(self.node_by_name[node], reason, "root")
        self._save()

    async def drain(self, nodes: Sequence[str], reason: str) -> None:
        self._answer()
        for node in map(self.node_by_name.__getitem__, nodes):
            node.flags += [] if "DRAIN" in node.flags else ["DRAIN"]
            node.reason, node.reason_by = reason, "root"
            node.reasons.append(reason)
        self._save()

    async def power_down(self, nodes: Sequence[str]) -> None:
        self._answer()
        for node in map(self.node_by_name.__getitem__, nodes):
            self._requeue_jobs_of(node.name)
            self._suspend(node)
        self._save()

    async def resume(self, nodes: Sequence[str]) -> None:
        self._answer()
        for node in map(self.node_by_name.__getitem__, nodes):
            if node.base != "DOWN" and not {"DRAIN", "POWERING_DOWN"} & set(node.flags):
                raise SlurmError("scontrol update: slurm_update error: Invalid node state specified")
            node.base, node.reason, node.reason_by = "IDLE", "", ""
            node.flags = [flag for flag in node.flags if flag not in ("DRAIN", "POWERING_DOWN")]
        self._save()

    async def keep_features(self, nodes: Sequence[str], features: Sequence[str]) -> None:
        self._answer()
        for node in map(self.node_by_name.__getitem__, nodes):
            if not {*features} <= {*node.declared_features}:
                raise SlurmError("scontrol update: slurm_update error: Active features not a subset of available")
            node.features = [*features]
        self._save()

    async def requeue(self, job: str) -> None:
        self._answer()
        if self.job_by_id[job].state not in ACTIVE_STATES:
            raise SlurmError("scontrol requeue: Job is pending execution")
        self._requeue(self.job_by_id[job])
        self._save()

    async def warn(self, job: str) -> None:
        self._answer()
        self.job_by_id[job].warned += 1
        self._save()

    async def comment(self, job: str, text: str) -> None:
        self._answer()
        if job not in self.job_by_id:
            raise SlurmError("scontrol update: slurm_update error: Invalid job id specified")
        self.job_by_id[job].comment = text
        self.job_by_id[job].comments.append(text)
        self._save()

    # ---- internals

    def _answer(self) -> None:
        if self.silent:
            raise SlurmError("scontrol show: slurm_load_node error: Unable to contact slurm controller")

    def _node_tick(self, node: FakeNode, now: float) -> None:
        if "POWERING_UP" in node.flags and now - node.since >= self.resume_timeout:
            node.flags = ["CLOUD", "POWERED_DOWN"]
            self._down(node, "ResumeTimeout reached", "slurm")
            self.requests.append(PowerRequest("resume-fail", (node.name,)))
        elif "POWERING_DOWN" in node.flags and now - node.since >= self.suspend_timeout:
            node.base, node.reason, node.reason_by = "IDLE", "", ""  # idle_on_node_suspend
            node.flags = ["CLOUD", "POWERED_DOWN"]
        elif self.state(node.name) == {"IDLE", "CLOUD"} and now - node.since >= self.idle_s:
            self._suspend(node)

    def _job_tick(self, job: FakeJob, now: float) -> None:
        if job.state == "PENDING" and now >= job.begin:
            self._allocate(job, now)
        if job.state == "CONFIGURING" and not any("POWERING_UP" in self.state(node) for node in job.nodes):
            job.state, job.started = "RUNNING", now
        elif job.state == "RUNNING" and now - job.started >= job.seconds:
            self._end(job, "COMPLETED")

    def _allocate(self, job: FakeJob, now: float) -> None:
        able = [
            node
            for node in self.node_by_name.values()
            if node.base == "IDLE"
            and (not job.among or node.name in job.among)
            and not {"POWERING_DOWN", "POWERING_UP", "DRAIN"} & set(node.flags)
        ]
        able.sort(key=lambda node: "POWERED_DOWN" in node.flags)
        if len(able) < job.count:
            return
        chosen = able[: job.count]
        asleep = [node for node in chosen if "POWERED_DOWN" in node.flags]
        for node in chosen:
            node.base = "ALLOCATED"
        for node in asleep:
            node.flags, node.since = ["CLOUD", "POWERING_UP"], now
        job.nodes = [node.name for node in chosen]
        job.state = "CONFIGURING"
        if asleep:
            names = tuple(node.name for node in asleep)
            self.requests.append(PowerRequest("resume", names, ((job.id, tuple(job.nodes)),)))

    def _down(self, node: FakeNode, reason: str, by: str) -> None:
        node.base, node.reason, node.reason_by = "DOWN", reason, by
        node.reasons.append(reason)
        self._requeue_jobs_of(node.name)
        node.base = "DOWN"

    def _suspend(self, node: FakeNode) -> None:
        node.base = "IDLE"
        node.flags = ["CLOUD", "POWERING_DOWN"]
        node.since = self._clock.now()
        self.requests.append(PowerRequest("suspend", (node.name,)))

    def _requeue_jobs_of(self, node: str) -> None:
        for job in self.job_by_id.values():
            if node in job.nodes and job.state in ACTIVE_STATES:
                self._requeue(job)

    def _requeue(self, job: FakeJob) -> None:
        self._end(job, "PENDING")
        job.restarts += 1
        job.begin = self._clock.now() + self.requeue_delay

    def _end(self, job: FakeJob, state: str) -> None:
        for node in map(self.node_by_name.__getitem__, job.nodes):
            if node.base == "ALLOCATED":
                node.base = "IDLE"
                if "POWERING_UP" not in node.flags:
                    node.since = self._clock.now()
        job.nodes, job.state = [], state

    def _save(self) -> None:
        if self._path is None:
            return
        state = {
            "nodes": [asdict(node) for node in self.node_by_name.values()],
            "jobs": [asdict(job) for job in self.job_by_id.values()],
        }
        write_atomic(self._path, json.dumps(state))


class FakeJoiner:
    """Makes every machine a working node at once, except where `judge` returns an error."""

    def __init__(self, slurm: FakeSlurm, judge: Callable[[RentedInstance], str] = lambda machine: "") -> None:
        self._slurm = slurm
        self.judge = judge
        self.joined: list[str] = []
        """The ids of machines that became nodes, in their order."""
        self.parted: list[str] = []
        """The ids of machines that took their leave."""

    async def join(self, nodes: Mapping[str, RentedInstance]) -> Mapping[str, str]:
        errors: dict[str, str] = {}
        for node, machine in nodes.items():
            errors[node] = self.judge(machine)
            if not errors[node]:
                self.joined.append(machine.id)
                self._slurm.register(node)
        return errors

    async def register(self, nodes: Mapping[str, RentedInstance]) -> None:
        for node in nodes:
            self._slurm.register(node)

    async def leave(self, nodes: Mapping[str, RentedInstance]) -> None:
        self.parted += [machine.id for machine in nodes.values()]
