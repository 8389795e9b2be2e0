"""Ranks that are gone without Slurm's notice: the program beside srun, run for real with a stand-in for srun."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from shoal.jobs.failure import explain_failure
from shoal.jobs.logs import BATCH, JobLogs, LogLine
from shoal.jobs.record import JobRecord
from shoal.remote import runner
from shoal.remote.runner.watch import lost_ranks

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


def ranks(directory: Path, *names: str) -> None:
    directory.mkdir(exist_ok=True)
    for name in names:
        (directory / name).write_text("n1\n")


def test_rank_that_neither_runs_nor_ended_is_lost(tmp_path: Path) -> None:
    ranks(tmp_path, "rank-0.1.node", "rank-0.1.end", "rank-3.1.node", "rank-4.0.node")
    (tmp_path / "rank-5.1.node").write_text("n2\n")
    assert lost_ranks(str(tmp_path), "1", "n1") == ["rank 3"]
    assert lost_ranks(str(tmp_path), "1", "n2") == ["rank 5"]
    assert lost_ranks(str(tmp_path / "none"), "1", "n1") == []


def test_rank_that_runs_is_not_lost(tmp_path: Path) -> None:
    ranks(tmp_path, "rank-0.0.node")
    waits = [sys.executable, "-c", "import time; print(flush=True); time.sleep(60)", "/start.py", "rank", ""]
    with subprocess.Popen(waits, stdout=subprocess.PIPE) as process:
        assert process.stdout is not None and process.stdout.read(1)
        (tmp_path / f"pids.{os.uname().nodename}").mkdir()
        (tmp_path / f"pids.{os.uname().nodename}" / str(process.pid)).touch()
        try:
            assert lost_ranks(str(tmp_path), "0", "n1") == []
        finally:
            process.kill()
    assert lost_ranks(str(tmp_path), "0", "n1") == ["rank 0"]


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
        assert process.stdout is not None and process.stdout.read(1)
        (tmp_path / f"pids.{os.uname().nodename}").mkdir()
        (tmp_path / f"pids.{os.uname().nodename}" / str(process.pid)).touch()
        with subprocess.Popen(relay, env={"SHOAL_JOB_DIR": str(tmp_path)}, stdin=subprocess.PIPE) as beside:
            try:
                assert beside.stdin is not None
                beside.stdin.write(b"\nUSR1\n")
                beside.stdin.flush()
                assert process.wait(60) == 5 and beside.poll() is None
            finally:
                process.kill()
                beside.kill()


@pytest.mark.parametrize("gone", [True, False])
def test_srun_is_ended_only_when_a_node_misses_ranks(tmp_path: Path, gone: bool) -> None:
    job = tmp_path / "17"
    ranks(job, "rank-0.0.node", *([] if gone else ["rank-0.0.end"]))
    (tmp_path / "srun").write_text(
        f'#!/bin/sh\ntouch {tmp_path}/asked\nwhile [ "$1" != "$PYTHON" ]; do shift; done\nexec "$@"\n'
    )
    (tmp_path / "srun").chmod(0o755)
    environ = {"PATH": f"{tmp_path}:/usr/bin:/bin", "PYTHON": sys.executable, "SHOAL_JOB_DIR": str(job)}
    environ |= {"SLURM_JOB_NUM_NODES": "2", "SLURMD_NODENAME": "n1"}
    srun = subprocess.Popen([sys.executable, "-c", SRUN], cwd=tmp_path)
    while not (tmp_path / "up").exists():
        assert srun.poll() is None
    line = [sys.executable, "-c", WATCH, str(srun.pid)]
    watch = subprocess.Popen(line, env=environ, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
    try:
        assert watch.stdout is not None and watch.stdout.read(2) == "\n\n"  # at the second it has looked once
        (tmp_path / "die").touch()
        if gone:
            said = watch.communicate(timeout=60)[1]
            assert srun.wait(60) == -signal.SIGTERM
            assert said.startswith("shoal: lost: rank 0 on n1: ")
            assert (job / "lost.0").read_text() == "rank 0 on n1\n"
        else:
            while not (tmp_path / "asked").exists():
                assert watch.poll() is None
            assert srun.poll() is None and not (job / "lost.0").exists()
    finally:
        srun.kill()
        watch.kill()
        srun.wait(60)
        watch.communicate(timeout=60)
