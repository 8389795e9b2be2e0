"""Rented nodes for real: from sbatch to the first line of the job, on sandbox hosts that a simulated cloud lets out.

All of it is there: slurmctld wakes the nodes, the service on the controller orders, finds the machines up, makes them
nodes over SSH and looks at their GPUs, slurmd registers and Slurm starts the job. The hosts share this machine's clock.
They also share its CPUs, which all want at once to install Slurm's packages: so the time grows with their number.
"""

from __future__ import annotations

import os
import re
import statistics
import tempfile
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from datetime import datetime
from pathlib import Path

from ground import BenchFailed
from tests.e2e.cluster import LIMIT, Cluster
from tests.e2e.simulated import UNFINISHED, Cloud, asleep, bill, ended, printed, renting, state, submit
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
    cpu: float
    """CPU seconds for each node, of all that this machine did from sbatch to the end of the job."""

    @property
    def beside(self) -> float:
        """All but the boot: what is Shoal's, and Slurm's own part of it."""
        return self.ordered + self.joined + self.started


def measure(name: str, sizes: Sequence[int], rounds: int, say: Callable[[str], None]) -> list[str]:
    """The lines of the table. The cluster is called `name`, and is taken down. The largest size comes last, once."""
    woken: dict[int, list[Woken]] = {size: [] for size in sizes}
    turns = [*((turn, size) for turn in range(rounds) for size in sizes[:-1]), (0, sizes[-1])]
    spec = SPEC.format(name=name, most=max(sizes))
    with tempfile.TemporaryDirectory() as scratch, renting(Path(scratch), spec, CLOUD) as (cluster, urls):
        for turn, size in turns:
            nodes = [f"burst{number}" for number in range(1, 1 + size)]
            woken[size].append(_wake(cluster, urls["gcp"], nodes))
            say(f"{size} sandbox hosts, round {turn + 1}: {woken[size][-1]}")
            cluster.on("controller", "scontrol", "update", f"nodename={compress(nodes)}", "state=power_down")
            cluster.wait("the nodes sleep again", lambda: asleep(cluster) and ended(urls["gcp"]), seconds=LIMIT)
    return _table(woken)


def _wake(cluster: Cluster, url: str, nodes: Sequence[str]) -> Woken:
    known = {one["id"] for one in bill(url)["machines"]}
    cpu = _busy()
    begun, first_line = _run(cluster, nodes)
    cpu = _busy() - cpu
    machines = [one for one in bill(url)["machines"] if one["id"] not in known]
    if len(machines) != len(nodes):
        raise BenchFailed(f"{len(machines)} machines were rented for {len(nodes)} nodes: {machines}")
    ordered = min(one["ordered"] for one in machines)
    up = max(one["started"] for one in machines)
    heard = _heard(cluster, nodes)
    begun_again, line_again = _run(cluster, nodes)
    again = line_again - begun_again
    return Woken(ordered - begun, up - ordered, heard - up, first_line - heard, again, cpu / len(nodes))


def _busy() -> float:
    """The CPU seconds that this machine has worked since it booted."""
    user, nice, system, _idle, _iowait, irq, softirq = map(int, Path("/proc/stat").read_text().split()[1:8])
    return (user + nice + system + irq + softirq) / os.sysconf("SC_CLK_TCK")


def _heard(cluster: Cluster, nodes: Sequence[str]) -> float:
    """When slurmctld had heard of all of these nodes, by its log, which has hosts' time: UTC."""
    log = cluster.on("controller", "grep", "now responding", "/var/log/slurm/slurmctld.log")
    found = {node: at for at, node in re.findall(r"^\[(\S+)\] Node (\S+) now responding$", log, re.MULTILINE)}
    return max(datetime.fromisoformat(f"{found[node]}+00:00").timestamp() for node in nodes)


def _run(cluster: Cluster, nodes: Sequence[str]) -> tuple[float, float]:
    """When a job was queued, and when the last of its tasks began."""
    begun = time.time()
    job = submit(cluster, compress(nodes), "srun date +%s.%N", f"--nodes={len(nodes)}", "--ntasks-per-node=1")
    cluster.wait("the job ends", lambda: state(cluster, job) not in UNFINISHED, seconds=LIMIT)
    if state(cluster, job) != "COMPLETED":
        raise BenchFailed(f"job {job} on {compress(nodes)} is {state(cluster, job)}: {printed(cluster, job)}")
    return begun, max(float(line) for line in printed(cluster, job))


def _table(woken: dict[int, list[Woken]]) -> list[str]:
    rows = {
        "sbatch to the order: Slurm, then the service": "ordered",
        "the order to the last machine up: the cloud's boot": "booted",
        "up to a node that Slurm hears of: the join": "joined",
        "until Slurm starts the job: its first line": "started",
        "all of it beside the boot": "beside",
        "the same job once its nodes are there: Slurm alone": "again",
        "CPU seconds a node, boot and packages in them": "cpu",
    }
    heads = "".join(f"{counted(size):>11}" for size in woken)
    lines = [f"{'on sandbox hosts, from sbatch to the first line':<52}{heads}"]
    for text, part in rows.items():
        medians = [statistics.median(getattr(one, part) for one in several) for several in woken.values()]
        lines.append(f"{f'  {text}':<52}" + "".join(f"{median:>11.2f}" for median in medians))
    return lines
