"""The files of jobs on rented containers: sent there when a job starts, fetched while it runs.

Each job has a pair of `remote/job_file_transfer.py`, one here and one in the container, both as the job's user, joined
by ssh. The controller alone decides what is copied where. An interrupted copy resumes with what is missing, and nothing
is stored here. `shoal.jobs.staging` shows how a job waits for its files, and its end for theirs.
"""

from __future__ import annotations

import asyncio
import logging
import pwd
import shlex
from collections import defaultdict
from collections.abc import Callable, Collection
from dataclasses import dataclass
from pathlib import Path
from typing import IO

from shoal.cloud.service.ledger import Ledger
from shoal.cloud.service.processes import DEVNULL, ProcessResult, run, run_connected
from shoal.cloud.service.slurm import SLURM_TIMEOUT_S
from shoal.environments.store import LOCAL_DIRECTORY, inspect_command, parse_inspection, unpack_command
from shoal.errors import HostError
from shoal.hosts.api import Host
from shoal.jobs import staging
from shoal.jobs.record import JOBS_DIRECTORY, USER_JOBS_DIRECTORY, JobComment
from shoal.network.tunnel import conf_file
from shoal.remote import job_file_transfer, python_command
from shoal.roles.elastic import IDENTITY
from shoal.roles.environments import directory_of
from shoal.roles.rented import rented_containers
from shoal.spec.model import Spec

log = logging.getLogger("shoal.cloud.service.job_file_copier")

SCAN_INTERVAL_S = 1.0
RETRY_PAUSE_S = 2.0
"""From an interrupted attempt to the next."""

JOBS_COMMAND = ("squeue", "-h", "-t", "running,completing", "-o", "%A %i %T %U %G %S %N")
"""Jobs that run or are ending. No field is the user's to choose, so none can forge another's."""
_FIELD = "\x1f"


def note_command(number: str) -> tuple[str, ...]:
    """A job's working directory and comment, both chosen by its owner."""
    return ("squeue", "-h", "-t", "all", "-j", number, "-o", f"%Z{_FIELD}%k")


@dataclass(frozen=True)
class ContainerJob:
    """A job in a container, from one start to its end or requeue."""

    number: str
    """Slurm's job id."""
    id: str
    """`17`, or `17_3` for a task of an array: the name of its directory."""
    state: str
    uid: int
    gid: int
    start: str
    node: str

    @property
    def key(self) -> tuple[str, str]:
        """Unique among the jobs of one moment."""
        return self.number, self.node


def parse_jobs(text: str, containers: Collection[str]) -> list[ContainerJob]:
    """The jobs in containers, from the output of JOBS_COMMAND."""
    lines = [line.split() for line in text.splitlines()]
    return [
        ContainerJob(number, id, state, int(uid), int(gid), start, node)
        for number, id, state, uid, gid, start, node in (words for words in lines if len(words) == 7)
        if node in containers
    ]


@dataclass(frozen=True)
class JobNote:
    """What `shoal run` noted of a job."""

    root: str
    """The directory of its jobs, here and in the container."""
    comment: JobComment


def parse_note(text: str, roots: Collection[str]) -> JobNote | None:
    """What `shoal run` noted of a job, from the output of `note_command`; None for a job submitted otherwise.

    `roots` are the directories that `shoal run` uses. The tasks of an array have a line each, all alike.
    """
    directory, _, text = text.partition("\n")[0].partition(_FIELD)
    comment = JobComment.parse(text)
    return JobNote(directory, comment) if comment and directory in roots else None


def ssh(node: str) -> list[str]:
    """The start of a command that runs in the container: over its tunnel's route, with the key that rented it."""
    more = ("-o", "ClearAllForwardings=yes", "-o", "ConnectTimeout=10", "-o", "ControlPath=none")
    return ["ssh", "-F", conf_file(node), "-i", IDENTITY, *more, "tunnel"]


def create_job_file_copier(spec: Spec, ledger: Ledger, controller: Host) -> JobFileCopier:
    """The copier of a cluster."""
    containers = frozenset(rented_containers(spec))

    def present() -> Collection[str]:
        return containers & {rental.node for rental in ledger.live() if rental.state == "joined"} if containers else ()

    environments = {directory_of(spec, entry) for entry in spec.environments.values()}
    return JobFileCopier(spec.cluster, containers, present, controller, environments)


class PermanentError(Exception):
    """A job cannot get what it needs, now or later. It ends with this message."""


class JobFileCopier:
    """Copies the files of jobs in containers for as long as it runs."""

    def __init__(
        self,
        cluster: str,
        containers: Collection[str],
        present: Callable[[], Collection[str]],
        slurm: Host,
        environments: Collection[str] = (),
        *,
        root: str | None = None,
        user_jobs: str = USER_JOBS_DIRECTORY,
        reach: Callable[[str], list[str]] = ssh,
    ) -> None:
        """`present` returns the containers that are joined; `environments` are directories that hold environments.

        Tests replace `root`, the directory of root's jobs, `user_jobs`, which has one for each user, and `reach`, the
        start of a command that runs in a container.
        """
        self._root = root or f"{JOBS_DIRECTORY}/{cluster}"
        self._user_jobs = user_jobs
        self._containers = containers
        self._present = present
        self._slurm = slurm
        self._environments = environments
        self._reach = reach
        self._listed: frozenset[tuple[str, str]] = frozenset()
        """Keys of the jobs in containers at the last scan."""
        self._copies: dict[tuple[str, str], tuple[ContainerJob, asyncio.Task[None]]] = {}
        self._unpacking: defaultdict[tuple[str, str], asyncio.Lock] = defaultdict(asyncio.Lock)

    async def run(self) -> None:
        """Scan until cancelled."""
        try:
            while True:
                try:
                    await self.scan()
                except HostError:
                    pass  # slurmctld may be away for a while
                except Exception:
                    log.exception("cannot list the jobs in containers; the next scan tries again")
                await asyncio.sleep(SCAN_INTERVAL_S)
        finally:
            tasks = [task for _, task in self._copies.values()]
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)

    async def scan(self) -> None:
        """Start to copy for jobs that have started."""
        present = self._present()
        if not present and not self._copies:
            return
        result = await self._slurm.run(JOBS_COMMAND, timeout=SLURM_TIMEOUT_S)
        if result.status != 0:
            return
        jobs = parse_jobs(result.text, self._containers)
        self._listed = frozenset(job.key for job in jobs)
        for job in jobs:
            if job.node in present and self._is_new(job):
                self._copies[job.key] = job, asyncio.create_task(self._copy(job))
        for key in [key for key, (_, task) in self._copies.items() if task.done() and key not in self._listed]:
            del self._copies[key]

    def _is_new(self, job: ContainerJob) -> bool:
        """Whether this start of the job was not copied yet. squeue lists a fetched job until its Epilog ends."""
        before, task = self._copies.get(job.key, (None, None))
        if before is None or task is None:
            return True
        return task.done() and job.state == "RUNNING" and job.start != before.start

    async def _copy(self, job: ContainerJob) -> None:
        """Copy until all files are here or the container is gone, however often the connection breaks."""
        last_problem, note = "", None
        while True:
            try:
                if note is None:
                    result = await self._slurm.run(note_command(job.number), timeout=SLURM_TIMEOUT_S)
                    note = parse_note(result.text, self._roots(job))
                    if note is None and result.status == 0:
                        return  # not a job of `shoal run`
                problem = await self._attempt(job, note) if note else "squeue does not show its directory"
            except Exception as error:  # a task that ends without a word would leave the job waiting
                log.exception("job %s: copying its files failed", job.id)
                problem = str(error)
            if not problem:
                log.info("job %s: all its files on %s are here", job.id, job.node)
                return
            if job.node not in self._present() and job.key not in self._listed:
                log.warning("job %s: %s is gone; files not fetched yet are lost", job.id, job.node)
                return
            if problem != last_problem:
                log.warning("job %s: cannot copy its files: %s; trying again", job.id, problem)
            last_problem = problem
            await asyncio.sleep(RETRY_PAUSE_S)

    async def _attempt(self, job: ContainerJob, note: JobNote) -> str:
        """Copy until the job has ended; the problem, or \"\"."""
        directory = f"{note.root}/{job.id}"
        try:
            problem = await self._send_environment(job, note.comment.environment) or await self._send(job, note)
        except PermanentError as error:
            log.warning("job %s: %s", job.id, error)
            problem = (await self._run_there(job, staging.fail(job.uid, job.gid, directory, str(error)))).problem
        if problem := problem or await self._fetch(job, note.root):
            return problem
        return (await self._run_there(job, staging.cleanup_command(job.number, job.uid, job.gid, directory))).problem

    async def _send(self, job: ContainerJob, note: JobNote) -> str:
        """Send what the job needs."""
        ends = await run_connected(
            self._transfer(job, note.root, "send", "there", note.comment.code, note.comment.runtime),
            self._transfer_there(job, note.root, "take", "there"),
        )
        for end in ends:
            if end.status == job_file_transfer.EXIT_WITH_CAUSE:
                raise PermanentError(end.output)
        return ends[1].problem or ends[0].problem

    async def _fetch(self, job: ContainerJob, root: str) -> str:
        """Fetch what the job writes, while it writes."""
        fetching = asyncio.create_task(
            run_connected(
                self._transfer_there(job, root, "send", "back", staging.end_mark_path(job.number)),
                self._transfer(job, root, "take", "back"),
            )
        )
        try:
            while not fetching.done():
                await asyncio.wait([fetching], timeout=5 * SCAN_INTERVAL_S)
                if job.key not in self._listed and not fetching.done():
                    await self._run_there(job, staging.write_end_mark_command(job.number))
        finally:
            fetching.cancel()
            await asyncio.gather(fetching, return_exceptions=True)
        sender, receiver = fetching.result()
        return sender.problem or receiver.problem

    async def _send_environment(self, job: ContainerJob, id: str) -> str:
        """Send a copy of the job's environment if it is one with `place: local`."""
        archives = [Path(directory, "archives", f"{id}.tar") for directory in self._environments] if id else []
        archive = next(filter(_belongs_to_root, archives), None)
        if archive is None:
            return ""
        path = f"{LOCAL_DIRECTORY}/{id}"
        async with self._unpacking[(job.node, id)]:
            state = await self._run_there(job, shlex.join(inspect_command(path)))
            if state.status == 0 and parse_inspection(state.output).state == "missing":
                with archive.open("rb") as file:
                    unpacked = await self._run_there(job, shlex.join(unpack_command(path)), file)
                state = unpacked if unpacked.status else await self._run_there(job, shlex.join(inspect_command(path)))
        if state.status == 0 and parse_inspection(state.output).state == "broken":
            raise PermanentError(f"environment {id} does not run on {job.node}: its Python is not installed there")
        return state.problem

    def _roots(self, job: ContainerJob) -> tuple[str, ...]:
        """Where jobs of the job's user may be. Others cannot have written there in the user's place."""
        try:
            return self._root, f"{self._user_jobs}/{pwd.getpwuid(job.uid).pw_name}"
        except KeyError:
            return (self._root,)

    def _transfer(self, job: ContainerJob, root: str, what: str, way: str, *more: str) -> list[str]:
        """The transfer program on this host, as the job's user."""
        command = python_command("job_file_transfer", what, way, root, job.id, *more)
        return staging.as_user(job.uid, job.gid, *command)

    def _transfer_there(self, job: ContainerJob, root: str, what: str, way: str, *more: str) -> list[str]:
        return [*self._reach(job.node), staging.with_job_lock(job.number, self._transfer(job, root, what, way, *more))]

    async def _run_there(self, job: ContainerJob, command: str, stdin: IO[bytes] | int = DEVNULL) -> ProcessResult:
        """Run a shell command as root in the container."""
        return await run([*self._reach(job.node), command], stdin)


def _belongs_to_root(archive: Path) -> bool:
    """Whether an archive exists and only root can have written it: root unpacks it."""
    try:
        statuses = [path.lstat() for path in (archive, *archive.parents[:2])]
    except OSError:
        return False
    return all(status.st_uid == 0 and not status.st_mode & 0o022 for status in statuses)
