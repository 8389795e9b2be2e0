"""Times rented nodes from sbatch to the first line of the job, on sandbox hosts that a simulated cloud rents out.

Every step is real: slurmctld resumes the nodes, the service on the controller orders machines, sees them come
up, joins them over SSH and checks their GPUs, slurmd registers and Slurm starts the job. The hosts share this machine's
clock. They also share its CPUs, so the time grows with their number; machines of a cloud do not. Boots are kept out of
the join: the cloud shows a machine as up BOOT_S after its order, when all have booted here. Two clusters take turns:
one installs Slurm's packages on its nodes, the other has `slurm: {from: shoal}`.
"""

from __future__ import annotations

import contextlib
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
from shoal.roles.slurm_tree import find_trees

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
BOOT_S = 60
"""32 sandbox hosts boot in half of it on two CPUs."""


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


Woken = dict[int, list[WakeTimes]]
"""The times by the number of nodes."""
SOURCES = {"packages": "", "shoal": "slurm: {from: shoal}\n"}
"""Where Slurm comes from, and what the spec says then."""
TARGET_S, TARGET_NODES, TARGET_RATIO = 3.0, 32, 0.3
"""The join of one bare host, and that of many at once beside packages."""


def measure(name: str, sizes: Sequence[int], rounds: int, *, compare: bool) -> list[str]:
    """The lines of the tables, of one source of Slurm alone and without the time of a boot if not `compare`.

    Clusters are created and removed. The largest size is measured once, last.
    """
    # It lists in pages and takes bulk orders; its bill has the time at which a machine was up.
    cloud = Cloud("gcp", "key-of-the-bench", ("--boot-seconds", str(BOOT_S if compare else 0), "--no-limits"))
    sources = dict(SOURCES) if find_trees() else {"packages": ""}
    if not compare and "shoal" in sources:
        del sources["packages"]
    woken: dict[str, Woken] = {source: {size: [] for size in sizes} for source in sources}
    turns = [*((turn, size) for turn in range(rounds) for size in sizes[:-1]), (0, sizes[-1])]
    with contextlib.ExitStack() as stack:
        clusters = {}
        for source, line in sources.items():
            scratch = Path(stack.enter_context(tempfile.TemporaryDirectory()))
            spec = SPEC.format(name=f"{name}-{source}", most=max(sizes)) + line
            clusters[source] = stack.enter_context(renting(scratch, spec, cloud))
        for turn, size in turns:
            for source, (cluster, urls) in clusters.items():
                times = _wake_once(cluster, urls["gcp"], size)
                woken[source][size].append(times)
                show_progress(f"{size} sandbox hosts, Slurm from {source}, round {turn + 1}: {times}")
    return [*(line for source, table in woken.items() for line in _table(source, table)), *_targets(woken)]


def _wake_once(cluster: Cluster, url: str, size: int) -> WakeTimes:
    """Wake so many nodes, and let them sleep again."""
    nodes = [f"burst{number}" for number in range(1, 1 + size)]
    times = _wake(cluster, url, nodes)
    cluster.on("controller", "scontrol", "update", f"nodename={compress(nodes)}", "state=power_down")
    cluster.wait("the nodes sleep again", lambda: asleep(cluster) and ended(url), seconds=LIMIT)
    return times


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


def _targets(woken: dict[str, Woken]) -> list[str]:
    if "shoal" not in woken:
        return ["Slurm from shoal: not measured; this machine has no tree (scripts/build-slurm)"]

    sizes = woken["shoal"]
    checks = []
    if 1 in sizes:
        checks.append(("join of 1 node from shoal, in seconds", _median(sizes[1], "joined"), TARGET_S))
    if TARGET_NODES in sizes:
        ratio = _ratio(woken, TARGET_NODES)
        checks.append((f"join of {TARGET_NODES} nodes, from shoal / from packages", ratio, TARGET_RATIO))
    return [
        f"  {'met   ' if value <= bound else 'MISSED'} {what}: {value:.2f} (at most {bound:g})"
        for what, value, bound in checks
    ]


def _ratio(woken: dict[str, Woken], size: int) -> float:
    shoal, packages = (_median(woken[source][size], "joined") for source in ("shoal", "packages"))
    return shoal / packages


def _median(runs: Sequence[WakeTimes], part: str) -> float:
    return statistics.median(getattr(times, part) for times in runs)


def _table(source: str, woken: Woken) -> list[str]:
    rows = {
        "sbatch to order: Slurm, then the service": "ordered",
        "order to the last machine up: boot in the cloud": "booted",
        "up to registration at slurmctld: the join": "joined",
        "registration to the first line of the job": "started",
        "total without the boot": "beside",
        "the same job on nodes that are up: Slurm alone": "again",
        "CPU seconds a node, boot and Slurm included": "cpu",
    }
    heads = "".join(f"{format_nodes(size):>11}" for size in woken)
    lines = [f"{f'sandbox hosts, Slurm from {source}: sbatch to the job':<52}{heads}"]
    for text, part in rows.items():
        medians = [_median(runs, part) for runs in woken.values()]
        lines.append(f"{f'  {text}':<52}" + "".join(f"{median:>11.2f}" for median in medians))
    return lines
