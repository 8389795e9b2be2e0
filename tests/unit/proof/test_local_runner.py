"""Runs on this machine: real processes that leave nothing behind, however they end."""

import asyncio
import json
import os
import re
import signal
import subprocess
import sys
from pathlib import Path

import pytest
from tests.support.cases import cases
from tests.support.waiting import wait_for

from shoal.errors import UsageError
from shoal.plan.progress import NoProgress
from shoal.proof.local_runner import LocalRunner
from shoal.proof.types import ProofRun, ProofSettings, ScriptFailed

ONE = ProofRun("python", "fsdp", 1)
HANG = """\
import os, subprocess, sys, time
child = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(600)"], start_new_session=True)
open(sys.argv[1], "w").write(f"{os.getpid()} {child.pid}")
time.sleep(600)
"""


def script(directory: Path, text: str) -> str:
    path = directory / "train.py"
    path.write_text(text)
    return str(path)


async def run(runner: LocalRunner, directory: Path, trial: ProofRun = ONE) -> None:
    with NoProgress().phase("", 1) as phase:
        await runner.run(trial, directory, phase)


def gone(pid: int) -> bool:
    """Whether a process has ended; a zombie counts as ended."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] == "Z"
    except OSError:
        return True


def wait_until_gone(*pids: int) -> None:
    wait_for(lambda: all(map(gone, pids)))


async def test_run_gets_the_proof_settings_and_no_outer_launcher_variables(tmp_path: Path) -> None:
    path = script(tmp_path, "import json, os, sys; json.dump([sys.argv[1:], dict(os.environ)], open('said.json', 'w'))")
    around = {"RANK": "3", "SLURM_PROCID": "3", "SHOAL_RUN_ID": "x", "MLFLOW_TRACKING_URI": "http://x", "KEPT": "yes"}
    asked = ProofSettings("train.py", ("--epochs", "a b"), dtype="float32", steps=7)
    before = Path.cwd()
    os.chdir(Path(path).parent)
    try:
        await run(LocalRunner(asked, environ=around), tmp_path)
    finally:
        os.chdir(before)
    arguments, environ = json.loads((tmp_path / "said.json").read_text())
    assert arguments == ["--epochs", "a b"]
    assert environ["KEPT"] == "yes" and not {"RANK", "SLURM_PROCID", "SHOAL_RUN_ID", "MLFLOW_TRACKING_URI"} & set(
        environ
    )
    told = {name: environ[name] for name in environ if name.startswith("SHOAL_PROOF_")}
    assert told == {
        "SHOAL_PROOF_DIR": str(tmp_path),
        "SHOAL_PROOF_DTYPE": "float32",
        "SHOAL_PROOF_PARALLEL": "fsdp",
        "SHOAL_PROOF_STEPS": "7",
    }
    assert environ["OMP_NUM_THREADS"] == "1" and environ["SHOAL_JOB_DIR"] == str(tmp_path)


async def test_failed_script_shows_its_last_lines(tmp_path: Path) -> None:
    path = script(tmp_path, "for n in range(99): print('line', n)\nraise ValueError('no data \\x1b[2J')")
    with pytest.raises(ScriptFailed) as raised:
        await run(LocalRunner(ProofSettings(path)), tmp_path)
    lines = raised.value.message.splitlines()
    assert lines[0] == "it ended with status 1:" and lines[-1] == "  ValueError: no data \\x1b[2J"
    assert len(lines) == 16 and raised.value.hint == "run the script by itself first"


@cases(
    "text, fix",
    ("raise ModuleNotFoundError(\"No module named 'torch'\")", "install torch for the Python that runs the script"),
    (
        "import torch.distributed\ntorch.distributed.init_process_group('gloo')",
        "call shoal.train.init() in place of torch.distributed.init_process_group()",
    ),
)
async def test_known_failure_is_reported_with_the_fix(tmp_path: Path, text: str, fix: str) -> None:
    with pytest.raises(ScriptFailed) as raised:
        await run(LocalRunner(ProofSettings(script(tmp_path, text))), tmp_path)
    assert raised.value.hint.startswith(fix)


async def test_hanging_run_is_killed_and_reports_the_steps_of_each_rank(tmp_path: Path) -> None:
    path, mark = script(tmp_path, HANG), tmp_path / "pids"
    (tmp_path / "rank-0.jsonl").write_text('{"kind": "step"}\n')
    (tmp_path / "rank-1.jsonl").write_text('{"kind": "step"}\n{"kind": "step"}\n')
    with pytest.raises(ScriptFailed, match=r"has not ended within 10 s \(steps taken: rank 0 1, rank 1 2\)"):
        await run(LocalRunner(ProofSettings(path, (str(mark),), timeout=10)), tmp_path)
    wait_until_gone(*map(int, mark.read_text().split()))


async def test_cancelled_run_leaves_no_process(tmp_path: Path) -> None:
    path, mark = script(tmp_path, HANG), tmp_path / "pids"
    task = asyncio.create_task(run(LocalRunner(ProofSettings(path, (str(mark),))), tmp_path))
    await asyncio.to_thread(wait_for, lambda: mark.exists() and mark.read_text())
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task
    wait_until_gone(*map(int, mark.read_text().split()))


@cases("number", signal.SIGINT, signal.SIGKILL)
def test_ctrl_c_or_a_kill_of_the_command_ends_the_script(tmp_path: Path, number: signal.Signals) -> None:
    path, mark = script(tmp_path, HANG), tmp_path / "pids"
    command = [sys.executable, "-m", "shoal", "prove", path, "--", str(mark)]
    shoal = subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, text=True)
    wait_for(lambda: mark.exists() and mark.read_text())
    ours, its_child = map(int, mark.read_text().split())
    shoal.send_signal(number)
    said = shoal.communicate(timeout=60)[1]
    wait_until_gone(ours)
    if number == signal.SIGINT:
        assert shoal.returncode == 130 and re.search("^stopped; its processes are ended", said, re.M)
        wait_until_gone(its_child)
    elif not gone(its_child):
        os.kill(its_child, signal.SIGKILL)  # a script's own children are its own to end


@cases(
    "asked, said",
    (
        ProofSettings("train.py", launchers=("srun", "mpirun")),
        "srun, mpirun needs a cluster; on this machine there are",
    ),
    (ProofSettings("nope.py", launchers=("spawn",)), "there is no script nope.py"),
)
def test_impossible_request_is_rejected(asked: ProofSettings, said: str) -> None:
    with pytest.raises(UsageError, match=said):
        LocalRunner(asked)
