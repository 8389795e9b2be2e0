"""Runs a proof on this machine's CPU: one process, or several under torchrun or spawn."""

from __future__ import annotations

import asyncio
import contextlib
import ctypes
import os
import re
import signal
import sys
from collections.abc import Callable, Mapping
from pathlib import Path

from shoal.contract import SHOAL_JOB_DIR, SHOAL_PROOF_DIR
from shoal.errors import UsageError
from shoal.plan.progress import Phase
from shoal.proof.types import ProofRun, ProofSettings, ScriptFailed
from shoal.spec.finding import printable

LOCAL_LAUNCHERS = ("torchrun", "spawn")
SHOWN_LINES = 15
"""Lines of a failed script's output that are shown."""
TERMINATE_TIMEOUT_S = 10.0
"""From SIGTERM to SIGKILL."""

_LAUNCHER_PREFIXES = ("SLURM_", "OMPI_", "PMI_", "PMIX_", "TORCHELASTIC_", "SHOAL_", "PET_")
_LAUNCHER_VARIABLES = (
    *("RANK", "LOCAL_RANK", "WORLD_SIZE", "LOCAL_WORLD_SIZE", "GROUP_RANK", "NODE_RANK"),
    *("MASTER_ADDR", "MASTER_PORT", "MLFLOW_TRACKING_URI"),
)
"""Variables of a launcher around this command; a proof sets its own."""


class LocalRunner:
    """Runs the script with a Python of this machine."""

    where = "this machine"

    def __init__(
        self, settings: ProofSettings, python: str | None = None, environ: Mapping[str, str] = os.environ
    ) -> None:
        self._settings = settings
        self._python = python or sys.executable
        self._environ = environ
        unknown = [name for name in settings.launchers if name not in LOCAL_LAUNCHERS]
        if unknown:
            raise UsageError(
                f"{', '.join(unknown)} needs a cluster; on this machine there are {' and '.join(LOCAL_LAUNCHERS)}",
                hint="name the cluster with --file or --cluster",
            )
        if not Path(settings.script).is_file():
            raise UsageError(f"there is no script {printable(settings.script)}")

    async def run(self, run: ProofRun, directory: Path, phase: Phase) -> None:
        log = directory / "output.log"
        with log.open("wb") as sink:
            process = await asyncio.create_subprocess_exec(
                *self._command(run),
                stdin=asyncio.subprocess.DEVNULL,
                stdout=sink,
                stderr=sink,
                env=self._variables(run, directory),
                start_new_session=True,  # Ctrl-C goes to this process only
                preexec_fn=_die_with(os.getpid()),
            )
        progress_task = asyncio.create_task(_report_progress(directory, self._settings.steps, phase))
        try:
            async with asyncio.timeout(self._settings.timeout):
                status = await process.wait()
        except TimeoutError:
            raise ScriptFailed(
                f"it has not ended within {self._settings.timeout:g} s{_steps_by_rank(directory)}",
                hint="ranks that take different numbers of steps wait for each other; or give it more with --timeout",
            ) from None
        finally:
            progress_task.cancel()
            await _terminate(process, directory)
        if status != 0:
            output = _tail(log)
            raise ScriptFailed(
                f"it ended with status {status}{_steps_by_rank(directory)}:\n{output}", hint=_suggest_fix(output)
            )

    def _command(self, run: ProofRun) -> list[str]:
        count, script = str(run.processes), [self._settings.script, *self._settings.args]
        if run.launcher == "python":
            return [self._python, *script]
        if run.launcher == "spawn":
            return [self._python, "-m", "shoal.train.multiprocess", "--nprocs", count, *script]
        return [
            *(self._python, "-m", "torch.distributed.run", "--standalone", "--max-restarts=0"),
            *("--nproc-per-node", count, *script),
        ]

    def _variables(self, run: ProofRun, directory: Path) -> dict[str, str]:
        inherited = {
            name: value
            for name, value in self._environ.items()
            if not name.startswith(_LAUNCHER_PREFIXES) and name not in _LAUNCHER_VARIABLES
        }
        # The library writes into the directory of the records. There are usually fewer GPUs than ranks here.
        overrides = {SHOAL_JOB_DIR: str(directory), "CUDA_VISIBLE_DEVICES": "", "PYTHONUNBUFFERED": "1"}
        return {**inherited, **run.variables(self._settings, str(directory)), **overrides}


async def _report_progress(directory: Path, steps: int, phase: Phase) -> None:
    """Report the progress of rank 0, until cancelled."""
    while True:
        await asyncio.sleep(0.3)
        step = _steps(directory / "rank-0.jsonl")
        if step:
            phase.set_fraction(min(1.0, step / steps), f"step {step}/{steps}")


def _steps(path: Path) -> int:
    """The number of steps in a record."""
    try:
        return sum(line.startswith('{"kind": "step"') for line in path.read_text(errors="replace").splitlines())
    except OSError:
        return 0


def _steps_by_rank(directory: Path) -> str:
    """The steps of each rank, if they differ: that is often the reason of a hang."""
    steps = {int(path.stem.partition("-")[2]): _steps(path) for path in directory.glob("rank-*.jsonl")}
    if len(set(steps.values())) < 2:
        return ""
    return f" (steps taken: {', '.join(f'rank {rank} {steps[rank]}' for rank in sorted(steps))})"


def _tail(log: Path) -> str:
    lines = [line for line in log.read_text(errors="replace").splitlines() if line.strip()]
    # torchrun ends with its own report, which does not name the cause.
    report = re.compile(r"torch\.distributed\.elastic\.multiprocessing\.api:failed|ChildFailedError")
    end = next((index for index, line in enumerate(lines) if report.search(line)), len(lines))
    lines = lines[: max(end, 1)]
    return "\n".join(f"  {printable(line)}" for line in lines[-SHOWN_LINES:]) or "  it printed nothing"


def _suggest_fix(output: str) -> str:
    for name in ("torch", "shoal"):
        if f"No module named '{name}'" in output:
            return f"install {name} for the Python that runs the script, or name another with --python"
    if "environment variable RANK expected" in output:
        return "call shoal.train.init() in place of torch.distributed.init_process_group(), which needs a launcher"
    return "run the script by itself first"


async def _terminate(process: asyncio.subprocess.Process, directory: Path) -> None:
    """Kill what is left of a run. torchrun and the script may have started sessions of their own."""
    if process.returncode is None:
        with contextlib.suppress(ProcessLookupError):
            process.terminate()
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(TERMINATE_TIMEOUT_S):
                await process.wait()
    for pid in _find_processes(directory):
        with contextlib.suppress(ProcessLookupError, PermissionError):
            os.kill(pid, signal.SIGKILL)
    await process.wait()


def _find_processes(directory: Path) -> list[int]:
    """The processes that have this proof's directory in their environment."""
    variable = f"{SHOAL_PROOF_DIR}={directory}".encode()
    pids = []
    for path in Path("/proc").glob("[0-9]*/environ"):
        with contextlib.suppress(OSError):
            if variable in path.read_bytes().split(b"\0"):
                pids.append(int(path.parent.name))
    return pids


def _die_with(parent: int) -> Callable[[], None]:
    """A preexec_fn: the new process gets SIGTERM when its parent ends for any reason."""
    libc = ctypes.CDLL(None)

    def prepare() -> None:
        libc.prctl(1, signal.SIGTERM)  # PR_SET_PDEATHSIG
        if os.getppid() != parent:
            os.kill(os.getpid(), signal.SIGTERM)

    return prepare
