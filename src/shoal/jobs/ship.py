"""Sends a job's code to the hosts. Code that a host has already, by its hash, is not sent again.

The jobs' directory may be on storage that all hosts share, or on each host's own disk. A file in it with a random
number tells them apart: hosts that read the same number share one copy; otherwise every node gets its own.
"""

from __future__ import annotations

import asyncio
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass

from shoal.errors import CommandFailed, PartialFailure
from shoal.hosts.api import Host
from shoal.jobs.bundle import Bundle
from shoal.jobs.record import JOBS_DIRECTORY
from shoal.remote import program_text, shell_command
from shoal.remote.log_reader import SENT_TIME

KEEP_NEWEST, KEEP_DAYS = 20, 7
"""Code that no job uses is kept while it is among the newest, or young."""


@dataclass(frozen=True)
class StorageState:
    """What the jobs' directory of a host has."""

    id: str
    """The random number of its jobs' directory: the same on hosts that share it."""
    shared: bool = False
    """It is marked as shared by all nodes."""
    code: bool = False
    runtime: bool = False
    old: bool = False
    """It has more code than is kept."""
    owner: int = 0
    """Who root is there."""


async def inspect_storage(host: Host, root: str, code: str, runtime: str) -> StorageState:
    """Make the jobs' directory on a host and report what it has."""
    result = await host.run(_command("inspect", root, code, runtime), timeout=60)
    if result.status == 3:
        raise CommandFailed(host.name, result.error_text.strip(), hint="remove it there, or use another --directory")
    if result.status != 0:
        raise CommandFailed(host.name, f"cannot use {root}: {result.error_text.strip()}", hint="is its disk full?")
    lines = result.text.split()
    return StorageState(lines[0], "shared" in lines, "code" in lines, "lib" in lines, "old" in lines)


async def inspect_directory(host: Host, root: str) -> StorageState:
    """Make a directory on a share for jobs whose code is elsewhere, and report which storage it is on."""
    result = await host.run(_command("inspect_directory", root), timeout=60)
    if result.status == 3:
        raise CommandFailed(host.name, result.error_text.strip(), hint="remove it there, or use another --directory")
    if result.status != 0:
        raise CommandFailed(host.name, f"cannot use {root}: {result.error_text.strip()}", hint="is its disk full?")
    id, owner, *marks = result.text.split()
    return StorageState(id, "shared" in marks, owner=int(owner))


def one_host_per_storage(storages: Mapping[str, StorageState]) -> tuple[str, ...]:
    """One host of each storage."""
    return tuple({storages[name].id: name for name in reversed(list(storages))}.values())


async def mark(host: Host, root: str, shared: bool, *, as_root: bool = True) -> None:
    """Record for later jobs whether their nodes share the directory."""
    # Users write there, too: a link of theirs is not followed.
    text = 'rm -f "$1" && set -C && : > "$1"' if shared else 'rm -f "$1"'
    await host.run(shell_command(text, f"{root}/.shared"), timeout=60, root=as_root)


async def send(
    host: Host, root: str, code: Bundle, runtime: Bundle, state: StorageState, *, as_root: bool = True
) -> int:
    """Send what the host lacks; returns how many bytes."""
    transfers = {}
    if not state.runtime:
        transfers["unpack"] = (f"{root}/lib/{runtime.hash}", runtime.data)
    if not state.code:
        transfers["store"] = (f"{root}/code/{code.hash}.tar", code.data)
    await asyncio.gather(*(_transfer(host, verb, *what, as_root) for verb, what in transfers.items()))
    return sum(len(data) for _, data in transfers.values())


async def clean(
    host: Host, root: str, jobs: Collection[str], hashes: Collection[str], newest: int = KEEP_NEWEST
) -> None:
    """Remove old code but what these jobs and those of these hashes use. Logs, checkpoints and whatever else jobs
    wrote stay. Failures are ignored: the next job tries again."""
    arguments = [root, str(newest), str(KEEP_DAYS)]
    await host.run(_command("clean_code", *arguments, " ".join(hashes)), timeout=60)
    await host.run(_command("clean_trees", *arguments, " ".join(jobs)), timeout=60, root=False)


async def _transfer(host: Host, verb: str, place: str, data: bytes, as_root: bool) -> None:
    result = await host.run(_command(verb, place, str(len(data))), stdin=data, timeout=600, root=as_root)
    if result.status != 0:
        raise CommandFailed(
            host.name, f"cannot keep the job's code in {place}: {result.error_text.strip()}", hint="is its disk full?"
        )


def _command(verb: str, *arguments: str) -> tuple[str, ...]:
    words = {"KEEP_DAYS": KEEP_DAYS, "KEEP_NEWEST": KEEP_NEWEST, "JOBS": JOBS_DIRECTORY, "SENT_TIME": SENT_TIME}
    program = program_text("job_code.sh", **words)
    return shell_command(program, verb, *arguments)


def require_all_hosts(names: Sequence[str], done: Mapping[str, object], failures: Mapping[str, Exception]) -> None:
    """Raise PartialFailure unless every node has the code: the job would fail on the others."""
    missing = [name for name in names if name not in done]
    if missing:
        causes = "; ".join(str(failures[name]).split("\n")[0] for name in missing if name in failures)
        raise PartialFailure(
            f"cannot send the code to {', '.join(missing)}, so nothing was queued: {causes}",
            hint="repair these nodes, or name others with --nodelist or --partition",
        )
