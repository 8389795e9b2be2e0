"""`shoal run --now`: a job that srun starts at once, with its output here. Ctrl-C cancels it; nothing requeues it."""

from __future__ import annotations

import asyncio
import contextlib
import re
import time
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

from shoal.contract import KILL_WAIT_S
from shoal.errors import HostError, SlurmError
from shoal.hosts.api import Host, Process
from shoal.jobs.bundle import DEFAULT_LIMIT
from shoal.jobs.delivery import pack_code
from shoal.jobs.logs import BATCH, LogLine
from shoal.jobs.model import JobSpec
from shoal.jobs.srun_command import require_no_batch_options, require_tasks_alone, srun_command
from shoal.remote import program_text, shell_command
from shoal.remote.runner.node import ECHO_BAR, ECHO_JOB, ECHO_LINE
from shoal.verbs.context import Context
from shoal.verbs.run import dry_run, run
from shoal.verbs.submission import PreparedJob, SubmittedJob, encode_variables

CANCEL_TIMEOUT_S = KILL_WAIT_S + 15.0
"""Slurm ends a cancelled job within KillWait."""
MAX_MESSAGES = 20
"""So many of srun's last lines are in an error."""
_RANK_LINE = re.compile(rf"({ECHO_LINE}|{ECHO_BAR})([0-9]+) (.*)", re.DOTALL)


class JobWatcher(Protocol):
    """What is shown while the job runs."""

    def show_start(self, job: str, nodes: str) -> None: ...

    def show_line(self, line: LogLine) -> None: ...

    def show_bars(self, lines: Iterable[LogLine]) -> None: ...

    def show_message(self, text: str) -> None:
        """A line of srun's own."""


@dataclass(frozen=True)
class EndedJob:
    """How the job ended."""

    job: SubmittedJob
    status: int
    """Of srun: the highest of its tasks."""


async def show_command(context: Context, job: JobSpec, here: Path, limit: int = DEFAULT_LIMIT) -> list[str]:
    """The command that `run_now` would run on the controller."""
    require_no_batch_options(job)
    prepared = await dry_run(context, job, here, limit)
    require_tasks_alone(prepared.job, prepared.shipped)
    return srun_command(prepared.job, prepared.shipped)


async def run_now(
    context: Context, job: JobSpec, here: Path, watcher: JobWatcher, limit: int = DEFAULT_LIMIT
) -> EndedJob:
    """Send the working tree to the nodes, run the job and return when it has ended. A cancellation cancels it."""
    require_no_batch_options(job)
    launch = _SrunLaunch(watcher)
    submitted = await run(context, job, here, limit, launch=launch)
    return EndedJob(submitted, launch.status)


class _SrunLaunch:
    """Runs the job with srun."""

    def __init__(self, watcher: JobWatcher) -> None:
        self.status = 1
        self._watcher = watcher
        self._job = ""
        self._bars: dict[int, LogLine] = {}
        self._messages: list[str] = []

    async def __call__(self, controller: Host, prepared: PreparedJob, variables: Mapping[str, str]) -> str:
        require_tasks_alone(prepared.job, prepared.shipped)
        code = pack_code(prepared.tree, prepared.runtime) if prepared.shipped.carried else b""
        command = srun_command(prepared.job, prepared.shipped)
        program = shell_command(program_text("job_now.sh"), str(len(code)), *command)
        process = await controller.start(program, root=False)
        try:
            await process.write(encode_variables(variables) + code)
            await self._show_output(process)
        except asyncio.CancelledError:
            await self._cancel(controller, process)
            raise
        finally:
            self._watcher.show_bars(())
        self.status = (await process.wait()).status
        if not self._job:
            messages = "; ".join(text.removeprefix("srun: ").removeprefix("error: ") for text in self._messages)
            raise SlurmError(
                f"srun did not start the job: {messages or f'status {self.status}'}",
                hint="`shoal run --now --dry-run` shows the command",
            )
        return self._job

    async def _show_output(self, process: Process) -> None:
        while line := await process.readline():
            self._show(line.decode("utf-8", "replace").rstrip("\n"))

    async def _cancel(self, controller: Host, process: Process) -> None:
        """End the job as scancel does, and show what its ranks have to say. Without a number it is not running yet."""
        with contextlib.suppress(HostError, TimeoutError):
            if self._job:
                await controller.run(("scancel", self._job), timeout=CANCEL_TIMEOUT_S, root=False)
                async with asyncio.timeout(CANCEL_TIMEOUT_S):
                    await self._show_output(process)
            await process.wait()  # the end of its input ends srun

    def _show(self, text: str) -> None:
        if text.startswith(ECHO_JOB):
            self._job, _, nodes = text.removeprefix(ECHO_JOB).partition(" ")
            self._watcher.show_start(self._job, nodes)
        elif match := _RANK_LINE.fullmatch(text):
            line = LogLine(time.time(), int(match[2]), 0, match[3])
            is_bar = match[1] == ECHO_BAR
            self._bars.pop(line.rank, None)
            if is_bar and line.text:
                self._bars[line.rank] = line
            elif not is_bar:
                self._watcher.show_line(line)
            self._watcher.show_bars(self._bars.values())
        elif self._job and not text.startswith(("srun: ", "slurmstepd")):
            self._watcher.show_line(LogLine(time.time(), BATCH, 0, text))  # of a launcher
        else:
            self._messages = [*self._messages, text][-MAX_MESSAGES:]
            self._watcher.show_message(text)
