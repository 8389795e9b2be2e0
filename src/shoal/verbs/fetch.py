"""`shoal fetch`: copies what a job has made from its nodes, or from the share they have, to this machine.

`remote/log_reader.py` sends the files with the rights of the job's user. Here each is written beside its place and
renamed, so that no file under its own name is half written. A second run copies only what has changed.

Neither rsync nor tar: rsync is not on every machine and node. What a node sends is not trusted, and the `tarfile` of
Python 3.11.2 has no filter for that. With either, the checks here would stay, and the choice of files there.
"""

from __future__ import annotations

import asyncio
import base64
import contextlib
import json
import os
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, BinaryIO

from shoal.errors import CommandFailed, CommandTimeout, HostError, UsageError
from shoal.hostlist import expand
from shoal.hosts.api import Host, Process
from shoal.jobs.record import JobRecord
from shoal.plan.connections import Connections
from shoal.plan.progress import Phase
from shoal.remote import python_command
from shoal.slurm.state import PARTITIONS_COMMAND, parse_partitions
from shoal.spec.checks import minutes
from shoal.spec.finding import printable
from shoal.verbs.context import Context, job_file_hosts
from shoal.verbs.logs import check_job, check_owner, files_of, find_record
from shoal.verbs.node_files import cancel_short_job, nodes_with_files, reader_command, short_job_command
from shoal.verbs.slurmctld import gather_answers, slurm_output

ANSWER_TIMEOUT_S = 60.0
STALL_TIMEOUT_S = 120.0
"""A sender that prints nothing for so long is given up."""
BUSY_FIX = "its node may be busy or off: try it again when it is not"
COPY_MINUTES = 120
"""The limit of a short job that sends files."""
END_TIMEOUT_S = 10.0
PART = ".shoal-part"
MAX_NAME_BYTES, MAX_PATH_BYTES = 255, 4000
MAX_SKIPPED = 1000
"""So many files that were not copied are named."""


@dataclass(frozen=True)
class SkippedFile:
    """A file that was not copied, and why."""

    name: str
    why: str


@dataclass(frozen=True)
class FetchResult:
    job: str
    directory: str
    """The job's directory on its nodes."""
    to: str
    """The directory here."""
    files: int = 0
    """Files that were copied."""
    bytes: int = 0
    unchanged: int = 0
    """Files that were here already."""
    skipped: tuple[SkippedFile, ...] = ()
    failures: Mapping[str, HostError] = field(default_factory=dict)


@dataclass
class _Sender:
    """The program on a host that sends files, after its first answer."""

    name: str
    process: Process
    storage: str
    found: bool
    closed: bool = False
    """The job's directory is closed to its user."""
    line: tuple[str, ...] = ()
    """The command of Slurm that runs it, where there is one."""
    sends: bool = False
    """It was asked for files, and has not sent the last one."""


async def fetch(
    context: Context, job: str, path: str = "", to: Path | None = None, directory: str | None = None
) -> FetchResult:
    """Copy what the job has made, or `path` in its directory. Raises UsageError where there is no such file."""
    check_job(job)
    target = to if to is not None else Path(f"job-{job}")
    if target.exists() and not target.is_dir():
        raise UsageError(f"{target} is no directory", hint="name another one with --to")
    async with await context.connections() as fleet:
        controller = await fleet.host(context.controller.name)
        [record] = await gather_answers(controller, find_record(controller, job))
        check_owner(context, record)
        files = files_of(context, job, record, directory)
        inside = _path_inside(path, files.directory)
        command = python_command("log_reader", "files", files.owner, files.directory, inside)
        copies = await _copy(context, fleet, controller, job, record, command, target)
        if not copies:
            _raise_missing(job, path, files.directory, record, fleet)
        return FetchResult(
            job,
            files.directory,
            str(target),
            sum(one.files for one in copies),
            sum(one.bytes for one in copies),
            sum(one.unchanged for one in copies),
            tuple(skipped for one in copies for skipped in one.skipped)[:MAX_SKIPPED],
            dict(fleet.failures),
        )


async def _copy(
    context: Context,
    fleet: Connections,
    controller: Host,
    job: str,
    record: JobRecord | None,
    command: tuple[str, ...],
    target: Path,
) -> list[_Copy]:
    """Copy what the command finds on the hosts, once from each storage. Empty where it finds nothing."""
    senders = await _start(context, fleet, controller, record, command)
    try:
        chosen = list({sender.storage: sender for sender in reversed(senders) if sender.found}.values())[::-1]
        if not chosen:
            fleet.failures.update({sender.name: _closed(sender.name) for sender in senders if sender.closed})
            return []
        copies: dict[str, _Copy] = {}
        with context.progress.phase(f"copying files of job {job}", 1) as phase:
            for sender in chosen:
                place = target / sender.name if len(chosen) > 1 else target
                copies[sender.name] = _Copy(place, sender, lambda: _report(phase, copies.values()))
            await fleet.each(copies, lambda name: copies[name].run())
        return list(copies.values())
    finally:
        await asyncio.gather(*(_end(sender, controller) for sender in senders), return_exceptions=True)


def _closed(name: str) -> HostError:
    fix = "look at the owner and the mode of the directories on the way to it"
    return CommandFailed(name, "the job's directory is closed to the job's user", hint=fix)


def _path_inside(path: str, directory: str) -> str:
    """The path from the job's directory, of one that may be written in full."""
    relative = os.path.relpath(path, directory) if path.startswith("/") else os.path.normpath(path) if path else ""
    if relative == ".." or relative.startswith("../"):
        raise UsageError(
            f"{printable(path)} is outside of the job's directory {directory}",
            hint="give a path below it; `shoal ssh` and scp copy other files",
        )
    return "" if relative == "." else relative


async def _start(
    context: Context, fleet: Connections, controller: Host, record: JobRecord | None, command: tuple[str, ...]
) -> list[_Sender]:
    """Start a sender on every host that may have files of the job, and wait for their first answers."""
    lines: dict[str, tuple[str, ...]] = {}
    nodes = nodes_with_files(context, record) if record is not None else ()
    is_running = record is not None and record.state == "RUNNING"
    if record is not None and nodes and record.state not in ("PENDING", "CONFIGURING"):
        limit = "" if is_running else await _time_limit(controller, record.partition)
        for node in nodes:
            step, short_job = reader_command(record, [node], command), short_job_command(record, node, command, limit)
            lines[node] = step if is_running else short_job
    hosts = job_file_hosts(context)
    if record is not None and record.nodes:
        own = {*expand(record.nodes), context.controller.name}
        hosts = [name for name in hosts if name in own] or hosts

    async def start(name: str) -> _Sender:
        if name in lines:
            process = await controller.start(lines[name], root=False)
            try:
                return replace(await _open(name, process), line=lines[name])
            except BaseException:
                await cancel_short_job(controller, lines[name])
                raise
        return await _open(name, await (await fleet.host(name)).start(command))

    # A login host that is also a node of the job is asked once, as a node.
    names = [*lines, *(name for name in hosts if name not in lines)]
    return list((await fleet.each(names, start)).values())


async def _time_limit(controller: Host, partition: str) -> str:
    """The limit of a short job: nobody ends it where this machine goes away."""
    partitions = parse_partitions(await slurm_output(controller, PARTITIONS_COMMAND))
    longest = next((minutes(one.max_time) for one in partitions if one.name == partition), COPY_MINUTES)
    return f"--time={max(1, int(min(COPY_MINUTES, longest)))}"


async def _end(sender: _Sender, controller: Host) -> None:
    """End the program, and its short job where it has one."""
    try:
        async with asyncio.timeout(0 if sender.sends else END_TIMEOUT_S):
            await sender.process.wait()
    except (TimeoutError, HostError):
        await sender.process.kill()
        await cancel_short_job(controller, sender.line)


async def _open(name: str, process: Process) -> _Sender:
    try:
        answer: dict[str, Any] | None = {}
        async with asyncio.timeout(ANSWER_TIMEOUT_S):
            while answer is not None and "storage" not in answer:
                answer = _message(await process.readline())
        if answer is None:
            result = await process.wait()
            cause = result.error_text.strip().splitlines()[-1:] or ["the program that sends them ended"]
            raise CommandFailed(name, f"cannot read the job's files: {cause[0]}", hint=BUSY_FIX)
    except TimeoutError:
        await process.kill()
        raise CommandTimeout(name, "the job's files did not arrive", hint=BUSY_FIX) from None
    except BaseException:
        await process.kill()
        raise
    return _Sender(name, process, str(answer["storage"]), bool(answer.get("found")), bool(answer.get("closed")))


def _raise_missing(job: str, path: str, directory: str, record: JobRecord | None, fleet: Connections) -> None:
    if fleet.failures:
        raise next(iter(fleet.failures.values()))
    if record is None:
        hint = "`shoal jobs` lists those that Slurm remembers; of others say the --directory they ran with, if any"
        raise UsageError(f"there is no job {job}", hint=hint)
    if record.state in ("PENDING", "CONFIGURING"):
        raise UsageError(f"job {job} has not started, so it has no files yet", hint=f"`shoal logs -f {job}` follows it")
    if path:
        raise UsageError(
            f"job {job} has no {printable(path)} in {directory}",
            hint=f"`shoal fetch {job}` copies all that it has made",
        )
    raise UsageError(f"nothing is left of job {job} in {directory}", hint="name the --directory that it ran with")


def _message(line: bytes) -> dict[str, Any] | None:
    """A line of JSON; None at the end of the stream."""
    if not line.endswith(b"\n"):
        return None
    try:
        value = json.loads(line)
    except ValueError:
        return {}  # a login shell may have words of its own
    return value if isinstance(value, dict) else {}


def _report(phase: Phase, copies: Iterable[_Copy]) -> None:
    totals = [(one.done, one.total) for one in copies]
    done, total = (sum(numbers) for numbers in zip(*totals, strict=True))
    if total:
        phase.set_fraction(min(1.0, done / total), f"{done / 1e6:.1f} of {total / 1e6:.1f} MB")


class _Copy:
    """The files of one host on their way to a directory here. Whatever the host sends, nothing else is touched."""

    def __init__(self, target: Path, sender: _Sender, report: Callable[[], None]) -> None:
        self.target, self.sender, self._report = target, sender, report
        self.files = self.bytes = self.unchanged = self.done = self.total = 0
        self.skipped: list[SkippedFile] = []

    async def run(self) -> None:
        process = self.sender.process
        known = await asyncio.to_thread(list_files, self.target)
        self.sender.sends = True
        await process.write(json.dumps(known).encode() + b"\n")
        while True:
            message = _message(await self._line())
            if message is None:
                raise CommandFailed(self.sender.name, "the connection ended before the last file", hint="run it again")
            if "end" in message:
                self.sender.sends = False
                return
            if "bytes" in message:
                self.total = int(message["bytes"])
            elif "name" in message:
                await self._take(message, str(message["name"]))
            self._report()

    async def _line(self) -> bytes:
        try:
            async with asyncio.timeout(STALL_TIMEOUT_S):
                return await self.sender.process.readline()
        except TimeoutError:
            raise CommandTimeout(self.sender.name, "the job's files stopped to come", hint="run it again") from None

    async def _take(self, message: Mapping[str, Any], name: str) -> None:
        if "unchanged" in message:
            self.unchanged += 1
            self.done += int(message["unchanged"])
            return
        why = str(message["skipped"]) if "skipped" in message else unsafe_name(self.target, name)
        if not why and "link" in message:
            why = self._make_link(name, str(message["link"]))
        if why:
            self.skipped.append(SkippedFile(name, why))
        if "size" in message:
            await self._write(message, None if why else self.target / name)

    def _make_link(self, name: str, link: str) -> str:
        """Make a link that stays among the files; otherwise why there is none."""
        inside = os.path.normpath(os.path.join(os.path.dirname(name), link))  # noqa: PTH118, PTH120
        if link.startswith("/") or inside.startswith("..") or "\0" in link or not link:
            return "a link that leaves the job's files"
        path = self.target / name
        path.parent.mkdir(parents=True, exist_ok=True)
        if path.is_symlink():
            path.unlink()
        with contextlib.suppress(FileExistsError):
            path.symlink_to(link)
        return ""

    async def _write(self, header: Mapping[str, Any], path: Path | None) -> None:
        """Write a file beside its place and rename it, or let its content pass by."""
        part = path.with_name(f".{path.name}{PART}") if path else None
        try:
            with await asyncio.to_thread(_create, part) as file:
                while (line := await self._line()).startswith(b"+"):
                    data = base64.b64decode(line[1:])
                    await asyncio.to_thread(file.write, data)
                    self.done += len(data)
                    self.bytes += len(data) if path else 0
                    self._report()
                if "sent" not in (_message(line) or {}):
                    cause = f"the connection ended within {printable(str(header['name']))}"
                    raise CommandFailed(self.sender.name, cause, hint="run it again: it goes on with that file")
            if path is not None and part is not None:
                part.chmod(int(header["mode"]) & 0o755 | 0o600)
                os.utime(part, ns=(int(header["time"]), int(header["time"])))
                part.replace(path)
                self.files += 1
        finally:
            if part is not None:
                part.unlink(missing_ok=True)


def _create(part: Path | None) -> BinaryIO:
    if part is None:
        return Path(os.devnull).open("wb")
    part.parent.mkdir(parents=True, exist_ok=True)
    return os.fdopen(os.open(part, os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_NOFOLLOW, 0o600), "wb")


def unsafe_name(target: Path, name: str) -> str:
    """Why a name that a host sent is not written here; empty for a good one."""
    parts = name.split("/")
    if any(part in ("", ".", "..") or len(os.fsencode(part)) > MAX_NAME_BYTES - len(PART) - 1 for part in parts):
        return "its name cannot be used here"
    if not name.isprintable() or len(os.fsencode(name)) > MAX_PATH_BYTES:
        return "its name has control characters, or is too long"
    place = target
    for part in parts[:-1]:
        place = place / part
        if place.is_symlink() or (place.exists() and not place.is_dir()):
            return f"{place} is here, and is no directory"
    if (place / parts[-1]).is_dir() and not (place / parts[-1]).is_symlink():
        return "a directory of that name is here"
    return ""


def list_files(target: Path) -> dict[str, list[int]]:
    """The size and time of each file here."""
    known: dict[str, list[int]] = {}
    for directory, _, names in os.walk(target):
        for name in names:
            path = Path(directory, name)
            if path.is_file() and not path.is_symlink():
                status = path.stat()
                known[path.relative_to(target).as_posix()] = [status.st_size, status.st_mtime_ns]
    return known
