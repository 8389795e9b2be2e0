"""Runs of a proof on this machine: one process, or several by torchrun or spawn, on the CPU."""

from __future__ import annotations

import asyncio
import contextlib
import ctypes
import os
import signal
import sys
from collections.abc import Callable, Mapping
from pathlib import Path

from shoal.errors import UsageError
from shoal.plan.progress import Phase
from shoal.proof.model import Asked, RunFailed, Trial
from shoal.spec.words import printable
from shoal.train.contract import SHOAL_JOB_DIR, SHOAL_PROOF_DIR

LOCAL_LAUNCHERS = ("torchrun", "spawn")
LINES = 15
"""Of so many lines a failed script's output is shown."""
PATIENCE = 10.0
"""Seconds between asking processes to end and ending them."""

_FOREIGN = ("SLURM_", "OMPI_", "PMI_", "PMIX_", "TORCHELASTIC_", "SHOAL_", "PET_")
_FOREIGN_NAMES = (
    *("RANK", "LOCAL_RANK", "WORLD_SIZE", "LOCAL_WORLD_SIZE", "GROUP_RANK", "NODE_RANK"),
    *("MASTER_ADDR", "MASTER_PORT", "MLFLOW_TRACKING_URI"),
)
"""Variables of a launcher that this command may itself have been started by. A proof has its own."""


class LocalRunner:
    """Runs the script with a Python of this machine."""

    where = "this machine"

    def __init__(self, asked: Asked, python: str | None = None, environ: Mapping[str, str] = os.environ) -> None:
        self._asked = asked
        self._python = python or sys.executable
        self._environ = environ
        unknown = [name for name in asked.launchers if name not in LOCAL_LAUNCHERS]
        if unknown:
            raise UsageError(
                f"{', '.join(unknown)} needs a cluster; on this machine there are {' and '.join(LOCAL_LAUNCHERS)}",
                hint="name the cluster with --file or --cluster",
            )
        if not Path(asked.script).is_file():
            raise UsageError(f"there is no script {printable(asked.script)}")

    async def run(self, trial: Trial, directory: Path, phase: Phase) -> None:
        log = directory / "output.log"
        with log.open("wb") as output:
            process = await asyncio.create_subprocess_exec(
                *self._command(trial),
                stdin=asyncio.subprocess.DEVNULL,
                stdout=output,
                stderr=output,
                env=self._variables(trial, directory),
                start_new_session=True,  # a Ctrl-C is ours to pass on
                preexec_fn=_end_with(os.getpid()),
            )
        watching = asyncio.create_task(_tell(directory, self._asked.steps, phase))
        try:
            async with asyncio.timeout(self._asked.timeout):
                status = await process.wait()
        except TimeoutError:
            raise RunFailed(
                f"it has not ended within {self._asked.timeout:g} s{_how_far(directory)}",
                hint="ranks that take different numbers of steps wait for each other; or give it more with --timeout",
            ) from None
        finally:
            watching.cancel()
            await _end(process, directory)
        if status != 0:
            told = _last_lines(log)
            raise RunFailed(f"it ended with status {status}{_how_far(directory)}:\n{told}", hint=_remedy(told))

    def _command(self, trial: Trial) -> list[str]:
        count, script = str(trial.processes), [self._asked.script, *self._asked.args]
        if trial.launcher == "python":
            return [self._python, *script]
        if trial.launcher == "spawn":
            return [self._python, "-m", "shoal.train.multiprocess", "--nprocs", count, *script]
        return [
            *(self._python, "-m", "torch.distributed.run", "--standalone", "--max-restarts=0"),
            *("--nproc-per-node", count, *script),
        ]

    def _variables(self, trial: Trial, directory: Path) -> dict[str, str]:
        kept = {
            name: value
            for name, value in self._environ.items()
            if not name.startswith(_FOREIGN) and name not in _FOREIGN_NAMES
        }
        # What the library writes beside its records goes where they are. Fewer GPUs than ranks is the usual case here.
        own = {SHOAL_JOB_DIR: str(directory), "CUDA_VISIBLE_DEVICES": "", "PYTHONUNBUFFERED": "1"}
        return {**kept, **trial.variables(self._asked, str(directory)), **own}


async def _tell(directory: Path, steps: int, phase: Phase) -> None:
    """Say how far rank 0 is, until cancelled."""
    while True:
        await asyncio.sleep(0.3)
        done = _steps(directory / "rank-0.jsonl")
        if done:
            phase.at(min(1.0, done / steps), f"step {done}/{steps}")


def _steps(path: Path) -> int:
    """How many steps a record has so far."""
    try:
        return sum(line.startswith('{"kind": "step"') for line in path.read_text(errors="replace").splitlines())
    except OSError:
        return 0


def _how_far(directory: Path) -> str:
    """Where the ranks were, where they were at different steps: that is often the reason."""
    done = {int(path.stem.partition("-")[2]): _steps(path) for path in directory.glob("rank-*.jsonl")}
    if len(set(done.values())) < 2:
        return ""
    return f" (steps taken: {', '.join(f'rank {rank} {done[rank]}' for rank in sorted(done))})"


def _last_lines(log: Path) -> str:
    lines = [line for line in log.read_text(errors="replace").splitlines() if line.strip()]
    # torchrun ends with a report of its own, which says nothing of the cause.
    for at, line in enumerate(lines):
        if "torch.distributed.elastic.multiprocessing.api:failed" in line or "ChildFailedError" in line:
            lines = lines[: max(at, 1)]
            break
    return "\n".join(f"  {printable(line)}" for line in lines[-LINES:]) or "  it printed nothing"


def _remedy(told: str) -> str:
    for name in ("torch", "shoal"):
        if f"No module named '{name}'" in told:
            return f"install {name} for the Python that runs the script, or name another with --python"
    if "environment variable RANK expected" in told:
        return "call shoal.train.init() in place of torch.distributed.init_process_group(), which needs a launcher"
    return "run the script by itself first"


async def _end(process: asyncio.subprocess.Process, directory: Path) -> None:
    """End whatever is left of a run. torchrun and the script may have put processes into sessions of their own."""
    if process.returncode is None:
        with contextlib.suppress(ProcessLookupError):
            process.terminate()
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(PATIENCE):
                await process.wait()
    for pid in _processes(directory):
        with contextlib.suppress(ProcessLookupError, PermissionError):
            os.kill(pid, signal.SIGKILL)
    await process.wait()


def _processes(directory: Path) -> list[int]:
    """The processes that have this proof's directory in their environment: nobody else's have."""
    mark = f"{SHOAL_PROOF_DIR}={directory}".encode()
    found = []
    for path in Path("/proc").glob("[0-9]*/environ"):
        with contextlib.suppress(OSError):
            if mark in path.read_bytes().split(b"\0"):
                found.append(int(path.parent.name))
    return found


def _end_with(parent: int) -> Callable[[], None]:
    """Called in the new process: it gets SIGTERM when we are gone, however that came."""
    libc = ctypes.CDLL(None)

    def prepare() -> None:
        libc.prctl(1, signal.SIGTERM)  # PR_SET_PDEATHSIG
        if os.getppid() != parent:
            os.kill(os.getpid(), signal.SIGTERM)

    return prepare
