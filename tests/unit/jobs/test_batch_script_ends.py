"""How a batch script ends, run by a real bash with stand-ins for srun and scontrol."""

import os
import signal
import socket
import subprocess
import time
from dataclasses import replace
from pathlib import Path
from typing import Any

from job_clusters import SHIPPED, resolved
from tests.support.cases import cases

from shoal.contract import EXIT_REQUEUE
from shoal.jobs.script import sbatch_script


def _run(
    tmp_path: Path, srun: str, requeues: bool = True, warning: signal.Signals | None = None, **options: object
) -> tuple[int, str]:
    """The script's exit status, and its calls of scontrol, which can requeue the job or not.

    It gets the warning, if any, once srun has made the file `ready`.
    """
    programs = tmp_path / "bin"
    programs.mkdir()
    for name, text in (
        ("srun", srun),
        ("scontrol", f'echo "$*" >> {tmp_path}/asked; {str(requeues).lower()}'),
        ("sleep", "true"),
    ):
        (programs / name).write_text(f"#!/bin/sh\n{text}\n")
        (programs / name).chmod(0o755)
    job, root = resolved("train.py", **options), str(tmp_path / "jobs")
    (tmp_path / "jobs" / "7").mkdir(parents=True)
    environ = {
        "PATH": f"{programs}:{os.environ['PATH']}",
        "SLURM_JOB_ID": "7",
        "SLURM_RESTART_COUNT": "2",
        "SLURM_JOB_NODELIST": "gpu1",
        "SLURMD_NODENAME": "gpu1",
    }
    text = sbatch_script(job, replace(SHIPPED, root=root))
    with subprocess.Popen(["bash", "-c", text], env=environ, stdin=subprocess.DEVNULL) as script:
        while warning and not (tmp_path / "ready").exists():
            assert script.poll() is None
            time.sleep(0.05)
        if warning:
            script.send_signal(warning)
        script.wait(60)
    asked = (tmp_path / "asked").read_text() if (tmp_path / "asked").exists() else ""
    return script.returncode, asked.replace("-o show node gpu1\n", "")


@cases("number, taken, then", ("41", 10041, "17960"), ("19999", 29999, "17918"))
def test_taken_port_is_skipped_and_the_next_is_below_the_ephemeral_range(number: str, taken: int, then: str) -> None:
    lines = sbatch_script(resolved("train.py"), SHIPPED).splitlines()
    first = next(at for at, line in enumerate(lines) if line.startswith("export MASTER_PORT="))
    script = "\n".join([*lines[first : lines.index("done", first) + 1], "echo $MASTER_PORT"])
    with socket.create_server(("127.0.0.1", taken)):
        said = subprocess.run(["bash", "-c", script], env={"SLURM_JOB_ID": number}, capture_output=True, text=True)
    assert said.stdout == f"{then}\n"


ENDED = 'touch "$SHOAL_JOB_DIR/rank-0.2.end"'
EARLIER = 'touch "$SHOAL_JOB_DIR/rank-0.1.end"'
"""Of the turn before."""
STOPPED = f'{ENDED}; touch "$SHOAL_JOB_DIR/requeue.2"; exit 0'
LOST = f'touch "$SHOAL_JOB_DIR/lost.2"; {ENDED}; exit 137'


@cases(
    "srun, options, ends",
    (f"{ENDED}; exit 0", {}, (0, "")),
    (f"{ENDED}; exit 3", {}, (3, "")),
    (f"{EARLIER}; exit 0", {}, (1, "")),
    (f"{EARLIER}; exit 0", {"requeue": False}, (1, "")),
    (STOPPED, {}, (0, "requeue 7\n")),
    (STOPPED, {"requeues": False}, (EXIT_REQUEUE, "requeue 7\n")),
    (STOPPED, {"requeue": False}, (EXIT_REQUEUE, "")),
    (LOST, {"requeue": True}, (0, "requeue 7\n")),
    (LOST, {"requeue": False}, (1, "")),
)
def test_status_and_requeue_of_a_job_follow_its_ranks(
    tmp_path: Path, srun: str, options: dict[str, Any], ends: tuple[int, str]
) -> None:
    """An srun that starts no rank and exits with 0 is a failure; a rank asks to be queued again, or is lost."""
    assert _run(tmp_path, srun, **options) == ends


@cases("number, option", (signal.SIGUSR1, "USR1@60"), (signal.SIGUSR1, "HUP@9"), (signal.SIGHUP, "HUP@9"))
def test_warning_goes_to_the_ranks_and_the_script_waits_for_them(
    tmp_path: Path, number: signal.Signals, option: str
) -> None:
    srun = f'touch {tmp_path}/ready; read -r word; echo "$word" > {tmp_path}/word; {ENDED}; exit 3'
    assert _run(tmp_path, srun, warning=number, signal=option) == (3, "")
    assert (tmp_path / "word").read_text() == f"{number.name[3:]}\n"
