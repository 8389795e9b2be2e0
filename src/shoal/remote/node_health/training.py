"""Trainings that make no step. Their ranks keep the last one in memory (`shoal.train`): no file of a user is read."""

from __future__ import annotations

import os
from typing import Any, Callable, Iterator

from .job_stacks import read_step
from .leftovers import LOWEST_USER, running_jobs
from .node import Node, Process

HUNG_STEPS = 20
"""A training hangs if it has made no step for as long as it needs for so many, and for as long as the file says."""


def check_hung_trainings(node: Node) -> Iterator[str]:
    """Ranks that make no step. Where the file says so, the node of rank 0 has the job looked at and queued again."""
    limit_s = float(node.config.get("hung_after_s", 1800))
    jobs = running_jobs(node)
    for process in node.processes.values() if jobs else ():
        step = _last_step(process)
        if not step or step["silence_s"] < max(limit_s, HUNG_STEPS * step["median_s"]):
            continue
        variables = process.environment
        job, rank = variables.get("SLURM_JOB_ID", ""), variables.get("RANK") or variables.get("SLURM_PROCID", "")
        if job not in jobs:
            continue
        if rank == "0" and node.config.get("hung_jobs") == "requeue":
            order = f"hung {job} {os.stat(f'/proc/{process.pid}').st_uid}"
            node.orders.extend(() if order in node.orders else (order,))
        minutes, last = step["silence_s"] / 60, step["step"]
        yield (
            f"job {job}: rank {rank} (pid {process.pid}, user {process.user}) has made no step for {minutes:.0f} min, "
            f"and one takes {step['median_s']:.2g} s; the last was {last}"
        )


def _last_step(process: Process) -> dict[str, Any]:
    """What a user's process says of its steps; empty where it says nothing, or not yet how long one takes."""
    try:
        if os.stat(f"/proc/{process.pid}").st_uid < LOWEST_USER:
            return {}
    except OSError:
        return {}
    step = read_step(process.pid)
    return step if "median_s" in step else {}


TRAINING_CHECKS: dict[str, Callable[[Node], Iterator[str]]] = {"training-hung": check_hung_trainings}
