"""Nodes that Slurm marked DOWN and that answer again: the real program, with a stand-in for scontrol."""

import os
import socket
import subprocess
from contextlib import suppress
from pathlib import Path
from threading import Thread

from tests.support.cases import cases

from shoal.roles.controller import CHECK_INTERVAL_S, program
from shoal.slurm.conf import SLURMD_PORT

GIVEN_UP = "State=DOWN+NOT_RESPONDING"


def node(state: str, reason: str, port: str = "") -> str:
    """As `scontrol -o show nodes` prints it."""
    return (
        f"NodeName=n1 Arch=x86_64 CoresPerSocket=1 NodeAddr=127.0.0.1 NodeHostName=n1 {port}Version=22.05.8 {state} "
        f"ThreadsPerCore=1 Partitions=main  BootTime=2026-11-15T02:27:08 Reason={reason} [slurm@2026-11-16T00:24:01]\n"
    )


def asked(place: Path, nodes: str, slurmd: str = "runs") -> str:
    """The program's calls of Slurm with these nodes; slurmd `runs` there, is `stopped` or `off`."""
    scontrol = place / "scontrol"
    scontrol.write_text('#!/bin/sh\ncase $1 in -o) cat "$PLACE/nodes" ;; *) echo "$@" >> "$PLACE/asked" ;; esac\n')
    scontrol.chmod(0o755)
    (place / "asked").write_text("")
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        if slurmd != "off":
            listener.listen()
        if slurmd == "runs":
            Thread(target=hang_up, args=(listener,), daemon=True).start()
        at = listener.getsockname()[1]
        probe_command = "timeout 1 bash" if slurmd == "stopped" else "timeout 120 bash"
        script = (
            program()
            .replace(f"while sleep {CHECK_INTERVAL_S}; do", "for once in 1; do")
            .replace(f"port={SLURMD_PORT}", f"port={at}")
            .replace("timeout 10 bash", probe_command)
        )
        (place / "nodes").write_text(nodes.replace("Port=its-own", f"Port={at}"))
        environment = {"PATH": f"{place}:{os.environ['PATH']}", "PLACE": str(place)}
        subprocess.run(["bash", "-c", script], env=environment, check=True, capture_output=True, timeout=300)
    return (place / "asked").read_text()


def hang_up(listener: socket.socket) -> None:
    """Close connections, as slurmd does for data that is no message. Ends with the test."""
    with suppress(OSError):
        while True:
            call, _ = listener.accept()
            with call:
                call.recv(4)


def test_node_marked_down_by_slurm_that_answers_is_resumed(tmp_path: Path) -> None:
    assert asked(tmp_path, node(GIVEN_UP, "Not responding")) == "update nodename=n1 state=resume\n"


def test_container_is_probed_on_its_own_port(tmp_path: Path) -> None:
    given_up = node(GIVEN_UP, "Not responding", "Port={} ")
    assert asked(tmp_path, given_up.format("its-own")) == "update nodename=n1 state=resume\n"
    assert asked(tmp_path, given_up.format("1")) == ""


@cases("slurmd", "stopped", "off")
def test_silent_node_stays_down(tmp_path: Path, slurmd: str) -> None:
    assert asked(tmp_path, node(GIVEN_UP, "Not responding"), slurmd) == ""


@cases(
    "state, reason",
    ("State=DOWN+DRAIN+NOT_RESPONDING", "Not responding"),
    ("State=DOWN+CLOUD+NOT_RESPONDING", "Not responding"),
    ("State=IDLE+NOT_RESPONDING", "Not responding"),
    (GIVEN_UP, "its disk is broken"),
    ("State=DOWN", "Low RealMemory"),
)
def test_node_set_down_by_the_operator_stays_down(tmp_path: Path, state: str, reason: str) -> None:
    assert asked(tmp_path, node(state, reason)) == ""


def test_stopped_slurmctld_does_not_end_the_program(tmp_path: Path) -> None:
    assert asked(tmp_path, "") == ""
    subprocess.run(["bash", "-n"], input=program(), text=True, check=True, timeout=60)
