"""`shoal logs`: what the ranks of a job printed, from all nodes, in the order of time, kept across requeues."""

from __future__ import annotations

import asyncio
import contextlib
import re
import time
from collections import Counter
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field, replace
from functools import partial

from shoal.contract import PROGRESS_FILE
from shoal.errors import CommandTimeout, HostError, SlurmError, UsageError
from shoal.hosts.api import Host, Process
from shoal.jobs import record as slurm_jobs
from shoal.jobs.failure import FailureReason
from shoal.jobs.logs import BATCH, JobFiles, JobLogs, LogLine, LogReader, merge
from shoal.jobs.record import JobRecord
from shoal.plan.connections import Connections
from shoal.remote import python_command
from shoal.verbs.context import Context, job_file_hosts
from shoal.verbs.node_files import NodeFiles, is_on_nodes, nodes_with_files, reader_command
from shoal.verbs.slurmctld import checked_output, gather_answers, job_owners, slurm_output, slurmctld_fix
from shoal.verbs.unsent_files import explain_job

_JOB = re.compile(r"[0-9]{1,10}(_[0-9]{1,10})?")
_MERGE_WINDOW_S = 0.5
"""How long a line is held back, so that one from a slower node can come before it."""
LOGIN_HOST = "login host"
POLL_INTERVAL_S = 0.5
REOPEN_INTERVAL_S = 5.0
"""Between the attempts to reach a host again that was away."""
LAST_READS = 3
"""How often the last lines of a job that has ended are asked for."""
READ_TIMEOUT_S = 120.0
TAIL_BYTES = 256 * 1024
"""Enough of each rank's log to find a traceback in."""

FOLLOW_LINES = 50_000
"""What `follow` keeps of the lines that it has shown, to say at the end why the job failed."""


@dataclass(frozen=True)
class LogsResult:
    """The lines of a job, and the nodes that could not be asked."""

    job: str
    lines: tuple[LogLine, ...]
    record: JobRecord | None = None
    """None where neither slurmctld nor its file knows the job."""
    reason: FailureReason | None = None
    failures: Mapping[str, HostError] = field(default_factory=dict)


async def logs(context: Context, job: str, directory: str | None = None) -> LogsResult:
    """All that the ranks of a job have printed."""
    check_job(job)
    async with await context.connections() as fleet:
        controller = await fleet.host(context.controller.name)
        [record] = await gather_answers(controller, find_record(controller, job))
        check_owner(context, record)
        files = files_of(context, job, record, directory)
        reader = LogReader(files.echo, files.batch_host)
        await _read_hosts(fleet, job_file_hosts(context), files, reader, label=_label(context, record))
        if record is not None and (nodes := nodes_with_files(context, record)):
            await _read_nodes(fleet, NodeFiles(controller, nodes, _command(files, 0), reader.take), record)
        return _result(context, job, record, reader.result(), fleet)


async def follow(
    context: Context,
    job: str,
    show: Callable[[LogLine], None],
    directory: str | None = None,
    show_bars: Callable[[Iterable[LogLine]], None] = lambda bars: None,
) -> LogsResult:
    """Show lines as they come until the job has ended; `show_bars` gets those that are not finished, now and then."""
    check_job(job)
    async with await context.connections() as fleet:
        controller = await fleet.host(context.controller.name)
        [record] = await gather_answers(controller, find_record(controller, job))
        check_owner(context, record)
        files = files_of(context, job, record, directory)
        if record is None:
            job_logs = await read(fleet, job_file_hosts(context), files)
            for line in job_logs.lines:
                show(line)
            return _result(context, job, record, job_logs, fleet)
        reader = LogReader(files.echo, files.batch_host, FOLLOW_LINES)
        sorter = _Sorter(show, lambda: show_bars(reader.unfinished()))
        label, command = _label(context, record), _command(files, 0, "follow")

        async def follow_host(name: str) -> _HostFollower:
            process = await (await fleet.host(name)).start(command)
            return _HostFollower(fleet, name, command, process, lambda data: _take(reader, sorter, label or name, data))

        followers = await fleet.each(job_file_hosts(context), follow_host)
        pumps = [
            asyncio.create_task(follower.pump(reopen=name != controller.name)) for name, follower in followers.items()
        ]
        tick_task = asyncio.create_task(sorter.tick())
        try:
            if is_on_nodes(context, record):
                record = await _follow_nodes(context, fleet, controller, record, files, reader, sorter)
            record = await wait_for_end(controller, record, lambda record: sorter.add(_requeue_line(record)))
            for follower in followers.values():
                await follower.finish()
            await asyncio.wait(pumps, timeout=30) if pumps else None
        finally:
            tick_task.cancel()
            for pump in pumps:
                pump.cancel()
            await asyncio.gather(tick_task, *pumps, return_exceptions=True)
        for line in reader.others():
            sorter.add(line)
        sorter.flush()
        show_bars(())
        return _result(context, job, record, reader.result(), fleet)


def _label(context: Context, record: JobRecord | None) -> str:
    """The host that a user logs in to may be a node as well, and is read in both ways: then it has two names."""
    return LOGIN_HOST if record is not None and is_on_nodes(context, record) else ""


def _result(context: Context, job: str, record: JobRecord | None, job_logs: JobLogs, fleet: Connections) -> LogsResult:
    if record is None and not job_logs.lines and not fleet.failures:
        hint = "`shoal jobs` lists those that Slurm remembers; of others say the --directory they ran with, if any"
        raise UsageError(f"there is no job {job}", hint=hint)
    reason = explain_job(context, record, job_logs) if record else None
    return LogsResult(job, job_logs.lines, record, reason, dict(fleet.failures))


async def wait_for_end(
    controller: Host, record: JobRecord, show_requeue: Callable[[JobRecord], None] = lambda record: None
) -> JobRecord:
    """The job's record once it has ended. A job that is queued again has not, and is shown."""
    pause = 0.25
    while record.active:
        await asyncio.sleep(pause)
        pause = min(2.0, pause * 1.2)
        # No record has it where the controller was rebuilt meanwhile.
        before, record = record, await find_record(controller, record.id) or replace(record, state="UNKNOWN")
        if record.active and record.restarts > before.restarts:
            show_requeue(record)
    return record


def _requeue_line(record: JobRecord) -> LogLine:
    text = f"shoal: job {record.id} was queued again, restart {record.restarts}"
    return LogLine(time.time(), BATCH, record.restarts, text)


async def wait_for_job(context: Context, job: str) -> JobRecord | None:
    """The record of a job once it has ended. None where Slurm does not know the job."""
    async with context.controller_host() as controller:
        record = await find_record(controller, job)
        return await wait_for_end(controller, record) if record else None


async def wait_for_tasks(context: Context, job: str, show: Callable[[JobRecord], None]) -> None:
    """Wait until every task of an array has ended, and show each when it has."""
    ended: set[str] = set()

    def show_ended(records: Iterable[JobRecord]) -> None:
        for record in records:
            if not record.active and record.id not in ended:
                ended.add(record.id)
                show(record)

    async with context.controller_host() as controller:
        records = await find_records(controller, job)
        while any(record.active for record in records):
            show_ended(records)
            await asyncio.sleep(POLL_INTERVAL_S)
            records = await find_records(controller, job)
        show_ended([*records, *await ended_runs(controller, job)])


async def find_record(controller: Host, job: str) -> JobRecord | None:
    """The job as Slurm has it, None when it has no record of it (any more)."""
    records = await find_records(controller, job)
    if len(records) > 1 or any(record.id != record.number for record in records if "_" not in job):
        tasks = ", ".join(record.id for record in records[:8])
        raise UsageError(f"job {job} is an array", hint=f"name one of it: {tasks}")
    return records[0] if records else None


async def find_records(controller: Host, job: str) -> list[JobRecord]:
    """The job, or every task of an array, as Slurm has it, from its file where it ended a while ago."""
    try:
        result = await controller.run(slurm_jobs.show_command(job), timeout=60)
    except CommandTimeout:
        cause = f"slurmctld on {controller.name} does not answer"
        raise SlurmError(cause, hint=slurmctld_fix(controller.name)) from None
    if result.status != 0 and "nvalid job id" in result.error_text:
        return await ended_runs(controller, job)
    text = checked_output(controller, slurm_jobs.show_command(job), result)
    if slurm_jobs.is_plain(text):
        return slurm_jobs.parse_records(text)
    return slurm_jobs.parse_answer(text, job, await job_owners(controller))


async def read(fleet: Connections, nodes: list[str], files: JobFiles, tail: int = 0) -> JobLogs:
    """What these hosts have of a job."""
    reader = LogReader(files.echo, files.batch_host)
    await _read_hosts(fleet, nodes, files, reader, tail=tail)
    return reader.result()


async def _read_nodes(fleet: Connections, node_files: NodeFiles, record: JobRecord) -> None:
    await node_files.read(record)
    fleet.failures.update(node_files.failures)


async def _follow_nodes(
    context: Context,
    fleet: Connections,
    controller: Host,
    record: JobRecord,
    files: JobFiles,
    reader: LogReader,
    sorter: _Sorter,
) -> JobRecord:
    """Take what the nodes of a job print, wherever it runs and runs again, until it has ended; its last record."""

    take = partial(_take, reader, sorter)
    node_files = NodeFiles(controller, (), _command(files, 0, "follow"), take)
    pumps: dict[tuple[str, str], asyncio.Task[None]] = {}
    try:
        while record.active:
            nodes = nodes_with_files(context, record) if record.state == "RUNNING" else ()
            for node in nodes:
                if (node, record.start) not in pumps:
                    line = reader_command(record, [node], node_files.command)
                    pump = node_files.pump(node, line, must_succeed=False)
                    pumps[(node, record.start)] = asyncio.create_task(pump)
            await asyncio.sleep(POLL_INTERVAL_S)
            before, record = record, await find_record(controller, record.id) or replace(record, state="UNKNOWN")
            if record.active and record.restarts > before.restarts:
                sorter.add(_requeue_line(record))
    finally:
        for pump_task in pumps.values():
            pump_task.cancel()
        await asyncio.gather(*pumps.values(), return_exceptions=True)
    # Slurm has ended the steps that read, maybe before the last lines.
    node_files.nodes, node_files.command = nodes_with_files(context, record), _command(files, 0)
    for _ in range(LAST_READS):
        node_files.failures.clear()
        await node_files.read(record)
        if not node_files.failures:
            break
        await asyncio.sleep(POLL_INTERVAL_S)  # the node may still be busy with the end of the job
    fleet.failures.update(node_files.failures)
    return record


async def _read_hosts(
    fleet: Connections, nodes: list[str], files: JobFiles, lines: LogReader, *, tail: int = 0, label: str = ""
) -> None:

    async def read_node(name: str) -> None:
        process = await (await fleet.host(name)).start(_command(files, tail))
        try:
            async with asyncio.timeout(READ_TIMEOUT_S):
                while raw := await process.readline():
                    lines.take(label or name, raw)
        except TimeoutError:
            cause = f"the logs of the job did not arrive within {READ_TIMEOUT_S:g} s"
            raise CommandTimeout(name, cause, hint=f"look at the host with: shoal ssh {name}") from None
        finally:
            await process.kill()

    await fleet.each(nodes, read_node)


def check_job(job: str) -> None:
    if not _JOB.fullmatch(job):
        raise UsageError(f"{job!r} is not a job", hint="give its number, as 17, or 17_3 for one of an array")


def check_owner(context: Context, record: JobRecord | None) -> None:
    """Raise UsageError for the job of another user, whose files an ordinary user cannot read."""
    user = context.joined.user if context.joined is not None else ""
    if record is not None and user not in ("", "root", record.user):
        hint = "what it prints and writes is open to that user alone; `shoal jobs` shows its state"
        raise UsageError(f"job {record.id} belongs to {record.user}, not to {user}", hint=hint)


def files_of(context: Context, job: str, record: JobRecord | None, directory: str | None = None) -> JobFiles:
    """Where a job's files are: `shoal run` starts jobs in the jobs' directory, and Slurm remembers that."""
    root = directory or (record.work_dir if record else "") or f"{slurm_jobs.JOBS_DIRECTORY}/{context.cluster}"
    default_output = f"{root}/{job}.out"
    output = (record.output if record else "") or default_output
    error = (record.error if record else "") or output
    batch_host = record.batch_host if record and not record.restarts else ""
    owner = record.user if record else ""
    return JobFiles(f"{root}/{job}", output, error, echo=output != default_output, owner=owner, batch_host=batch_host)


def progress_command(record: JobRecord) -> tuple[str, ...]:
    """Prints what rank 0 of a job last wrote of itself, and when a rank last ended."""
    return python_command("log_reader", "progress", record.user, f"{record.work_dir}/{record.id}", PROGRESS_FILE)


def _command(files: JobFiles, tail: int, *options: str) -> tuple[str, ...]:
    arguments = (files.owner, files.directory, files.output, files.error, str(tail), *options)
    return python_command("log_reader", "logs", *arguments)


def _take(reader: LogReader, sorter: _Sorter, node: str, data: bytes) -> None:
    if line := reader.take(node, data):
        sorter.add(line)


class _HostFollower:
    """Reads on one host what a job prints, also after the host was away: a job may be queued again there."""

    def __init__(
        self, fleet: Connections, name: str, command: tuple[str, ...], process: Process, take: Callable[[bytes], None]
    ) -> None:
        self._fleet = fleet
        self._name = name
        self._command = command
        self._process = process
        self._take = take
        self._is_finished = False
        self._seen: Counter[bytes] = Counter()

    async def pump(self, *, reopen: bool) -> None:
        """Take lines until `finish`. Those that were taken before the host was away are left out."""
        while True:
            count: Counter[bytes] = Counter()
            with contextlib.suppress(HostError):
                while data := await self._process.readline():
                    file = data.partition(b"\t")[0]
                    count[file] += 1
                    if count[file] > self._seen[file] or file.endswith(b".bar"):
                        self._seen[file] = max(count[file], self._seen[file])
                        self._take(data)
            if self._is_finished or not reopen:
                return
            await asyncio.sleep(REOPEN_INTERVAL_S)
            try:
                self._process = await (await self._fleet.reconnect(self._name)).start(self._command)
                self._fleet.failures.pop(self._name, None)
            except HostError as error:
                self._fleet.failures[self._name] = error

    async def finish(self) -> None:
        """The job has ended: `pump` ends with its last lines."""
        self._is_finished = True
        with contextlib.suppress(HostError):
            await self._process.write(b"\n")


class _Sorter:
    """Holds lines back for a moment, so that those of several nodes come out in the order of time."""

    def __init__(self, show: Callable[[LogLine], None], on_tick: Callable[[], None]) -> None:
        self._show = show
        self._on_tick = on_tick
        self._held: list[tuple[float, LogLine]] = []

    def add(self, line: LogLine) -> None:
        self._held.append((time.monotonic(), line))

    async def tick(self) -> None:
        while True:
            await asyncio.sleep(_MERGE_WINDOW_S / 2)
            # Nothing came for a while, or the oldest has waited long enough: then all that is here is in order.
            if self._held and time.monotonic() - self._held[0][0] > _MERGE_WINDOW_S:
                self.flush()
            self._on_tick()

    def flush(self) -> None:
        entries, self._held = self._held, []
        for line in merge(line for _, line in entries):
            self._show(line)


async def all_ended_jobs(context: Context, controller: Host) -> list[JobRecord]:
    """As far back as there are records: what the file has, and slurmdbd, which knows more, where there is one.

    Either may know jobs that the other does not: the file is rotated, and a database can be put back to an older one.
    """
    records = [
        record
        for record in slurm_jobs.parse_jobcomp(await slurm_output(controller, slurm_jobs.JOBCOMP_COMMAND))
        if not record.active
    ]
    if context.accounting:
        records = slurm_jobs.merge_records(records, await accounted_jobs(controller))
    return records


async def accounted_jobs(controller: Host) -> list[JobRecord]:
    """The ended jobs of slurmdbd; none without accounting. A login host has no file of ended jobs."""
    with contextlib.suppress(SlurmError):
        return slurm_jobs.parse_sacct(await slurm_output(controller, slurm_jobs.SACCT_COMMAND))
    return []


async def ended_runs(controller: Host, job: str) -> list[JobRecord]:
    """One job, or the members of an array, as they last ended."""
    text = await slurm_output(controller, slurm_jobs.JOBCOMP_COMMAND)
    records = await accounted_jobs(controller) if slurm_jobs.lacks_jobcomp(text) else slurm_jobs.parse_jobcomp(text)
    newest = {record.id: record for record in records if job in (record.id, record.id.partition("_")[0])}
    return [record for record in newest.values() if not record.active]


def exclude_known(ended: Iterable[JobRecord], known: Iterable[JobRecord]) -> list[JobRecord]:
    """The ended jobs that slurmctld does not list. For a job that never started the two sources differ in its start."""
    known = list(known)
    listed_times = {(record.id, at) for record in known for at in (record.start, record.end)}
    requeued_ids = {record.id for record in known if record.restarts}
    return [
        record
        for record in ended
        if not {(record.id, record.start), (record.id, record.end)} & listed_times
        and not (record.id in requeued_ids and slurm_jobs.may_be_requeued(record))
    ]
