"""Times `shoal doctor` beside `shoal up` without changes, and the health program of a node with its hook in Slurm."""

from __future__ import annotations

import argparse
import base64
import json
import os
import shlex
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from statistics import median

from harness import BenchError, bench_parser, describe_machine, report, run_bench, show_progress
from sandbox import NODE, add_cluster_options, provide_cluster, targets, write_ssh_config
from tests import nvml

from shoal.remote.node_health.node import INTERVAL_S
from shoal.roles.node_health import COMMAND
from shoal.slurm.conf import HEALTH_HOOK, HEALTH_INTERVAL_S

SHOAL = Path(sys.executable).with_name("shoal")
SPEC = """\
cluster: bench-doctor
controller: {provider: sandbox}
nodesets:
  fish: {provider: sandbox, count: NODES, gpus: 2}
"""
MAX_RATIO, MAX_CPU_PERCENT = 2.0, 0.1
GPUS = 8
"""Of the simulated NVML on the node whose health program is timed."""
TIMER = """
import json, os, resource, subprocess, sys, time
command, runs = json.load(sys.stdin)
results = []
for _ in range(runs):
    before, start = resource.getrusage(resource.RUSAGE_CHILDREN), time.perf_counter()
    subprocess.run(command, check=True)
    wall, after = time.perf_counter() - start, resource.getrusage(resource.RUSAGE_CHILDREN)
    results.append((wall, after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime))
print(json.dumps(results))
"""
"""On the node: wall time and CPU time of each run of a command, its children included."""
LIBRARY = "/usr/lib/$(uname -m)-linux-gnu/libnvidia-ml.so.1"
HEALTH = "/var/lib/shoal/health"
KEEP = f"cp -a {HEALTH} {HEALTH}.kept"
RESTORE = (
    f"rm -rf {LIBRARY} /etc/shoal-nvml {HEALTH} && ldconfig && mv {HEALTH}.kept {HEALTH}"
    " && systemctl start shoal-health.timer"
)
"""On the node, before and after it has simulated GPUs of a health program alone."""
Times = list[float]


def main() -> None:
    options = _parse_arguments()
    scratch = Path(tempfile.mkdtemp(prefix="doctor-"))
    os.environ["XDG_STATE_HOME"] = str(scratch / "state")
    heading = describe_machine(options)
    show_progress(heading)
    commands: dict[int, dict[str, Times]] = {}
    programs: dict[str, tuple[float, float]] = {}
    try:
        for number in options.hosts:
            (directory := scratch / str(number)).mkdir()
            show_progress(f"{number} hosts: shoal up")
            with provide_cluster(directory, SPEC.replace("NODES", str(number - 1)), options) as (cluster, spec, _):
                commands[number] = _time_commands(spec, number, options)
                if number == options.hosts[-1]:
                    write_ssh_config(scratch, targets(cluster))
                    programs = _time_programs(scratch, options)
    finally:
        shutil.rmtree(scratch, ignore_errors=True)
    text = f"{heading}\n\n{_commands_table(commands)}\n{_programs_table(programs)}\n{_targets(commands, programs)}\n"
    report("doctor-times", options, text)


def _time_commands(spec: Path, number: int, options: argparse.Namespace) -> dict[str, Times]:
    """The two commands in turn on a cluster that is healthy and needs no change."""
    _wait("every node has been checked once", lambda: not _run("doctor", spec)["findings"])
    times: dict[str, Times] = {"up": [], "doctor": []}
    for round_number in range(options.rounds + 1):
        for name in times:
            start = time.perf_counter()
            result = _run(name, spec)
            seconds = time.perf_counter() - start
            if name == "up" and (result["created"] or result["changed"] or result["removed"]):
                raise BenchError(f"`shoal up` still has changes: {result}")
            if name == "doctor" and (result["findings"] or len(result["checked"]) != number):
                raise BenchError(f"`shoal doctor` does not call the cluster healthy: {result}")
            if round_number or options.small:  # the first is a warm-up
                times[name].append(seconds)
                show_progress(f"  {name} {seconds:.2f} s")
    return times


def _run(name: str, spec: Path) -> dict[str, list[object]]:
    done = subprocess.run([SHOAL, name, "--json", "--file", spec], capture_output=True, text=True, timeout=600)
    try:
        result: dict[str, list[object]] = json.loads(done.stdout)
    except ValueError:
        raise BenchError(f"shoal {name} failed:\n{done.stdout}{done.stderr}") from None
    return result


def _wait(what: str, condition: Callable[[], bool], seconds: float = 120.0) -> None:
    end = time.monotonic() + seconds
    while not condition():
        if time.monotonic() > end:
            raise BenchError(f"{what}: not within {seconds:.0f} s")
        time.sleep(1)


def _time_programs(scratch: Path, options: argparse.Namespace) -> dict[str, tuple[float, float]]:
    """Wall and CPU seconds of a run of the health program and of its hook, on a node with simulated GPUs."""
    _ssh(scratch, KEEP)
    try:
        return _time_with_simulated_gpus(scratch, options)
    finally:
        _ssh(scratch, RESTORE)


def _time_with_simulated_gpus(scratch: Path, options: argparse.Namespace) -> dict[str, tuple[float, float]]:
    library = base64.b64encode(nvml.build(scratch).read_bytes()).decode()
    answers = nvml.answers(*({} for _ in range(GPUS)))
    _ssh(
        scratch,
        f"echo {library} | base64 -d > {LIBRARY}; ldconfig; "
        f"echo {shlex.quote(answers)} > /etc/shoal-nvml; systemctl stop shoal-health.timer",
    )
    medians = {}
    commands = {"health program": [*COMMAND], "hook": ["env", f"SLURMD_NODENAME={NODE}", HEALTH_HOOK]}
    for name, command in commands.items():
        show_progress(f"{name} on {NODE}")
        runs = 1 if options.small else 20
        timer = f"python3 -c {shlex.quote(TIMER)}"
        results = json.loads(_ssh(scratch, timer, json.dumps([command, runs + 1])))[1:]
        medians[name] = median(wall for wall, _ in results), median(cpu for _, cpu in results)
    found = json.loads(_ssh(scratch, "cat /var/lib/shoal/health/baseline.json"))
    if len(found["values"].get("GPUs", ())) != GPUS:
        raise BenchError(f"the health program did not see the {GPUS} GPUs: {found}")
    return medians


def _ssh(directory: Path, command: str, stdin: str = "") -> str:
    line = ["ssh", "-F", str(directory / "ssh_config"), NODE, command]
    done = subprocess.run(line, input=stdin, capture_output=True, text=True, timeout=600)
    if done.returncode != 0:
        raise BenchError(f"a command failed on {NODE}:\n{done.stdout}{done.stderr}")
    return done.stdout


def _commands_table(commands: dict[int, dict[str, Times]]) -> str:
    lines = [f"{'hosts':>5}{'up, no change':>16}{'doctor':>10}{'doctor / up':>13}{'range of doctor':>20}"]
    for number, times in commands.items():
        up, doctor = median(times["up"]), median(times["doctor"])
        span = f"{min(times['doctor']):.2f} to {max(times['doctor']):.2f} s"
        lines.append(f"{number:>5}{up:>14.2f} s{doctor:>8.2f} s{_ratio(times):>12.2f}x{span:>20}")
    return "\n".join(lines) + "\n"


def _ratio(times: dict[str, Times]) -> float:
    """The median of the ratios in the same round, so that load affects both."""
    return median(doctor / up for doctor, up in zip(times["doctor"], times["up"], strict=True))


def _programs_table(programs: dict[str, tuple[float, float]]) -> str:
    intervals = {"health program": INTERVAL_S, "hook": HEALTH_INTERVAL_S}
    lines = [f"{'on a node':<16}{'time':>10}{'CPU':>10}{'every':>9}{'of a core':>13}"]
    for name, (wall, cpu) in programs.items():
        share = 100 * cpu / intervals[name]
        lines.append(f"{name:<16}{wall * 1000:>7.0f} ms{cpu * 1000:>7.0f} ms{intervals[name]:>7} s{share:>11.4f} %")
    return "\n".join(lines) + f"\n(a node with {GPUS} GPUs of a simulated NVML; medians)\n"


def _targets(commands: dict[int, dict[str, Times]], programs: dict[str, tuple[float, float]]) -> str:
    number = max(commands)
    percent = 100 * (programs["health program"][1] / INTERVAL_S + programs["hook"][1] / HEALTH_INTERVAL_S)
    checks = [
        (f"doctor / up without changes, at {number} hosts", _ratio(commands[number]), MAX_RATIO),
        ("health program and hook, in percent of a core", percent, MAX_CPU_PERCENT),
    ]
    lines = [
        f"  {'met   ' if value <= bound else 'MISSED'} {what}: {value:.2g} (at most {bound:g})"
        for what, value, bound in checks
    ]
    return "\n".join(["Targets:", *lines])


def _parse_arguments() -> argparse.Namespace:
    parser = bench_parser("doctor", __doc__ or "", result="doctor-times")
    parser.add_argument("--hosts", type=_host_counts, default=[3, 16], help="numbers of hosts, for example 3,16")
    parser.add_argument("--rounds", type=int, default=5, help="how often each command runs on each number of hosts")
    add_cluster_options(parser)
    options = parser.parse_args()
    if options.small:
        options.hosts, options.rounds = [3 if options.on else 2], 0
    return options


def _host_counts(text: str) -> list[int]:
    counts = [int(word) for word in text.split(",")]
    if min(counts) < 2:
        raise argparse.ArgumentTypeError("a cluster has at least 2 hosts: a controller and a node")
    return counts


if __name__ == "__main__":
    run_bench("doctor", main)
