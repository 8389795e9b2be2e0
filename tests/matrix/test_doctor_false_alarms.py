"""A healthy cluster under load: `shoal doctor` finds no error, nothing is drained, and a person's drain stays.

    scripts/test -m matrix tests/matrix/test_doctor_false_alarms.py -s      # 30 minutes
    SHOAL_ALARM_MINUTES=5 ...   is shorter
    SHOAL_SAVE_TABLE=1 ...      also writes bench/results/doctor-false-alarms.txt

Jobs run all the time. Nodes come and go, `up` changes the configuration, keys are rotated, and hosts reboot, one after
another. The health program runs ten times as often as it does by itself, past its first day, so that it would drain.
"""

import base64
import itertools
import json
import os
import random
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest
from tests import nvml
from tests.documents import ROOT
from tests.e2e.cluster import Cluster, login_keys, taken_down

from shoal.plan.nodes import LEAVING_REASON
from shoal.remote.node_health.node import STATE

COVERS = "health remote/node_health roles/node_health"
pytestmark = [pytest.mark.sandbox, pytest.mark.matrix]
MINUTES = float(os.environ.get("SHOAL_ALARM_MINUTES", "30"))
NOTE, DRAINED = "fan broken", "fish3"
SPEC = """\
cluster: alarms
controller: {provider: sandbox, memory: 1G}
nodesets:
  fish: {provider: sandbox, count: 3, memory: 1G, gpus: 1}
users:
  alice: {uid: 2001, keys: ["file:KEYS/alice.pub"]}
slurm:
  options:
    HealthCheckInterval: 20
"""
JOBS = (
    "-N2 --wrap 'srun sleep 4'",
    "--wrap 'sleep 6'",
    "-N1 --array=1-3 --wrap 'sleep 2'",
    "-N1 --gres=gpu:1 --wrap 'sleep 8'",
    "-N1 --wrap 'timeout 3 sh -c \"while :; do :; done\"; true'",
)
EVERY_S = 15.0
"""From a look at the cluster to the next."""


@dataclass
class Watch:
    """What was seen of the cluster meanwhile."""

    cluster: Cluster
    event: str = ""
    """What is done to the cluster now."""
    looks: int = 0
    alarms: Counter[str] = field(default_factory=Counter)
    """Errors that nothing explains."""
    warnings: Counter[str] = field(default_factory=Counter)
    expected: Counter[str] = field(default_factory=Counter)
    """Errors and warnings while a host is away for an event."""
    drains: Counter[str] = field(default_factory=Counter)
    undone: int = 0
    events: Counter[str] = field(default_factory=Counter)
    program_runs: int = 0
    over: threading.Event = field(default_factory=threading.Event)

    def look(self) -> None:
        """Ask the doctor and Slurm once."""
        before = self.event
        done = self.cluster.shoal("doctor", "--json", status=None)
        during = " / ".join(dict.fromkeys(filter(None, (before, self.event))))
        self.looks += 1
        try:
            findings = json.loads(done.stdout)["findings"]
        except (ValueError, KeyError):  # the controller is away
            error = {"id": "no answer", "level": "error", "host": "controller", "job": "", "evidence": [done.stderr]}
            findings = [error]
        for finding in findings:
            self._count(finding, during)
        nodes = self.cluster.ssh("controller", "scontrol show node --oneliner")
        if nodes.returncode == 0 and nodes.stdout.startswith("NodeName="):
            self._check_drains(nodes.stdout, during)

    def _count(self, finding: dict[str, Any], during: str) -> None:
        if finding["level"] == "info":
            return
        evidence = "; ".join(finding["evidence"])
        text = f"{finding['id']} {finding['host'] or finding['job']}: {evidence} (during {during or 'nothing'})"
        if during and (finding["job"] or finding["host"] in during):
            self.expected[f"during {during}: {finding['level']} {finding['id']} {finding['host']}"] += 1
        elif finding["level"] == "error":
            self.alarms[text] += 1
        else:
            self.warnings[text] += 1

    def _check_drains(self, text: str, during: str) -> None:
        for line in text.splitlines():
            name = line.partition("NodeName=")[2].split()[0]
            state = line.partition("State=")[2].split()[0]
            reason = line.partition("Reason=")[2].partition(" [")[0]
            if name == DRAINED:
                self.undone += "DRAIN" not in state or reason != NOTE
            elif "DRAIN" in state and LEAVING_REASON not in reason:
                self.drains[f"{name}: {state} {reason} (during {during or 'nothing'})"] += 1


@pytest.fixture
def watch(tmp_path: Path) -> Iterator[Watch]:
    with login_keys("alice") as keys:
        cluster = Cluster(tmp_path, SPEC.replace("KEYS", str(keys)))
        with taken_down(cluster):
            assert cluster.json("up")["whole"]
            yield Watch(cluster)


@pytest.mark.timeout(int(MINUTES * 60) + 1800)
def test_healthy_cluster_under_load_raises_no_alarm(watch: Watch, tmp_path: Path) -> None:
    cluster = watch.cluster
    library = base64.b64encode(nvml.build(tmp_path).read_bytes()).decode()
    for name in ("fish1", "fish2", "fish3"):
        prepare_node(cluster, name, library)
    cluster.shoal("node", "drain", DRAINED, "--reason", NOTE)
    started = time.monotonic()
    with ThreadPoolExecutor() as pool:
        workers = [pool.submit(work, watch) for work in (look_often, submit_jobs, run_programs)]
        try:
            play_events(watch, started)
        finally:
            watch.over.set()
        for worker in workers:
            worker.result()
    cluster.wait("the queue is empty", lambda: cluster.ssh("controller", "squeue -h").stdout == "", 300)
    watch.look()
    table = "\n".join(describe(watch, time.monotonic() - started)) + "\n"
    print("\n" + table)
    if os.environ.get("SHOAL_SAVE_TABLE"):
        (ROOT / "bench/results/doctor-false-alarms.txt").write_text(table)
    assert not watch.alarms and not watch.drains and not watch.undone


def play_events(watch: Watch, started: float) -> None:
    for event in itertools.cycle(EVENTS):
        if time.monotonic() - started > MINUTES * 60:
            return
        event(watch)
        watch.cluster.wait("the nodes are back", lambda: nodes_answer(watch.cluster), 300)
        watch.event = ""
        time.sleep(20)  # nothing is done: what is found now is an alarm


def prepare_node(cluster: Cluster, name: str, library: str) -> None:
    """A simulated GPU that is well, and a first day that is long past."""
    text = (
        f"echo {library} | base64 -d > /usr/lib/$(uname -m)-linux-gnu/libnvidia-ml.so.1; ldconfig; "
        f"echo '{nvml.answers({})}' > /etc/shoal-nvml; systemctl start shoal-health; "
        f'sed -i \'s/"since": [0-9.]*/"since": 1000/\' {STATE}/baseline.json'
    )
    done = cluster.ssh(name, text)
    assert done.returncode == 0, done


def nodes_answer(cluster: Cluster) -> bool:
    states = cluster.states()
    return not any({"DOWN", "NOT_RESPONDING", "UNKNOWN"} & flags for flags in states.values())


# ---- all the time


def look_often(watch: Watch) -> None:
    while not watch.over.is_set():
        watch.look()
        watch.over.wait(EVERY_S)


def submit_jobs(watch: Watch) -> None:
    while not watch.over.is_set():
        job = random.choice(JOBS)
        watch.cluster.ssh("controller", f'cd /tmp && runuser -u alice -- sh -c "sbatch -o /dev/null {escape(job)}"')
        watch.over.wait(5)


def escape(text: str) -> str:
    return text.replace("\\", "\\\\").replace('"', '\\"')


def run_programs(watch: Watch) -> None:
    for name in itertools.cycle(("fish1", "fish2", "fish3")):
        if watch.over.is_set():
            return
        watch.program_runs += watch.cluster.ssh(name, "systemctl start shoal-health").returncode == 0
        watch.over.wait(10)


# ---- one after another


def note(watch: Watch, name: str, hosts: str) -> None:
    watch.event = f"{name} ({hosts})"
    watch.events[name] += 1


def run_up(watch: Watch) -> None:
    note(watch, "up without changes", "")
    watch.cluster.json("up", status=None)


def change_options(watch: Watch) -> None:
    note(watch, "up with another option", "controller fish1 fish2 fish3")
    text = watch.cluster.file.read_text()
    seconds = 25 if "HealthCheckInterval: 20" in text else 20
    watch.cluster.file.write_text(
        text.replace(f"HealthCheckInterval: {45 - seconds}", f"HealthCheckInterval: {seconds}")
    )
    watch.cluster.json("up", status=None)


def rotate_key(watch: Watch) -> None:
    note(watch, "keys rotate munge", "controller fish1 fish2 fish3 fish4")
    watch.cluster.shoal("keys", "rotate", "munge", status=None)


def reboot(name: str) -> Callable[[Watch], None]:
    def act(watch: Watch) -> None:
        note(watch, "reboot", name)
        watch.cluster.fault("reboot", name)

    return act


def add_node(watch: Watch) -> None:
    note(watch, "a node comes", "fish4 controller")
    watch.cluster.edit("count: 3", "count: 4")
    watch.cluster.json("up", status=None)


def remove_node(watch: Watch) -> None:
    note(watch, "a node goes", "fish4 controller")
    watch.cluster.edit("count: 4", "count: 3")
    end = time.monotonic() + 300
    # Its jobs end first: `up` says what is left to do.
    while watch.cluster.json("up", status=None)["staying"] and time.monotonic() < end:
        time.sleep(5)


def restart_controller(watch: Watch) -> None:
    note(watch, "reboot of the controller", "controller fish1 fish2 fish3")
    watch.cluster.fault("reboot", "controller")
    watch.cluster.wait("slurmctld answers", lambda: nodes_answer(watch.cluster), 300)


EVENTS = (run_up, reboot("fish1"), change_options, add_node, rotate_key, reboot("fish2"), remove_node, reboot("fish3"),
          restart_controller)  # fmt: skip


def describe(watch: Watch, seconds: float) -> Iterator[str]:
    counts = "sed -n 's/.*JobState=\\([A-Z_]*\\).*/\\1/p' /var/log/slurm/jobcomp.log | sort | uniq -c"
    jobs = watch.cluster.ssh("controller", counts).stdout.split()
    ended = ", ".join(f"{number} {state}" for number, state in zip(jobs[::2], jobs[1::2], strict=True))
    date = time.strftime("%Y-%m-%d")
    yield f"{date}: a controller and 3 to 4 nodes of the sandbox under load, {seconds / 60:.0f} minutes, Slurm 22.05"
    yield ""
    yield f"jobs                                   {ended}"
    yield f"runs of the health program             {watch.program_runs}"
    yield f"runs of `shoal doctor`                 {watch.looks}"
    yield f"events                                 {', '.join(f'{n} {name}' for name, n in watch.events.items())}"
    yield ""
    yield f"errors that no event explains          {sum(watch.alarms.values())}"
    yield from (f"  {number} {text}" for text, number in watch.alarms.items())
    yield f"warnings that no event explains        {sum(watch.warnings.values())}"
    yield from (f"  {number} {text}" for text, number in watch.warnings.items())
    yield f"drains by Slurm or Shoal               {sum(watch.drains.values())}"
    yield from (f"  {number} {text}" for text, number in watch.drains.items())
    yield f"person's drain of {DRAINED} undone        {watch.undone}"
    yield ""
    yield "Findings while a command or a reboot was under way, about its hosts or jobs (and true: the host was away):"
    yield from (f"  {number} {text}" for text, number in (watch.expected or {"none": 0}).items())
