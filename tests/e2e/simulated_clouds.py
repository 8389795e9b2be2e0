"""Simulated clouds beside a test's cluster, as `shoal simulate` runs them; their machines are real hosts."""

import json
import os
import signal
import subprocess
import urllib.request
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tests.e2e.cluster import IMAGE, Cluster
from tests.e2e.leftovers import TAG, noted
from tests.e2e.shoal_server import ROOTS_PROGRAM

GOOGLE_IMAGE = {"debian13": "debian-cloud/debian-13", "sid": "sid"}.get(IMAGE, "debian-cloud/debian-12")
"""What Google's machines run in tests with packages: the system of the controller. Its default is Ubuntu 24.04."""
POD_IMAGE = {"debian13": "debian:13", "sid": "debian:sid"}.get(IMAGE, "")
"""The same for RunPod's pods, whose default is Debian 12."""
CENT = 0.01
LATE_S = 10.0
"""So much later than the cloud itself we may know that a machine is up, or ended: lists are asked every few seconds."""

IMPATIENT = "sed -i 's/^SuspendTimeout=.*/SuspendTimeout=10/' /etc/slurm/slurm.conf && scontrol reconfigure"
"""Slurm lets a node that it gave back rest for a minute, in which tests would only wait."""


@dataclass(frozen=True)
class Cloud:
    """A simulated cloud, by the provider's name."""

    kind: str
    key: str
    """What the account's key is; it is in the variable `KIND_KEY`."""
    options: tuple[str, ...] = ()
    """More for `shoal simulate`."""

    @property
    def variable(self) -> str:
        return f"{self.kind.upper()}_KEY"


@contextmanager
def renting(
    directory: Path, spec: str, *clouds: Cloud, kind: type[Cluster] = Cluster
) -> Iterator[tuple[Cluster, dict[str, str]]]:
    """A cluster that is up and rents from such clouds, and their addresses by kind: URL-OF-KIND in the spec."""
    name = spec.split("cluster:")[1].split()[0]
    with noted(name), ExitStack() as stack:
        urls = {cloud.kind: stack.enter_context(simulated(name, cloud)) for cloud in clouds}
        for cloud, url in urls.items():
            spec = spec.replace(f"URL-OF-{cloud}", url)
        if POD_IMAGE:
            spec = spec.replace("{provider: runpod,", f"{{provider: runpod, image: {POD_IMAGE},")
        cluster = kind(directory, spec)
        cluster.env |= {each.variable: each.key for each in clouds}
        try:
            assert cluster.json("up")["whole"]
            cluster.on("controller", "sh", "-c", IMPATIENT)
            yield cluster, urls
        finally:
            cluster.down()


@contextmanager
def simulated(cluster: str, cloud: Cloud) -> Iterator[str]:
    """The address of a cloud whose machines are beside the hosts of a sandbox cluster."""
    line = ["simulate", cloud.kind, "--cluster", cluster, "--json", *cloud.options]
    if IMAGE:
        line += ["--image", IMAGE]
    env = {**os.environ, TAG: cluster}
    process = ROOTS_PROGRAM.popen(*line, stdout=subprocess.PIPE, start_new_session=True, env=env)
    try:
        assert process.stdout is not None
        output = ""
        while not output.rstrip().endswith("}"):
            part = process.stdout.readline()
            assert part, f"shoal simulate ended: {output}"
            output += part
        yield str(json.loads(output)["url"])
    finally:
        os.killpg(process.pid, signal.SIGINT)
        process.communicate(timeout=120)


def bill(url: str) -> dict[str, Any]:
    """The cloud's own bill."""
    with urllib.request.urlopen(f"{url}/_simulator/bill", timeout=30) as answer:
        record: dict[str, Any] = json.loads(answer.read())
    return record


def ended(url: str) -> bool:
    """Whether the cloud has rented machines out, and has all of them back."""
    machines = bill(url)["machines"]
    return bool(machines) and all(machine["ended"] for machine in machines)


def preempt(url: str, machine: str) -> None:
    """Have the cloud take a machine away, with its notice."""
    with urllib.request.urlopen(f"{url}/_simulator/preempt/{machine}", b"", timeout=30):
        pass


def spent(cluster: Cluster, nodesets: Sequence[str]) -> float:
    """What these nodesets have cost, as the ledger has it, in dollars."""
    costs = cluster.json("cost")["nodesets"]
    return sum(float(costs.get(name, 0)) for name in nodesets)


def apart(cluster: Cluster, url: str, *nodesets: str, slack: float = LATE_S) -> str:
    """How the ledger's sum for these nodesets differs from the cloud's own bill; nothing where they agree to the cent.

    For each machine they may differ by `slack` seconds, which for most is far less than a cent.
    """
    ours, theirs = spent(cluster, nodesets), bill(url)
    most = sum(slack * machine["usd_hour"] / 3600 for machine in theirs["machines"])
    difference = round(abs(ours - theirs["usd"]), 6)
    if theirs["usd"] > 0 and difference < CENT and difference <= round(most, 6):
        return ""
    return f"the ledger says ${ours:.6f} and the bill ${theirs['usd']:.6f}: {theirs}"


# ---- jobs that wake nodes


UNFINISHED = ("PENDING", "CONFIGURING", "RUNNING", "COMPLETING")


def submit(cluster: Cluster, nodes: str, command: str, *more: str) -> str:
    """Queue a job for these nodes, and go on. Its output is where all hosts see it."""
    options = ("--parsable", f"--nodelist={nodes}", "--output=/shared/%j.out", *more, f"--wrap={command}")
    return cluster.on("controller", "sbatch", *options).strip()


def printed(cluster: Cluster, job: str) -> list[str]:
    return cluster.on("controller", "cat", f"/shared/{job}.out").split()


def state(cluster: Cluster, job: str) -> str:
    return shown(cluster, job)["JobState"]


def shown(cluster: Cluster, job: str) -> dict[str, str]:
    """What `scontrol show job` says."""
    fields = cluster.on("controller", "scontrol", "-o", "show", "job", job).split()
    return {key: value for key, _, value in (word.partition("=") for word in fields)}


def asleep(cluster: Cluster, *nodes: str) -> bool:
    """Whether all nodes, or these, sleep, without a machine and without a mark of the past. Asks Slurm itself."""
    chosen = [f"--nodes={','.join(nodes)}"] if nodes else []
    return set(cluster.on("controller", "sinfo", "-h", "-N", "-o", "%t", *chosen).split()) == {"idle~"}
