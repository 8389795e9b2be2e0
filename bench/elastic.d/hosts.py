"""Times rented nodes from sbatch to the first line of the job, on sandbox hosts that a simulated cloud rents out.

Every step is real: slurmctld resumes the nodes, the service on the controller orders machines, sees them come
up, joins them over SSH and checks their GPUs, slurmd registers and Slurm starts the job. The hosts share this machine's
clock. They also share its CPUs while they install Slurm's packages, so the time grows with their number.
"""

from __future__ import annotations

import os
import re
import statistics
import tempfile
import time
from collections.abc import Sequence
from dataclasses import dataclass
from datetime import datetime
from pathlib import Path

from harness import BenchError, show_progress
from tests.e2e.cluster import LIMIT, Cluster
from tests.e2e.simulated_clouds import UNFINISHED, Cloud, asleep, bill, ended, printed, renting, state, submit
from wake import format_nodes

from shoal.hostlist import compress

SPEC = """\
cluster: {name}
controller: {{provider: sandbox, memory: 1G}}
providers:
  gcp: {{url: "URL-OF-gcp", key: "env:GCP_KEY", project: p}}
nodesets:
  burst: {{provider: gcp, type: a2-highgpu-1g, zone: us-central1-a, image: debian-cloud/debian-12, max: {most},
          idle: 30m,
          cpus: 1, memory: 1G, gpus: 1}}
"""
CLOUD = Cloud("gcp", "key-of-the-bench", ("--boot-seconds", "0", "--no-limits"))
"""It lists in pages and takes bulk orders; its bill has the time at which a host answered."""


@dataclass(frozen=True)
class WakeTimes:
    """The parts of the time that one job waits, in seconds."""

    ordered: float
    """From sbatch to the first order at the cloud."""
    booted: float
    """From there until the last machine is up."""
    joined: float
    """From there until the last node has registered at slurmctld."""
    started: float
    """From there to the first line of the job's last task."""
    again: float
    """From sbatch to that line for a second job on the same nodes: Slurm alone."""
    cpu: float
    """CPU seconds of this machine for each node, from sbatch to the end of the job."""

    @property
    def beside(self) -> float:
        """Everything but the boot: the time of Shoal and of Slurm."""
        return self.ordered + self.joined + self.started


def measure(name: str, sizes: Sequence[int], rounds: int) -> list[str]:
    """The lines of the table. The cluster `name` is created and removed. The largest size is measured once, last."""
    woken: dict[int, list[WakeTimes]] = {size: [] for size in sizes}
    turns = [*((turn, size) for turn in range(rounds) for size in sizes[:-1]), (0, sizes[-1])]
    spec = SPEC.format(name=name, most=max(sizes))
    with tempfile.TemporaryDirectory() as scratch, renting(Path(scratch), spec, CLOUD) as (cluster, urls):
        for turn, size in turns:
            nodes = [f"burst{number}" for number in range(1, 1 + size)]
            woken[size].append(_wake(cluster, urls["gcp"], nodes))
            show_progress(f"{size} sandbox hosts, round {turn + 1}: {woken[size][-1]}")
            cluster.on("controller", "scontrol", "update", f"nodename={compress(nodes)}", "state=power_down")
            cluster.wait("the nodes sleep again", lambda: asleep(cluster) and ended(urls["gcp"]), seconds=LIMIT)
    return _table(woken)


def _wake(cluster: Cluster, url: str, nodes: Sequence[str]) -> WakeTimes:
    earlier = {machine["id"] for machine in bill(url)["machines"]}
    cpu = _cpu_seconds()
    start, first_line = _run(cluster, nodes)
    cpu = _cpu_seconds() - cpu
    machines = [machine for machine in bill(url)["machines"] if machine["id"] not in earlier]
    if len(machines) != len(nodes):
        raise BenchError(f"{len(machines)} machines were rented for {len(nodes)} nodes: {machines}")
    ordered = min(machine["ordered"] for machine in machines)
    up = max(machine["started"] for machine in machines)
    registered = _registration_time(cluster, nodes)
    second_start, second_line = _run(cluster, nodes)
    again = second_line - second_start
    return WakeTimes(ordered - start, up - ordered, registered - up, first_line - registered, again, cpu / len(nodes))


def _cpu_seconds() -> float:
    """CPU seconds of this machine since its boot."""
    user, nice, system, _idle, _iowait, irq, softirq = map(int, Path("/proc/stat").read_text().split()[1:8])
    return (user + nice + system + irq + softirq) / os.sysconf("SC_CLK_TCK")


def _registration_time(cluster: Cluster, nodes: Sequence[str]) -> float:
    """When the last of these nodes registered, from the log of slurmctld, whose times are UTC."""
    log = cluster.on("controller", "grep", "now responding", "/var/log/slurm/slurmctld.log")
    times = {node: at for at, node in re.findall(r"^\[(\S+)\] Node (\S+) now responding$", log, re.MULTILINE)}
    return max(datetime.fromisoformat(f"{times[node]}+00:00").timestamp() for node in nodes)


def _run(cluster: Cluster, nodes: Sequence[str]) -> tuple[float, float]:
    """When a job was submitted, and when its last task started."""
    start = time.time()
    job = submit(cluster, compress(nodes), "srun date +%s.%N", f"--nodes={len(nodes)}", "--ntasks-per-node=1")
    cluster.wait("the job ends", lambda: state(cluster, job) not in UNFINISHED, seconds=LIMIT)
    if state(cluster, job) != "COMPLETED":
        raise BenchError(f"job {job} on {compress(nodes)} is {state(cluster, job)}: {printed(cluster, job)}")
    return start, max(float(line) for line in printed(cluster, job))


def _table(woken: dict[int, list[WakeTimes]]) -> list[str]:
    rows = {
        "sbatch to order: Slurm, then the service": "ordered",
        "order to the last machine up: boot in the cloud": "booted",
        "up to registration at slurmctld: the join": "joined",
        "registration to the first line of the job": "started",
        "total without the boot": "beside",
        "the same job on nodes that are up: Slurm alone": "again",
        "CPU seconds a node, boot and packages included": "cpu",
    }
    heads = "".join(f"{format_nodes(size):>11}" for size in woken)
    lines = [f"{'on sandbox hosts, from sbatch to the first line':<52}{heads}"]
    for text, part in rows.items():
        medians = [statistics.median(getattr(times, part) for times in runs) for runs in woken.values()]
        lines.append(f"{f'  {text}':<52}" + "".join(f"{median:>11.2f}" for median in medians))
    return lines
