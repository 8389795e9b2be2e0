"""Ranks that are gone without Slurm's notice, and a torchrun that cannot reach the first node: the real programs."""

import contextlib
import os
import signal
import socket
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
from tests.support.cases import cases

from shoal.jobs.failure import explain_failure
from shoal.jobs.logs import BATCH, JobLogs, LogLine
from shoal.jobs.record import JobRecord
from shoal.remote import runner
from shoal.remote.runner.launch import connection_problem, watch_rendezvous
from shoal.remote.runner.node import boot_identity, ranks_before_boot, registered
from shoal.remote.runner.watch import KILLED, RESTARTED, _is_alive, _report, lost_ranks

START = str(Path(runner.__file__).parents[1] / "start.py")
# A connection, which it closes when the file `die` is there, as srun does when a slurmstepd has died.
SRUN = """
import os, socket, time
server = socket.create_server(("127.0.0.1", 0))
here = socket.create_connection(server.getsockname())
there = server.accept()
open("up", "w").close()
while not os.path.exists("die"):
    time.sleep(0.05)
here.close()
time.sleep(60)
"""
WATCH = f"""
import sys
sys.path.insert(0, {str(Path(START).parent)!r})
from runner.watch import watch
sys.argv[0] = {START!r}
watch(int(sys.argv[1]), interval=0.2)
"""


def register(directory: Path, pid: int, rank: int, turn: int = 0, boot: str = "") -> None:
    place = directory / f"pids.{os.uname().nodename}"
    place.mkdir(exist_ok=True)
    (place / str(pid)).write_text(f"{rank} {turn} {boot or boot_identity()}\n")


def ranks(directory: Path, *names: str) -> None:
    directory.mkdir(exist_ok=True)
    for name in names:
        (directory / name).write_text("n1\n")


def test_rank_that_neither_runs_nor_ended_is_lost(tmp_path: Path) -> None:
    ranks(tmp_path, "rank-0.1.node", "rank-0.1.end", "rank-3.1.node", "rank-4.0.node")
    (tmp_path / "rank-5.1.node").write_text("n2\n")
    assert lost_ranks(str(tmp_path), "1", "n1") == [3] and lost_ranks(str(tmp_path), "1", "n2") == [5]
    assert lost_ranks(str(tmp_path / "none"), "1", "n1") == []


def test_rank_that_runs_is_not_lost(tmp_path: Path) -> None:
    ranks(tmp_path, "rank-0.0.node")
    waits = [sys.executable, "-c", "import time; print(flush=True); time.sleep(60)", "/start.py", "rank", ""]
    with subprocess.Popen(waits, stdout=subprocess.PIPE) as process:
        assert process.stdout.read(1)
        register(tmp_path, process.pid, 0)
        try:
            assert lost_ranks(str(tmp_path), "0", "n1") == []
        finally:
            process.kill()
    assert lost_ranks(str(tmp_path), "0", "n1") == [0]


def test_rank_of_an_earlier_boot_is_gone_with_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Another process may have its number by now. Those of an earlier turn do not count."""
    ranks(tmp_path, "rank-0.1.node", "rank-1.1.node")
    register(tmp_path, os.getpid(), 0, turn=1, boot="other")
    register(tmp_path, 1, 7, turn=0, boot="other")
    assert ranks_before_boot(str(tmp_path), "1") == [0] and registered(str(tmp_path)) == {}
    environ = {"SHOAL_JOB_DIR": str(tmp_path), "SLURMD_NODENAME": "n1", "SLURM_RESTART_COUNT": "1"}
    for mode, expected in (
        ("lost", "rank 0 on n1: the host was started again\nrank 1 on n1: killed with its slurmstepd\n"),
        ("restarted", "rank 0 on n1: the host was started again\n"),
    ):
        line = [sys.executable, START, mode, "--"]
        done = subprocess.run(line, env=environ, capture_output=True, text=True, timeout=60, check=True)
        assert done.stdout == expected


def test_silent_connection_is_not_alive() -> None:
    row = "0: 0100007F:1F90 0100007F:D2F0 01 00000001:00000000 01:0000002A {} 0 0 4711 2".format
    assert _is_alive(row("00000001").split()) and not _is_alive(row("00000002").split())
    assert not _is_alive(row("00000000").replace(" 01 ", " 08 ", 1).split())


@cases("restarted", True, False)
def test_failure_after_the_restart_of_a_host_is_reported(tmp_path: Path, restarted: bool) -> None:
    """Of a rank that was killed on a host that still runs, only srun knows why."""
    ranks(tmp_path / "17", "rank-0.0.node", "rank-1.0.node")
    if restarted:
        register(tmp_path / "17", 4711, 1, boot="other")
    environ, line = stand_in(tmp_path), [sys.executable, START, "ended", "--"]
    done = subprocess.run(line, env=environ, capture_output=True, text=True, timeout=60, check=True)
    report = "shoal: lost in turn 0: rank 1 on n1: the host was started again\n" if restarted else ""
    assert done.stderr == report and (tmp_path / "17/lost.0").exists() == restarted


def test_ranks_that_were_killed_because_a_host_came_back_are_not_named(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("SHOAL_JOB_DIR", str(tmp_path))
    _report({f"rank 0 on n1: {KILLED}", f"rank 1 on n2: {RESTARTED}"})
    assert capsys.readouterr().err == "shoal: lost in turn 0: rank 1 on n2: the host was started again\n"
    assert (tmp_path / "lost.0").read_text() == "rank 1 on n2: the host was started again\n"


def stand_in(directory: Path) -> dict[str, str]:
    """An srun that runs the program here; the environment of a job with it."""
    (directory / "srun").write_text(
        f'#!/bin/sh\ntouch {directory}/asked\nwhile [ "$1" != "$PYTHON" ]; do shift; done\nexec "$@"\n'
    )
    (directory / "srun").chmod(0o755)
    environ = {"PATH": f"{directory}:/usr/bin:/bin", "PYTHON": sys.executable, "SHOAL_JOB_DIR": str(directory / "17")}
    return environ | {"SLURM_JOB_NUM_NODES": "2", "SLURMD_NODENAME": "n1"}


def test_ranks_killed_with_their_runner_are_explained_by_what_they_printed() -> None:
    """As after MPI_Abort under PMIx."""
    record = JobRecord("7", "FAILED", exit_code=137, nodes="fish[1-2]", batch_host="fish1")
    slurm = LogLine(2.0, BATCH, 0, "slurmstepd-fish1: error: *** STEP 7.0 ON fish1 CANCELLED ***")
    output = LogLine(1.0, 3, 0, "*** MPI_ERR_WIN: invalid window", "fish2")
    reason = explain_failure(record, JobLogs((output, slurm), ()))
    assert reason is not None
    assert reason.text == "the ranks were killed; rank 3 on fish2 printed last: *** MPI_ERR_WIN: invalid window"


def test_nodes_without_mpirun_are_named_with_the_package() -> None:
    record = JobRecord("7", "FAILED", exit_code=127, nodes="fish[1-2]", batch_host="fish1")
    said = LogLine(1.0, BATCH, 0, "shoal: no mpirun of Open MPI on fish1,fish2")
    reason = explain_failure(record, JobLogs((said,), ()))
    assert reason is not None and "no mpirun of Open MPI on fish1,fish2" in reason.text and "openmpi-bin" in reason.fix


def test_warning_beside_mpirun_reaches_the_ranks_of_the_node(tmp_path: Path) -> None:
    handles = "import signal, sys; signal.signal(signal.SIGUSR1, lambda *_: sys.exit(5)); print(flush=True)"
    waits = [sys.executable, "-c", handles + "; signal.pause()", "/start.py", "rank", ""]
    relay = [sys.executable, "-I", "-S", START, "relay", "--"]
    with subprocess.Popen(waits, stdout=subprocess.PIPE) as process:
        assert process.stdout.read(1)
        register(tmp_path, process.pid, 0)
        with subprocess.Popen(relay, env={"SHOAL_JOB_DIR": str(tmp_path)}, stdin=subprocess.PIPE) as beside:
            try:
                beside.stdin.write(b"\nUSR1\n")
                beside.stdin.flush()
                assert process.wait(60) == 5 and beside.poll() is None
            finally:
                process.kill()
                beside.kill()


@cases("gone", True, False)
def test_srun_is_ended_only_when_a_node_misses_ranks(tmp_path: Path, gone: bool) -> None:
    job = tmp_path / "17"
    ranks(job, "rank-0.0.node", *([] if gone else ["rank-0.0.end"]))
    environ = stand_in(tmp_path)
    srun = subprocess.Popen([sys.executable, "-c", SRUN], cwd=tmp_path)
    while not (tmp_path / "up").exists():
        assert srun.poll() is None
    line = [sys.executable, "-c", WATCH, str(srun.pid)]
    watch = subprocess.Popen(line, env=environ, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
    try:
        assert watch.stdout.read(2) == "\n\n"  # at the second it has looked once
        (tmp_path / "die").touch()
        if gone:
            said = watch.communicate(timeout=60)[1]
            assert srun.wait(60) == -signal.SIGTERM
            assert said == "shoal: lost in turn 0: rank 0 on n1: killed with its slurmstepd\n"
            assert (job / "lost.0").read_text() == "rank 0 on n1: killed with its slurmstepd\n"
        else:
            while not (tmp_path / "asked").exists():
                assert watch.poll() is None
            assert srun.poll() is None and not (job / "lost.0").exists()
    finally:
        srun.kill()
        watch.kill()
        srun.wait(60)
        watch.communicate(timeout=60)


@pytest.fixture
def silent() -> Iterator[int]:
    """A port at which nothing comes back, as behind a firewall: its queue is full."""
    with contextlib.ExitStack() as stack:
        port = stack.enter_context(socket.create_server(("127.0.0.1", 0), backlog=0)).getsockname()[1]
        for _ in range(4):
            waiting = stack.enter_context(socket.socket())
            waiting.setblocking(False)
            waiting.connect_ex(("127.0.0.1", port))
        yield int(port)


@pytest.fixture
def closed() -> int:
    """A port without a listener."""
    with socket.create_server(("127.0.0.1", 0)) as server:
        return int(server.getsockname()[1])


def test_silent_host_differs_from_a_torchrun_not_started_yet(silent: int, closed: int) -> None:
    assert connection_problem("127.0.0.1", silent) == (
        "no answer within 2 s; a firewall between the nodes is the usual cause"
    )
    assert connection_problem("127.0.0.1", closed) == ""
    with socket.create_server(("127.0.0.1", 0)) as server:
        assert connection_problem("127.0.0.1", server.getsockname()[1]) is None


def test_rendezvous_problem_is_printed_once_with_both_ends(
    silent: int, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("MASTER_ADDR", "127.0.0.1")
    monkeypatch.setenv("MASTER_PORT", str(silent))
    monkeypatch.setenv("SLURMD_NODENAME", "gpu02")
    watch_rendezvous(lambda: False, silence=0)
    assert capsys.readouterr().err == (
        f"shoal: torchrun on gpu02 does not reach the one on the first node, at 127.0.0.1 port {silent}:"
        " no answer within 2 s; a firewall between the nodes is the usual cause\n"
    )


def test_nothing_is_printed_once_the_ranks_start(
    silent: int, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("MASTER_ADDR", "127.0.0.1")
    monkeypatch.setenv("MASTER_PORT", str(silent))
    watch_rendezvous(lambda: True, silence=0)
    assert capsys.readouterr().err == ""
