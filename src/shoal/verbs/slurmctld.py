"""Commands of Slurm on the controller: their output, or a SlurmError that says what to do."""

from __future__ import annotations

import asyncio
from collections.abc import Coroutine
from typing import Any, TypeVar

from shoal.errors import CommandTimeout, SlurmError
from shoal.hosts.api import Host, Result
from shoal.jobs.record import OWNERS_COMMAND, JobRecord, combine_records, doubtful_ids, parse_owners, show_command
from shoal.slurm.versions import Version

T = TypeVar("T")

SLURM_TIMEOUT_S = 30.0
QUICK_ANSWER_S = 0.5
"""A healthy slurmctld answers within this time."""
SERVICE_STATE_COMMAND = ("systemctl", "show", "-p", "LoadState", "-p", "ActiveState", "slurmctld")
NO_CONFIGURATION = "Could not establish a configuration source"
"""Slurm's own message."""


async def slurm_output(host: Host, command: tuple[str, ...], timeout: float = SLURM_TIMEOUT_S) -> str:
    """The output of a Slurm command. Raises SlurmError where Slurm is missing, silent or reports an error."""
    try:
        result = await host.run(command, timeout=timeout)
    except CommandTimeout:
        raise SlurmError(
            f"slurmctld on {host.name} does not answer within {timeout:g} s", hint=slurmctld_fix(host.name)
        ) from None
    return checked_output(host, command, result)


async def current_jobs(host: Host) -> list[JobRecord]:
    """The jobs that slurmctld has, oldest first, whatever their owners have written into them."""
    text = await slurm_output(host, show_command())
    owners = await job_owners(host)
    answers = {job: await slurm_output(host, show_command(job)) for job in doubtful_ids(text, owners)}
    return combine_records(text, owners, answers)


async def job_owners(host: Host) -> dict[str, str]:
    return parse_owners(await slurm_output(host, OWNERS_COMMAND))


def checked_output(host: Host, command: tuple[str, ...], result: Result) -> str:
    """The output of a Slurm command that has ended. Raises SlurmError where it failed."""
    if result.status == 127:
        raise SlurmError(f"{host.name} has no Slurm yet", hint="run `shoal up`")
    require_configuration(host.name, result)
    if result.status != 0:
        raise SlurmError(
            f"`{' '.join(command[:3])}` on {host.name} failed: {result.error_text.strip() or result.text.strip()}",
            hint="run `shoal up`; if that does not help, `shoal check` says what is wrong",
        )
    return result.text


def require_configuration(controller: str, result: Result) -> None:
    """Raise SlurmError where Slurm is installed but not configured: before the first `up`, or after `down`."""
    if result.status != 0 and NO_CONFIGURATION in result.error_text:
        raise SlurmError(f"Slurm on {controller} is not set up: it has no configuration", hint="run `shoal up`")


async def running_version(host: Host) -> str:
    """The version of the controller's Slurm. Raises SlurmError when slurmctld does not run.

    Slurm's own commands wait half a minute before they report that.
    """
    command = ("scontrol", "--version")
    version, service = await asyncio.gather(
        host.run(command, timeout=SLURM_TIMEOUT_S),
        host.run(SERVICE_STATE_COMMAND, timeout=SLURM_TIMEOUT_S),
    )
    output = checked_output(host, command, version)
    service_state = dict(line.split("=", 1) for line in service.text.splitlines() if "=" in line)
    state = service_state.get("ActiveState", "")
    # Without systemd the output is empty, and a login host has no such service: only Slurm itself can tell.
    is_here = service_state.get("LoadState") != "not-found"
    if is_here and state and state not in ("active", "reloading"):
        raise SlurmError(f"slurmctld does not run on {host.name} ({state})", hint=slurmctld_fix(host.name))
    return str(Version.parse(output))


def slurmctld_fix(controller: str) -> str:
    """What to do about a slurmctld that does not run or does not answer."""
    return f"run `shoal up`; its log: `shoal ssh {controller} journalctl -u slurmctld`"


async def gather_answers(controller: Host, *questions: Coroutine[Any, Any, T]) -> list[T]:
    """Await questions to slurmctld. Raises SlurmError early when it does not run.

    Its state is checked only when the answers take long, so a healthy cluster pays nothing for it.
    """
    pending = [asyncio.ensure_future(question) for question in questions]
    try:
        await asyncio.wait(pending, timeout=QUICK_ANSWER_S, return_when=asyncio.FIRST_EXCEPTION)
        failed = any(answer.done() and answer.exception() for answer in pending)
        if not failed and not all(answer.done() for answer in pending):
            await running_version(controller)
        return [await answer for answer in pending]
    finally:
        for answer in pending:
            answer.cancel()
        await asyncio.gather(*pending, return_exceptions=True)
