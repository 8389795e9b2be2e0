"""What jobs leave behind, and GPUs that a job holds and does not use. Told by processes: no daemon is asked."""

from __future__ import annotations

import os
import re
import signal
import time
from typing import Callable, Iterator

from .gpu_checks import Gpu, gpus
from .node import Node, Process, read_text

HELD_PERCENT = 20
"""An idle node that uses this much more of its memory than at its best holds some back."""
BUSY_PERCENT = 95
"""By "utilization". At the power of an idle GPU, its kernels wait for those of other ranks."""
IDLE_PART = 0.1
"""A GPU computes nothing if it takes less than this part of its power limit more than without a process.

An H200 (700 W) takes 80 W, 126 W while a process holds it and waits, and 690 W while it multiplies.
"""
LOWEST_USER = 1000
"""Users below are the system's."""
STEP_TITLE = re.compile(r"\[(\d+)\.\w+\]")


def running_jobs(node: Node) -> set[str]:
    """The jobs that Slurm has here, by its step daemons."""
    if "jobs" not in node.cache:
        titles = (
            STEP_TITLE.search(read_text(f"/proc/{pid}/cmdline"))
            for pid, process in node.processes.items()
            if process.name == "slurmstepd"
        )
        node.cache["jobs"] = {title[1] for title in titles if title}
    jobs: set[str] = node.cache["jobs"]
    return jobs


def job_of(node: Node, process: Process) -> str:
    """The job that started a process; empty for none. Where jobs have no cgroups, what survives belongs to init."""
    match = re.search(r"/job_(\d+)", read_text(f"/proc/{process.pid}/cgroup"))
    if match:
        return match[1]
    while process.parent in node.processes:
        if process.name == "slurmstepd":
            title = STEP_TITLE.search(read_text(f"/proc/{process.pid}/cmdline"))
            return title[1] if title else ""
        if process.parent == 1:
            return process.environment.get("SLURM_JOB_ID", "") if process.name != "slurmd" else ""
        process = node.processes[process.parent]
    return ""


def seen_before(node: Node, key: str, processes: dict[str, str]) -> set[str]:
    """Which of these processes, by id and start, the last run has seen as well: the others may just be ending."""
    last = node.remember(key, processes) or {}
    return {pid for pid, start in processes.items() if last.get(pid) == start}


def check_surviving_steps(node: Node) -> Iterator[str]:
    """Processes of a job that Slurm no longer has."""
    jobs = {pid: job_of(node, process) for pid, process in node.processes.items() if process.name != "slurmstepd"}
    left = {pid: job for pid, job in jobs.items() if job and job not in running_jobs(node)}
    for pid in sorted(map(int, seen_before(node, "left", {str(pid): node.processes[pid].start for pid in left}))):
        yield f"{node.processes[pid]} of job {left[pid]}{end(node, node.processes[pid])}"


def check_gpu_processes(node: Node) -> Iterator[str]:
    """Processes that compute on a GPU without a job."""
    users: dict[int, Gpu] = {}
    for gpu in gpus(node):
        for pid in gpu.pids:
            process = node.processes.get(pid)  # a container does not see those of others
            if process is not None and job_of(node, process) not in running_jobs(node):
                users[pid] = gpu
    for pid in sorted(map(int, seen_before(node, "gpu_left", {str(pid): node.processes[pid].start for pid in users}))):
        yield f"{users[pid]}: {node.processes[pid]}{end(node, node.processes[pid])}"


def end(node: Node, process: Process) -> str:
    """Kill a process where the file says so, and say so. The system's own are left alone."""
    if node.config.get("leftovers") != "kill" or os.stat(f"/proc/{process.pid}").st_uid < LOWEST_USER:
        return ""
    os.kill(process.pid, signal.SIGKILL)
    return ", killed"


def check_held_memory(node: Node) -> Iterator[str]:
    """Memory in use while no job runs, more than at the node's best. Counted when two runs found no job."""
    was_idle = node.remember("idle", node.is_idle)
    if not (was_idle and node.is_idle):
        return
    sizes = dict(re.findall(r"^(\w+):\s+(\d+) kB", read_text("/proc/meminfo"), re.MULTILINE))
    total, used = int(sizes["MemTotal"]), int(sizes["MemTotal"]) - int(sizes["MemAvailable"])
    best = node.baseline.lowest("idle memory", used)
    if (used - best) * 100 > HELD_PERCENT * total:
        largest = max(node.processes.values(), key=lambda process: process.pages)
        shared = os.statvfs("/dev/shm")  # nosec B108 - only its size is read
        shared_mb = (shared.f_blocks - shared.f_bfree) * shared.f_frsize >> 20
        yield f"{used >> 10} MB in use without a job, at best {best / 1024:.0f} MB"
        yield f"largest: {largest}, {largest.pages * os.sysconf('SC_PAGE_SIZE') >> 20} MB; /dev/shm: {shared_mb} MB"


def check_idle_gpus(node: Node) -> Iterator[str]:
    """Jobs whose GPUs have no process, or take no more power than without one, longer than the file allows."""
    by_minor = {gpu.minor: gpu for gpu in gpus(node)}
    idle_minors = {minor for minor, gpu in by_minor.items() if _is_idle(node, gpu)}
    since: dict[str, float] = {}
    last = node.memory.get("idle_jobs") or {}
    for job, (user, minors) in _jobs_with_gpus(node).items():
        known = minors & {*by_minor}
        if not known or not known <= idle_minors:
            continue
        since[job] = float(last.get(job, node.now))
        idle_s, limit_s = node.now - since[job], float(node.config.get("idle_after_s", 3600))
        waits = all((by_minor[minor].utilization or 0) >= BUSY_PERCENT for minor in known)
        shown_s = min(limit_s, float(node.config.get("hung_after_s", 1800))) if waits else limit_s
        if idle_s < shown_s:
            continue
        began = time.strftime("%H:%M", time.localtime(since[job]))
        text = f"the GPUs of job {job} have been idle since {began}"
        if waits:
            text += ", by power: their kernels wait, as in a training that hangs"
        cancels = node.config.get("idle_gpus") == "cancel" and idle_s >= limit_s
        told = node.memory.setdefault("told", {})
        if told.get(job) != [since[job], cancels]:
            told[job] = [since[job], cancels]
            node.orders.append(f"notify {job} shoal: {text}{', so it is cancelled' if cancels else ''}")
            if cancels:
                node.orders.append(f"cancel {job}")
        yield f"{text} (user {user}{', cancelled' if cancels else ''})"
    node.memory["idle_jobs"] = since


def _is_idle(node: Node, gpu: Gpu) -> bool:
    """By power, not by "utilization": a kernel that waits for others counts as busy there."""
    watts, pids = gpu.watts, gpu.pids
    if watts is None:
        return not pids
    if not pids:
        node.baseline.lowest(f"idle watts {gpu.uuid}", watts)
        return True
    idle, limit = node.baseline.values.get(f"idle watts {gpu.uuid}"), gpu.number("nvmlDeviceGetEnforcedPowerLimit")
    return idle is not None and bool(limit) and watts < idle + IDLE_PART * (limit or 0) / 1000


def _jobs_with_gpus(node: Node) -> dict[str, tuple[str, set[int]]]:
    """The user and the GPUs of every job here, from the environment that Slurm gives its processes."""
    jobs: dict[str, tuple[str, set[int]]] = {}
    for process in node.processes.values():
        parent = node.processes.get(process.parent)
        if parent is None or parent.name != "slurmstepd":
            continue
        variables = process.environment
        numbers = variables.get("SLURM_JOB_GPUS") or variables.get("SLURM_STEP_GPUS") or ""
        job = variables.get("SLURM_JOB_ID", "")
        if job and re.fullmatch(r"\d+(,\d+)*", numbers):
            _, minors = jobs.setdefault(job, (process.user, set()))
            minors.update(map(int, numbers.split(",")))
    return jobs


LEFTOVER_CHECKS: dict[str, Callable[[Node], Iterator[str]]] = {
    "step-left": check_surviving_steps,
    "gpu-process-left": check_gpu_processes,
    "memory-held": check_held_memory,
    "gpu-idle": check_idle_gpus,
}
