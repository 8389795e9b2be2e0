"""Puts the job back into Slurm's queue, so that it goes on from its checkpoint.

Preemption (PreemptMode=REQUEUE) and the loss of a node requeue a job without our help. A job that comes to its time
limit, or that is told to stop by --signal, must ask for it.
"""

from __future__ import annotations

import logging
import os
import re
import shutil
import subprocess
from collections.abc import Mapping
from typing import Literal

from shoal.train.ranks import Ranks

log = logging.getLogger("shoal.train.requeue")

_PATIENCE = 20.0
"""Seconds for a busy slurmctld to answer."""


def job_to_requeue(environ: Mapping[str, str]) -> str:
    """This job as `scontrol requeue` wants it named; empty outside Slurm.

    A member of an array is `12_3`: its own SLURM_JOB_ID may be that of the whole array. Of a heterogeneous job the
    leader is requeued, and the rest with it.
    """
    if "SLURM_ARRAY_JOB_ID" in environ and "SLURM_ARRAY_TASK_ID" in environ:
        return f"{environ['SLURM_ARRAY_JOB_ID']}_{environ['SLURM_ARRAY_TASK_ID']}"
    return environ.get("SLURM_HET_JOB_ID") or environ.get("SLURM_JOB_ID", "")


Answer = Literal["requeued", "cancelled", "failed"]


def requeue(ranks: Ranks | None = None, *, environ: Mapping[str, str] = os.environ) -> Answer:
    """Requeue this job: rank 0 asks Slurm, all ranks learn the answer. Collective.

    "failed" where it could not be done: leave with EXIT_REQUEUE then, which the batch script understands. "cancelled"
    where somebody ended the job on purpose: it must not come back.
    """
    everyone = ranks or Ranks()
    return everyone.from_rank_zero(_ask_slurm(environ) if everyone.rank == 0 else "failed")


def _ask_slurm(environ: Mapping[str, str]) -> Answer:
    job = job_to_requeue(environ)
    if not job:
        return "failed"
    scontrol = shutil.which("scontrol", path=environ.get("PATH"))
    if scontrol is None:
        log.warning("job %s is not requeued from here: there is no scontrol on this node (in this container)", job)
        return "failed"
    try:
        shown = subprocess.run([scontrol, "show", "job", job], capture_output=True, text=True, timeout=_PATIENCE)
        if _requeued_by_slurm(shown.stdout, environ):
            log.warning("job %s is in the queue again already", job)
            return "requeued"
        if _cancelled(shown.stdout):
            log.warning("job %s was cancelled: it is not requeued", job)
            return "cancelled"
        # Slurm ends the job's processes as soon as it is requeued, the one that asked for it among them.
        deaf = ["sh", "-c", 'trap "" TERM; exec "$0" "$@"', scontrol, "requeue", job]
        done = subprocess.run(deaf, capture_output=True, text=True, timeout=_PATIENCE)
    except (OSError, subprocess.TimeoutExpired) as error:
        log.error("job %s could not be requeued: %s", job, error)
        return "failed"
    if done.returncode != 0:
        log.error("job %s could not be requeued: %s", job, done.stderr.strip() or f"exit status {done.returncode}")
        return "failed"
    log.warning("job %s requeued", job)
    return "requeued"


def _requeued_by_slurm(shown: str, environ: Mapping[str, str]) -> bool:
    """Whether the job is on its next turn already: its grace has passed, or somebody requeued it."""
    restarts = re.search(r"\bRestarts=(\d+)", shown)
    return restarts is not None and int(restarts[1]) > int(environ.get("SLURM_RESTART_COUNT") or 0)


def _cancelled(shown: str) -> bool:
    """Whether `scontrol show job` tells of a job that somebody cancelled.

    Slurm shows it as COMPLETING while its processes still run, like one that reached its time limit; only that one has
    a reason.
    """
    state, reason = (re.search(rf"\b{name}=(\S+)", shown) for name in ("JobState", "Reason"))
    if state is None:
        return False
    if state[1].startswith("CANCELLED"):
        return True
    return state[1] == "COMPLETING" and (reason is None or reason[1] not in ("TimeLimit", "Preempted"))
