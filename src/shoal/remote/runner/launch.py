"""Starts the ranks of a node, by itself or by torchrun, and passes signals on to them."""

from __future__ import annotations

import contextlib
import os
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable

from .node import (
    STOP_SIGNALS,
    WARNING_SIGNALS,
    contained,
    ignore_signals,
    note_warning,
    read_warnings,
    registered,
)

REPORT_AFTER_S = 8.0
"""As long as `shoal.train.init` waits before it explains."""
ANSWER_TIMEOUT_S = 2.0
"""Seconds that a host may take to answer."""


def spawn(count: int, command: list[str]) -> int:
    """Start the ranks of this node, wait for all; the first that fails ends the others."""
    node, nodes = int(os.environ["SLURM_NODEID"]), int(os.environ["SLURM_NNODES"])
    children: list[subprocess.Popen[bytes]] = []

    def pass_on(number: int, frame: object) -> None:
        for child in children:
            if child.returncode is None:
                child.send_signal(number)

    for number in STOP_SIGNALS:
        signal.signal(number, pass_on)
    for local in range(count):
        variables = dict(
            os.environ, RANK=str(node * count + local), LOCAL_RANK=str(local), WORLD_SIZE=str(nodes * count)
        )
        variables.update(LOCAL_WORLD_SIZE=str(count), GROUP_RANK=str(node), NODE_RANK=str(node), SHOAL_SPAWN="1")
        line = [sys.executable, "-I", "-S", os.path.abspath(sys.argv[0]), "rank", "--rank-from", "RANK", "--"]
        children.append(subprocess.Popen(line + command, env=variables, stdin=subprocess.PIPE))

    def warn(number: int) -> None:
        for child in children:
            with contextlib.suppress(OSError):
                os.write(child.stdin.fileno(), b"%d\n" % number)  # type: ignore[union-attr]

    read_warnings(warn)
    worst = 0
    running = list(children)
    while running:
        time.sleep(0.05)
        for child in [child for child in running if child.poll() is not None]:
            running.remove(child)
            if child.returncode and not worst:
                worst = child.returncode if child.returncode > 0 else 128 - child.returncode
                for other in running:
                    other.terminate()
    return worst


def agent(command: list[str]) -> int:
    """Start torchrun deaf to the stop signals and pass these on to the ranks, which it starts out of our sight."""
    first = os.environ.get("SLURM_NODEID", "0") == "0"
    # What differs from node to node. torchrun reads any of its options from a variable with PET_ before its name.
    os.environ["PET_RDZV_CONF"] = "is_host=%s" % ("true" if first else "false")
    os.environ["PET_LOCAL_ADDR"] = os.environ.get("SLURMD_NODENAME", "")
    os.environ["PET_SIGNALS_TO_HANDLE"] = "SIGHUP,SIGQUIT"
    for number in STOP_SIGNALS:
        signal.signal(number, signal_ranks)
    line = contained(command)
    child = subprocess.Popen(line, stdin=subprocess.DEVNULL, preexec_fn=lambda: ignore_signals(STOP_SIGNALS))
    read_warnings(signal_ranks)
    if not first:
        watch_arguments = (lambda: bool(registered(os.environ["SHOAL_JOB_DIR"])),)
        threading.Thread(target=watch_rendezvous, args=watch_arguments, daemon=True).start()
    status = child.wait()
    return status if status >= 0 else 128 - status


def relay() -> int:
    """Pass warnings on to the ranks of this node: mpirun hands standard input to its first rank alone."""
    for number in WARNING_SIGNALS:
        signal.signal(number, signal_ranks)
    read_warnings(signal_ranks)
    while True:  # until the batch script ends it
        signal.pause()


def signal_ranks(number: int, frame: object = None) -> None:
    """Send a stop signal to the ranks that others have started on this node."""
    note_warning(number)
    for pid in registered(os.environ["SHOAL_JOB_DIR"]) if number in STOP_SIGNALS else ():
        with contextlib.suppress(OSError):
            os.kill(pid, number)


def watch_rendezvous(joined: Callable[[], bool], silence: float = REPORT_AFTER_S) -> None:
    """Report why torchrun on this node cannot reach the one on the first node: torchrun itself is silent for a minute.

    `joined` says whether it has started its ranks.
    """
    address, port = os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"])
    time.sleep(silence)
    while not joined():
        why = connection_problem(address, port)
        if why is None:
            return
        if why:
            node = os.environ.get("SLURMD_NODENAME", "this node")
            text = "shoal: torchrun on %s does not reach the one on the first node, at %s port %d: %s\n"
            sys.stderr.write(text % (node, address, port, why))
            return
        time.sleep(ANSWER_TIMEOUT_S)


def connection_problem(address: str, port: int) -> str | None:
    """Why the port does not answer; None when it does. Empty while it may still open: torch takes long to load."""
    try:
        socket.create_connection((address, port), timeout=ANSWER_TIMEOUT_S).close()
    except ConnectionRefusedError:
        return ""
    except socket.timeout:
        return "no answer within %g s; a firewall between the nodes is the usual cause" % ANSWER_TIMEOUT_S
    except OSError as error:
        return error.strerror or str(error)
    return None
