"""Queues a job that hangs again, without the nodes of the ranks that the others wait for.

The hook of the node of rank 0 starts it where the file says `health: {hung_jobs: requeue}`. Its ranks are asked by a
step of the job itself, with the rights of its user. Nothing is done where they do not tell which of them is behind,
where the job was submitted not to be queued again, or where it could not run without these nodes.
"""

from __future__ import annotations

import fcntl
import json
import os
import re
import signal
import subprocess
import sys
import time
from typing import Any

from .job_stacks import ranks_behind
from .node import CONFIG, PREFIX, STATE, read_text

ASK_TIMEOUT_S, SLURM_TIMEOUT_S, REQUEUE_TIMEOUT_S = 60, 20, 150
PATH = "/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin"
USABLE_STATES = ("idle", "alloc", "mix", "comp", "resv", "plnd", "planned")
DIRECTORY = os.path.dirname(os.path.abspath(__file__))


def main(job: str, user: str) -> None:
    """`user` is the id of who owns the processes that hang: nobody else's job is touched for them."""
    path = f"{STATE}/hung-{int(job)}"
    lock = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
    try:
        fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        os.close(lock)
        return  # the last run is still at it
    # The hook ends a run that takes too long: a job must not stay held then.
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(1))
    try:
        say(job, examine(job, user))
    finally:
        os.unlink(path)
        os.close(lock)


def examine(job: str, user: str) -> str:
    """What was done about a job, for the journal of the node."""
    fields = job_fields(slurm("scontrol", "show", "job", "--oneliner", job))
    if fields.get("JobState") != "RUNNING":
        return "it does not run any more"
    if not fields.get("UserId", "").endswith(f"({int(user)})"):
        return "the processes that hang are not those of its user"
    nodes = slurm("scontrol", "show", "hostnames", fields["NodeList"]).split()
    ranks = ask_ranks(job, fields, nodes)
    behind = nodes_behind(ranks, json.loads(read_text(CONFIG) or "{}").get("hung_after_s", 1800))
    if not behind:
        return f"{len(ranks)} ranks answered, and do not tell which one is behind"
    obstacle = obstacle_to_requeue(fields, nodes, behind)
    names = ",".join(sorted(behind))
    if obstacle:
        notify(job, f"{', '.join(sorted(behind.values()))}; not queued again: {obstacle}")
        return f"{names}: {obstacle}"
    notify(job, f"{', '.join(sorted(behind.values()))}; queued again without {names}")
    requeue_without(job, ",".join(filter(None, (fields.get("ExcNodeList", "").replace("(null)", ""), names))))
    return f"queued again without {names}"


def ask_ranks(job: str, fields: dict[str, str], nodes: list[str]) -> list[dict[str, Any]]:
    """What every rank does, by a step of the job, with the rights of its user."""
    match = re.fullmatch(r".*\((\d+)\)", fields.get("UserId", ""))
    group = re.fullmatch(r".*\((\d+)\)", fields.get("GroupId", ""))
    if not match or not group or int(match[1]) == 0:
        return []
    rights = ["setpriv", f"--reuid={match[1]}", f"--regid={group[1]}", "--clear-groups", "--inh-caps=-all"]
    count = str(len(nodes))
    step = ["srun", f"--jobid={job}", f"--nodes={count}", f"--ntasks={count}", "--ntasks-per-node=1", "--overlap"]
    step += ["--quiet", "--job-name=shoal-logs", "--mem=0", "--gres=none", "--mpi=none", "--chdir=/"]
    program = ["python3", "-I", "-S", "-B", f"{DIRECTORY}/job_stacks.py", job]
    ranks = []
    for line in slurm(*rights, *step, *program, timeout=ASK_TIMEOUT_S).splitlines():
        try:
            values = json.loads(line)
            if isinstance(values, dict) and isinstance(values["rank"], int) and values["node"] in nodes:
                ranks.append(values)
        except (ValueError, KeyError, TypeError):
            continue
    return ranks


def nodes_behind(ranks: list[dict[str, Any]], limit_s: float) -> dict[str, str]:
    """The nodes of the ranks that the others wait for, each with what is to be told; none where any rank goes on."""
    if any(rank.get("silence_s", 0.0) < limit_s for rank in ranks):
        return {}
    behind = ranks_behind(ranks)
    nodes = {str(rank["node"]): f"rank {rank['rank']} on {rank['node']} hangs" for rank in behind}
    return nodes if len(nodes) < len({rank["node"] for rank in ranks}) else {}


def obstacle_to_requeue(fields: dict[str, str], nodes: list[str], behind: dict[str, str]) -> str:
    if fields.get("Requeue") != "1":
        return "it was submitted with --no-requeue"
    required = fields.get("ReqNodeList", "(null)")
    if required != "(null)" and {*slurm("scontrol", "show", "hostnames", required).split()} & {*behind}:
        return "it asks for this node by name"
    states = slurm("sinfo", "--noheader", "--Node", f"--partition={fields['Partition']}", "--format=%N %t")
    usable = {name for name, state in (line.split() for line in states.splitlines()) if state.startswith(USABLE_STATES)}
    if len((usable | {*nodes}) - {*behind}) < len(nodes):
        return f"partition {fields['Partition']} has too few other nodes"
    return ""


def requeue_without(job: str, nodes: str) -> None:
    """Slurm takes nodes to leave out for a waiting job only: it is held meanwhile, and released whatever happens."""
    slurm("scontrol", "requeuehold", job)
    try:
        end = time.monotonic() + REQUEUE_TIMEOUT_S
        while time.monotonic() < end:
            if job_fields(slurm("scontrol", "show", "job", "--oneliner", job)).get("JobState") == "PENDING":
                slurm("scontrol", "update", f"jobid={job}", f"excnodelist={nodes}")
                comment = f"{PREFIX}training-hung: queued again without {nodes}"
                slurm("scontrol", "update", f"jobid={job}", f"admincomment={comment}")
                return
            time.sleep(2)
    finally:
        slurm("scontrol", "release", job)


def job_fields(text: str) -> dict[str, str]:
    return dict(re.findall(r"(?:^| )(\w+)=(\S*)", text))


def notify(job: str, text: str) -> None:
    slurm("scontrol", "notify", job, f"shoal: no step for long: {text}")


def say(job: str, text: str) -> None:
    slurm("logger", "-t", "shoal-health", f"job {job} hangs: {text}")


def slurm(*command: str, timeout: float = SLURM_TIMEOUT_S) -> str:
    """The output of a program; empty where it fails."""
    try:
        done = subprocess.run(
            command,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
            universal_newlines=True,
            env={"PATH": PATH, "HOME": "/"},
            timeout=timeout,
        )
    except (OSError, subprocess.SubprocessError):
        return ""
    return done.stdout
