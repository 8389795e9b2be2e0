"""Stop jobs in every way that Slurm has, on a real cluster, and record the outcome."""

import asyncio
import json
import shutil
from collections import Counter
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

from tests.e2e.cluster import Cluster
from tests.e2e.torch_env import PYTHONPATH, give_torch

from shoal.jobs.model import LAUNCHER_NAMES, job_from_options
from shoal.local_files import cache_dir
from shoal.sandbox.layout import Layout
from shoal.verbs.context import Context, open_context
from shoal.verbs.run import run

SIGNALS = ("USR1", "USR2", "TERM")
HOST_LOSSES = ("node killed", "node returns")
"""Without a warning: its host loses power, and stays away until Slurm has given it up, or is back before."""
CAUSES = (*SIGNALS, "time limit", "preemption", *HOST_LOSSES)
WORKERS = (0, 2)
JOBS = "/shared/jobs"
SAVE_EVERY = 5
STARTING = 4
"""Jobs that start at the same time: importing torch keeps a core busy for seconds."""


@dataclass(frozen=True)
class Cell:
    """One way to start a job, one way to stop it."""

    launcher: str
    cause: str
    workers: int

    @property
    def ranks_per_node(self) -> int:
        """Two where one process a node starts the ranks, and has to pass the signal on to all of them."""
        return 2 if self.launcher in ("torchrun", "spawn") else 1

    @property
    def world_size(self) -> int:
        return 1 if self.launcher == "python" else 2 * self.ranks_per_node

    @property
    def at_work(self) -> int:
        """The step at which it is stopped: before its first checkpoint, or after it where there is no time to save."""
        return SAVE_EVERY + 1 if self.cause in HOST_LOSSES else 2

    def __str__(self) -> str:
        return f"{self.launcher}, {self.cause}, {self.workers} workers"


@dataclass
class Stopped:
    """A job of the matrix."""

    cell: Cell
    id: str
    directory: Path
    checkpoint: int | None = None
    """The step of the checkpoint that its second turn began with."""
    reason: str = ""
    """Why that checkpoint was written."""

    def lines(self) -> list[dict[str, Any]]:
        """What rank 0 has told, over all turns."""
        entries: list[dict[str, Any]] = []
        for log in sorted(self.directory.glob("rank-0.*.log"), key=lambda path: int(path.suffixes[-2][1:])):
            whole = log.read_text(errors="replace").split("\n")[:-1]  # the last line may be just being written
            texts = [line.partition(" ")[2] for line in whole]
            entries += [json.loads(text) for text in texts if text.startswith('{"turn"')]
        return entries

    def step(self) -> int:
        """The last step it has done, -1 before the first."""
        return max((line["step"] for line in self.lines() if "step" in line), default=-1)

    def turns(self) -> int:
        return len(list(self.directory.glob("rank-0.*.log")))

    def starting(self) -> bool:
        """Whether it has not done a step in this turn."""
        turns = self.turns()
        return not turns or max((line["turn"] for line in self.lines()), default=-1) < turns - 1

    def newest(self) -> tuple[int, str] | None:
        """Step and reason of the newest committed checkpoint."""
        from shoal.train.checkpoint import layout  # imports torch: every process that collects tests would wait for it

        checkpoints = layout.committed(self.directory / "checkpoints")
        return (layout.step_of(checkpoints[0]), layout.read_manifest(checkpoints[0]).reason) if checkpoints else None


@dataclass(frozen=True)
class Outcome:
    """What came of a cell."""

    cell: Cell
    stopped_at: int
    """Steps done in the first turn."""
    resumed_at: int
    reason: str
    lost: int
    """Steps that were done again."""
    turns: int
    digest: str
    losses: tuple[str, ...]
    problems: tuple[str, ...] = field(default=())

    @property
    def well(self) -> bool:
        return not self.problems


class Matrix(Cluster):
    """A cluster with two nodes for the jobs, and one to fall back to."""

    nodes = 3
    python = PYTHONPATH
    at_once: int
    tree: Path
    jobs: Path
    context: Context

    def __init__(self, directory: Path, name: str, *, cgroups: bool = False, at_once: int = 10) -> None:
        shape = f"provider: sandbox, cpus: 2, memory: {2 * at_once}G, cgroups: {str(cgroups).lower()}"
        super().__init__(
            directory,
            f"cluster: {name}\n"
            "controller: {provider: sandbox, memory: 1G}\n"
            "nodesets:\n"
            f"  fish: {{{shape}, count: 2}}\n"
            f"  spare: {{{shape}, count: 1, weight: 10}}\n"
            "partitions:\n"
            "  main: {nodesets: [fish, spare], default: true}\n"
            "  urgent: {nodesets: [fish, spare], priority: 10}\n"
            # A node that is gone is found out sooner than in five minutes.
            "slurm: {options: {SlurmdTimeout: 60}}\n",
        )
        self.prepare(directory, at_once)

    def prepare(self, directory: Path, at_once: int) -> None:
        """Have the script of the jobs in this directory."""
        self.at_once, self.tree = at_once, directory / "tree"
        self.tree.mkdir()
        shutil.copy(Path(__file__).with_name("train.py"), self.tree / "train.py")
        self.jobs = Layout(cache_dir(), self.name).shared / JOBS.removeprefix("/shared/")
        self.context = open_context(self.file)

    def start(self) -> None:
        self.json("up", timeout=600)
        give_torch(self.name)
        self.share_nodes()

    def share_nodes(self) -> None:
        """A job has two ranks on a node, and they sleep most of the time: many share the CPUs."""
        share = ("scontrol", "update", "PartitionName=main", f"OverSubscribe=FORCE:{self.at_once}")
        self.on("controller", *share)

    def submit(self, cell: Cell, *arguments: str) -> Stopped:
        """Queue the job of a cell."""
        many: dict[str, Any] = {"nodes": 2, "ntasks_per_node": cell.ranks_per_node} if cell.world_size > 1 else {}
        if cell.cause == "time limit":
            many |= {"time": "3", "signal": "USR1@20"}
        if cell.cause in HOST_LOSSES:
            many |= {"nodelist": "fish2" if cell.world_size == 1 else "fish[1-2]"}
        if cell.cause not in SIGNALS:
            arguments = ("--pause", "10", *arguments)  # until all are at work, or the time is over
        job = job_from_options(
            {
                "script": "train.py",
                "args": ("--save-every", str(SAVE_EVERY), "--workers", str(cell.workers), *arguments),
                "launcher": cell.launcher,
                "export": {"PYTHONPATH": self.python},
                "gpus_per_node": 0,
                "mem": "1800M",
                "directory": JOBS,
                "job_name": "-".join(str(cell).replace(",", "").split()),
                **many,
            }
        )
        number = asyncio.run(run(self.context, job, self.tree)).id
        return Stopped(cell, number, self.jobs / number)

    def baselines(self, wanted: Iterable[Cell]) -> dict[int, Stopped]:
        """A job that nothing stops, for each number of ranks."""
        launchers = {1: "python", 2: "srun", 4: "spawn"}
        sizes = sorted({cell.world_size for cell in wanted})
        jobs = {size: self.submit(Cell(launchers[size], "nothing", 0), "--pause", "0") for size in sizes}
        self.wait("they have ended", lambda: not self.queue(), 600)
        return jobs

    def queue(self) -> dict[str, str]:
        """The state of every job in the queue."""
        rows = self.on("controller", "squeue", "-h", "-o", "%i %T").splitlines()
        return {number: state for number, state in (row.split() for row in rows)}

    def evidence(self, job: Stopped) -> str:
        """What there is to read about a job that did not do as it should."""
        batch = (self.jobs / f"{job.id}.out").read_text(errors="replace")[-3000:]
        log = self.on("controller", "grep", f"JobId={job.id}\\b", "/var/log/slurm/slurmctld.log", status=None)
        return f"== {job.cell}\n{batch}\n{log[-3000:]}"

    # ---- what ends a job

    def signal(self, job: Stopped) -> None:
        """A warning to the batch script, which passes it on, and SIGTERM to every rank: the job itself goes on."""
        place = () if job.cell.cause == "TERM" else ("--batch",)
        self.on("controller", "scancel", *place, f"--signal={job.cell.cause}", job.id)

    def preempt(self) -> None:
        """A job of a higher partition that wants all nodes for itself."""
        options = ["-p", "urgent", "--exclusive", f"-N{self.nodes}", "-o", "/dev/null"]
        self.on("controller", "sbatch", *options, "--wrap", "sleep 5")

    def kill_node(self, host: str = "fish2") -> None:
        """It stays away until Slurm has given it up, and comes back."""
        self.fault("kill", host)
        self.wait(f"{host} is given up", lambda: "DOWN" in self.states()[host], 300)
        self.json("up", timeout=600)

    def return_node(self, host: str = "fish2") -> None:
        """It is back before Slurm misses it."""
        self.fault("kill", host)
        self.fault("start", host)

    # ---- the way of a job

    def play(self, cells: Iterable[Cell], jobs: list[Stopped], *, hurry: bool, seconds: float = 1800) -> None:
        """Start every cell, stop it once it is at work, and wait until it has come back and ended. Adds to `jobs`.

        What strikes all jobs of a node does so once all of its cells are at work. Slurm lets a requeued job wait two
        minutes for the credentials of its first turn to run out; in a hurry, it is told to start at once.
        """
        waiting = list(cells)
        left: dict[str, Stopped] = {}
        struck: set[str] = set()
        called: set[tuple[str, int]] = set()

        def all_over() -> bool:
            queue = self.queue()
            room = STARTING - sum(job.starting() for job in left.values() if job.id in queue)
            for job in list(left.values()):
                state = queue.get(job.id, "")
                if job.cell.cause in SIGNALS and job.id not in struck and job.step() >= job.cell.at_work:
                    self.signal(job)
                    struck.add(job.id)
                if state in ("PENDING", "") and job.turns() and job.checkpoint is None and (newest := job.newest()):
                    job.checkpoint, job.reason = newest
                if state == "PENDING" and job.turns() and (job.id, job.turns()) not in called and room > 0:
                    called.add((job.id, job.turns()))
                    room -= 1
                    self._call(job, hurry)
                if not state:
                    del left[job.id]
            if waiting and room > 0:
                job = self.submit(waiting[0])
                waiting.pop(0)
                jobs.append(job)
                left[job.id] = job
            return not waiting and not left

        strikes: dict[str, Callable[[], None]] = {"preemption": self.preempt, "node killed": self.kill_node}
        strikes["node returns"] = self.return_node
        for cause, strike in strikes.items():
            targets = [cell for cell in waiting if cell.cause == cause]
            if targets:
                at_work = partial(self._at_work, jobs, targets)
                self.wait(f"all are at work before {cause}", lambda: all_over() or at_work(), seconds)  # noqa: B023
                strike()
        self.wait("all jobs have ended", all_over, seconds)

    def _at_work(self, jobs: Iterable[Stopped], cells: Iterable[Cell]) -> bool:
        return {job.cell for job in jobs if job.step() >= job.cell.at_work} >= {*cells}

    def _call(self, job: Stopped, hurry: bool) -> None:
        """A job that waits for its second turn: its time limit has done its part."""
        settings = [
            *(["TimeLimit=60"] if job.cell.cause == "time limit" else []),
            *(["StartTime=now"] if hurry else []),
        ]
        if settings:  # refused while the job is just leaving its nodes; then it waits as any other
            self.on("controller", "scontrol", "update", f"JobId={job.id}", *settings, status=None)


def judge(job: Stopped, whole: Stopped) -> Outcome:
    """What came of a job, against one of the same world size that nothing stopped."""
    steps = [line for line in job.lines() if "step" in line]
    first = [line["step"] for line in steps if line["turn"] == 0]
    later = [line["step"] for line in steps if line["turn"] > 0]
    digests = [line["digest"] for line in job.lines() if "digest" in line]
    losses = {line["step"]: line["loss"] for line in steps}
    expected = {line["step"]: line["loss"] for line in whole.lines() if "step" in line}
    lost = sum(count - 1 for count in Counter(line["step"] for line in steps).values())
    allowed = SAVE_EVERY if job.cell.cause in HOST_LOSSES else 0
    problems = [
        text
        for text, wrong in (
            ("it was not resumed", not later),
            ("no checkpoint was committed", job.checkpoint is None),
            (f"{lost} steps were done again", lost > allowed),
            ("it did not end", len(digests) != 1),
            ("its losses are others", losses != expected),
            (
                "it has learned something else",
                digests != [line["digest"] for line in whole.lines() if "digest" in line],
            ),
        )
        if wrong
    ]
    return Outcome(
        job.cell,
        max(first, default=-1) + 1,
        min(later, default=-1),
        job.reason,
        lost,
        job.turns(),
        digests[0] if digests else "",
        tuple(losses[step] for step in sorted(losses)),
        tuple(problems),
    )


def table(outcomes: Iterable[Outcome]) -> str:
    """The outcomes, one line each."""
    head = ("launcher", "what ends it", "workers", "saved at", "stopped", "resumed", "lost", "same bits", "")
    rows = [
        (
            outcome.cell.launcher,
            outcome.cell.cause,
            str(outcome.cell.workers),
            outcome.reason,
            str(outcome.stopped_at),
            str(outcome.resumed_at),
            str(outcome.lost),
            "yes" if not {"its losses are others", "it has learned something else"} & {*outcome.problems} else "NO",
            "; ".join(outcome.problems) or "ok",
        )
        for outcome in outcomes
    ]
    widths = [max(map(len, column)) for column in zip(head, *rows, strict=True)]
    lines = [
        "  ".join(text.ljust(width) for text, width in zip(row, widths, strict=True)).rstrip() for row in (head, *rows)
    ]
    return "\n".join([lines[0], "-" * len(lines[0]), *lines[1:]])


def cells(
    launchers: Iterable[str] = LAUNCHER_NAMES, causes: Iterable[str] = CAUSES, workers: Iterable[int] = WORKERS
) -> list[Cell]:
    return [Cell(launcher, cause, count) for cause in causes for launcher in launchers for count in workers]
