"""Rented nodes for real: from sbatch to the first line of the job, on sandbox hosts that a simulated cloud lets out.

All of it is there: slurmctld wakes the nodes, the service on the controller orders, finds the machines up, makes them
nodes over SSH and looks at their GPUs, slurmd registers and Slurm starts the job. The hosts share this machine's clock.
slurmctld looks only every 30 s whether a job that waits for nodes to wake has all of them: that part is not ours.
"""

from __future__ import annotations

import re
import statistics
import tempfile
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from datetime import datetime
from pathlib import Path

from ground import BenchFailed
from tests.e2e.cluster import Cluster
from tests.e2e.simulated import UNFINISHED, Cloud, bill, printed, renting, state, submit
from wake import counted

from shoal.hostlist import compress

SPEC = """\
cluster: {name}
controller: {{provider: sandbox, memory: 1G}}
providers:
  gcp: {{url: "URL-OF-gcp", key: "env:GCP_KEY", project: p}}
nodesets:
  burst: {{provider: gcp, type: a2-highgpu-1g, zone: us-central1-a, max: {most}, idle: 30m,
          cpus: 1, memory: 1G, gpus: 1}}
"""
CLOUD = Cloud("gcp", "key-of-the-bench", ("--boot-seconds", "0", "--no-limits"))
"""It lists in pages and takes bulk orders, and its bill says when a machine was up: when the host answers."""


@dataclass(frozen=True)
class Woken:
    """The parts of one job's wait, in seconds."""

    ordered: float
    """From sbatch to the first order at the cloud."""
    booted: float
    """From there until the last machine was up."""
    joined: float
    """From there until slurmctld had heard of the last of its nodes."""
    started: float
    """From there to the first line of the last task of the job."""
    again: float
    """From sbatch to that line, of a second job on the same nodes: what Slurm takes where nothing has to be woken."""

    @property
    def beside(self) -> float:
        """What is Shoal's, with Slurm's part of the way to the order."""
        return self.ordered + self.joined


def measure(name: str, sizes: Sequence[int], rounds: int, say: Callable[[str], None]) -> list[str]:
    """The lines of the table. The cluster is called `name`, and is taken down."""
    woken: dict[int, list[Woken]] = {size: [] for size in sizes}
    with tempfile.TemporaryDirectory() as scratch:
        spec = SPEC.format(name=name, most=rounds * sum(sizes))
        with renting(Path(scratch), spec, CLOUD) as (cluster, urls):
            names = iter(f"burst{number}" for number in range(1, 1 + rounds * sum(sizes)))
            for turn in range(rounds):
                for size in sizes:
                    woken[size].append(_wake(cluster, urls["gcp"], [next(names) for _ in range(size)]))
                    say(f"{size} sandbox hosts, round {turn + 1}: {woken[size][-1]}")
    return _table(woken)


def _wake(cluster: Cluster, url: str, nodes: Sequence[str]) -> Woken:
    known = {one["id"] for one in bill(url)["machines"]}
    begun, first_line = _run(cluster, nodes)
    machines = [one for one in bill(url)["machines"] if one["id"] not in known]
    if len(machines) != len(nodes):
        raise BenchFailed(f"{len(machines)} machines were rented for {len(nodes)} nodes: {machines}")
    ordered = min(one["ordered"] for one in machines)
    up = max(one["started"] for one in machines)
    heard = _heard(cluster, nodes)
    begun_again, line_again = _run(cluster, nodes)
    return Woken(ordered - begun, up - ordered, heard - up, first_line - heard, line_again - begun_again)


def _heard(cluster: Cluster, nodes: Sequence[str]) -> float:
    """When slurmctld had heard of all of these nodes, by its log, which has hosts' time: UTC."""
    log = cluster.on("controller", "grep", "now responding", "/var/log/slurm/slurmctld.log")
    found = {node: at for at, node in re.findall(r"^\[(\S+)\] Node (\S+) now responding$", log, re.MULTILINE)}
    return max(datetime.fromisoformat(f"{found[node]}+00:00").timestamp() for node in nodes)


def _run(cluster: Cluster, nodes: Sequence[str]) -> tuple[float, float]:
    """When a job was queued, and when the last of its tasks began."""
    begun = time.time()
    job = submit(cluster, compress(nodes), "srun date +%s.%N", f"--nodes={len(nodes)}", "--ntasks-per-node=1")
    cluster.wait("the job ends", lambda: state(cluster, job) not in UNFINISHED, seconds=400)
    if state(cluster, job) != "COMPLETED":
        raise BenchFailed(f"job {job} on {compress(nodes)} is {state(cluster, job)}: {printed(cluster, job)}")
    return begun, max(float(line) for line in printed(cluster, job))


def _table(woken: dict[int, list[Woken]]) -> list[str]:
    rows = {
        "sbatch to the order: Slurm, then the service": "ordered",
        "the order to the last machine up: the cloud's boot": "booted",
        "up to a node that Slurm hears of: the join": "joined",
        "both, beside the boot": "beside",
        "until Slurm, looking every 30 s, starts the job": "started",
        "the same job once its nodes are there: Slurm alone": "again",
    }
    heads = "".join(f"{counted(size):>11}" for size in woken)
    lines = [f"{'on sandbox hosts, from sbatch to the first line':<52}{heads}"]
    for text, part in rows.items():
        medians = [statistics.median(getattr(one, part) for one in several) for several in woken.values()]
        lines.append(f"{f'  {text}':<52}" + "".join(f"{median:>11.2f}" for median in medians))
    return lines
