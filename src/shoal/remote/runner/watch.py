"""Ends srun when ranks are gone and Slurm has not noticed: their slurmstepd was killed, or their host came back empty.

srun keeps a connection to each node of the job. It closes the one of a slurmstepd that died, and then waits for word of
its ranks, for ever. So where a connection is missing or silent, a step on each node looks for ranks that neither run
nor ended. When a host comes back, srun or other ranks may notice first, and fail: then the same is asked afterwards.
"""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import sys
import time

from .node import ranks_before_boot, registered

INTERVAL_S = 15.0
"""From one look at srun's connections to the next."""
CONFIRM_S = 3.0
"""A rank that has just ended is about to say so: only what is gone twice is gone."""
STEP_TIMEOUT_S = 60.0
ESTABLISHED = "01"
"""The state of a connection in /proc/net/tcp."""
SILENT_RETRANSMITS = 2
"""So often at least, within a second, TCP sends again what the host of a connection has not confirmed."""
RETURN_TIMEOUT_S = 60.0
"""From the first sign of a host that comes back to an answer of its slurmd."""
RESTARTED, KILLED = "the host was started again", "killed with its slurmstepd"
ABORT_S = 40.0
"""As long as srun waits for ranks that it was told to end."""


def watch(srun: int, mpirun: int = 0, interval: float = INTERVAL_S) -> int:
    """Watch until srun ends. Our standard output is its standard input. Where mpirun started the ranks, it is ended."""
    expected = int(os.environ["SLURM_JOB_NUM_NODES"])
    while _is_running(srun, interval):
        # A word for nobody. A host that came back rejects it, and srun closes its connection.
        with contextlib.suppress(OSError):
            os.write(1, b"\n")
        time.sleep(min(1.0, interval))
        connections = _connections(srun)
        if connections >= expected:
            expected = connections
            continue
        gone = _ask_nodes("lost")
        if gone == set():
            expected = connections  # those of a node have all ended, or none has started yet
        if gone and _is_running(srun, CONFIRM_S):
            gone &= _ask_nodes("lost") or set()
        if gone and _is_running(srun, 0):
            _report(gone)
            _end(mpirun or srun)
            break
    return 0


def check_end() -> int:
    """After srun has failed: report the ranks whose host was started again. That made srun or the others fail."""
    end = time.monotonic() + RETURN_TIMEOUT_S
    gone = _ask_nodes("restarted")
    while gone is None and time.monotonic() < end:
        time.sleep(CONFIRM_S)
        gone = _ask_nodes("restarted")
    if gone:
        _report(gone)
    return 0


def print_lost(mode: str) -> int:
    """Print the ranks that are gone from this node, and why: `rank 3 on gpu02: the host was started again`."""
    node, restart = os.environ["SLURMD_NODENAME"], os.environ.get("SLURM_RESTART_COUNT", "0")
    directory = os.environ["SHOAL_JOB_DIR"]
    restarted = ranks_before_boot(directory, restart)
    for rank in lost_ranks(directory, restart, node) if mode == "lost" else restarted:
        print("rank %d on %s: %s" % (rank, node, RESTARTED if rank in restarted else KILLED))
    return 0


def lost_ranks(directory: str, restart: str, node: str) -> list[int]:
    """The ranks of this node that started in this turn, and neither run nor have left word of their end."""
    started = []
    for name in os.listdir(directory) if os.path.isdir(directory) else []:
        rank, _, kind = name.partition(".")
        if kind == restart + ".node" and not os.path.exists(os.path.join(directory, rank + "." + restart + ".end")):
            with contextlib.suppress(OSError), open(os.path.join(directory, name)) as file:
                started += [int(rank.partition("-")[2])] if file.read().strip() == node else []
    return sorted({*started} - {*registered(directory).values()})


def _ask_nodes(mode: str) -> set[str] | None:
    """What `print_lost` prints on each node; None where a node does not answer."""
    nodes = os.environ["SLURM_JOB_NUM_NODES"]
    step = ["srun", "--overlap", "--quiet", "--mpi=none", "--input=none", "--nodes=" + nodes, "--ntasks=" + nodes]
    program = [sys.executable, "-I", "-S", os.path.abspath(sys.argv[0]), mode, "--"]
    try:
        done = subprocess.run(
            # The ranks have the memory of the job: with 0 the step shares it.
            [*step, "--ntasks-per-node=1", "--cpus-per-task=1", "--mem=0", *program],
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
            timeout=STEP_TIMEOUT_S,
        )
    except (OSError, subprocess.SubprocessError):
        return None
    if done.returncode != 0:
        return None
    return {line for line in done.stdout.decode(errors="replace").splitlines() if line.startswith("rank ")}


def _report(gone: set[str]) -> None:
    """Leave word for the batch script, which requeues the job or fails, and for those who ask why."""
    restart = os.environ.get("SLURM_RESTART_COUNT", "0")
    # The host that came back has cancelled the step, and so killed the others.
    gone = {line for line in gone if line.endswith(RESTARTED)} or gone
    ranks: dict[str, list[str]] = {}
    for rank, _, cause in sorted(line.partition(": ") for line in gone):
        ranks.setdefault(cause, []).append(rank)
    text = "; ".join("%s: %s" % (", ".join(ranks[cause]), cause) for cause in sorted(ranks))
    sys.stderr.write("shoal: lost in turn %s: %s\n" % (restart, text))
    sys.stderr.flush()
    path = os.path.join(os.environ["SHOAL_JOB_DIR"], "lost.%s" % restart)
    with contextlib.suppress(OSError), open(path, "w") as note:
        note.write("\n".join(sorted(gone)) + "\n")


def _end(launcher: int) -> None:
    for number, pause in ((signal.SIGTERM, ABORT_S), (signal.SIGKILL, 0.0)):
        with contextlib.suppress(OSError):
            os.kill(launcher, number)
        if not _is_running(launcher, pause):
            return


def _is_running(pid: int, seconds: float) -> bool:
    """Whether the process still runs after so many seconds; False as soon as it does not."""
    end = time.monotonic() + seconds
    while _state(pid) not in ("", "Z"):
        if time.monotonic() >= end:
            return True
        time.sleep(min(1.0, max(0.0, end - time.monotonic())))
    return False


def _state(pid: int) -> str:
    try:
        with open("/proc/%d/stat" % pid) as file:
            return file.read().rpartition(") ")[2][:1]
    except OSError:
        return ""


def _connections(pid: int) -> int:
    """How many TCP connections of a process are alive. srun has one for each node that runs its tasks."""
    sockets = set()
    with contextlib.suppress(OSError):
        for name in os.listdir("/proc/%d/fd" % pid):
            with contextlib.suppress(OSError):
                sockets.add(os.readlink("/proc/%d/fd/%s" % (pid, name)))
    count = 0
    for table in ("tcp", "tcp6"):
        with contextlib.suppress(OSError), open("/proc/%d/net/%s" % (pid, table)) as file:
            rows = [line.split() for line in file][1:]
            count += sum(_is_alive(row) and "socket:[%s]" % row[9] in sockets for row in rows)
    return count


def _is_alive(row: list[str]) -> bool:
    """Of a row of /proc/net/tcp. A host without power confirms nothing, and the connection stays for a quarter hour."""
    return row[3] == ESTABLISHED and int(row[6], 16) < SILENT_RETRANSMITS
