"""Nodes that Slurm has given up and that are back: the program itself, run with a stand-in for scontrol."""

from __future__ import annotations

import os
import socket
import subprocess
from pathlib import Path

import pytest

from shoal.roles.returning import look, program
from shoal.slurm.conf import SLURMD_PORT

GIVEN_UP = "State=DOWN+NOT_RESPONDING"


def node(state: str, reason: str, port: str = "") -> str:
    """As `scontrol -o show nodes` says it."""
    return (
        f"NodeName=n1 Arch=x86_64 CoresPerSocket=1 NodeAddr=127.0.0.1 NodeHostName=n1 {port}Version=22.05.8 {state} "
        f"ThreadsPerCore=1 Partitions=main  BootTime=2026-11-15T02:27:08 Reason={reason} [slurm@2026-11-16T00:24:01]\n"
    )


def asked(place: Path, nodes: str, *, listening: bool) -> str:
    """What the program asks of Slurm, whose nodes are these; whether a slurmd is there."""
    scontrol = place / "scontrol"
    scontrol.write_text('#!/bin/sh\ncase $1 in -o) cat "$PLACE/nodes" ;; *) echo "$@" >> "$PLACE/asked" ;; esac\n')
    scontrol.chmod(0o755)
    (place / "asked").write_text("")
    with socket.socket() as slurmd:
        slurmd.bind(("127.0.0.1", 0))
        if listening:
            slurmd.listen()
        at = slurmd.getsockname()[1]
        script = look().replace(f"port={SLURMD_PORT}", f"port={at}")
        (place / "nodes").write_text(nodes.replace("Port=its-own", f"Port={at}"))
        environment = {"PATH": f"{place}:{os.environ['PATH']}", "PLACE": str(place)}
        subprocess.run(["bash", "-c", script], env=environment, check=True, capture_output=True, timeout=300)
    return (place / "asked").read_text()


def test_a_node_that_slurm_has_given_up_and_that_answers_is_asked_again(tmp_path: Path) -> None:
    assert asked(tmp_path, node(GIVEN_UP, "Not responding"), listening=True) == "update nodename=n1 state=resume\n"


def test_a_container_is_asked_at_the_port_of_its_own_that_slurm_has_for_it(tmp_path: Path) -> None:
    given_up = node(GIVEN_UP, "Not responding", "Port={} ")
    assert asked(tmp_path, given_up.format("its-own"), listening=True) == "update nodename=n1 state=resume\n"
    assert asked(tmp_path, given_up.format("1"), listening=True) == ""


def test_one_that_does_not_answer_is_left_as_it_is(tmp_path: Path) -> None:
    assert asked(tmp_path, node(GIVEN_UP, "Not responding"), listening=False) == ""


@pytest.mark.parametrize(
    ("state", "reason"),
    [
        ("State=DOWN+DRAIN+NOT_RESPONDING", "Not responding"),
        ("State=DOWN+CLOUD+NOT_RESPONDING", "Not responding"),
        ("State=IDLE+NOT_RESPONDING", "Not responding"),
        (GIVEN_UP, "its disk is broken"),
        ("State=DOWN", "Low RealMemory"),
    ],
)
def test_what_somebody_else_took_down_stays_down(tmp_path: Path, state: str, reason: str) -> None:
    assert asked(tmp_path, node(state, reason), listening=True) == ""


def test_a_slurmctld_that_is_away_ends_nothing(tmp_path: Path) -> None:
    assert asked(tmp_path, "", listening=True) == ""
    subprocess.run(["bash", "-n"], input=program(), text=True, check=True, timeout=60)
