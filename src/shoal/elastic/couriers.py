"""Jobs of `shoal run` on rented containers: their files go there when they start, and come back while they run.

Slurm is asked every second which there are. Each has a pair of `jobs/courier.py`, one here and one in the container,
both as the job's own user, joined by ssh. The controller alone decides what is sent where: a container can ask for
nothing. What is cut off begins again with what is missing; nothing is remembered here, so a service that was killed
goes on. How a job waits for its files, and its end for theirs, is told in `shoal.jobs.staging`.
"""

from __future__ import annotations

import asyncio
import logging
import shlex
from collections import defaultdict
from collections.abc import Callable, Collection
from dataclasses import dataclass
from pathlib import Path
from typing import IO

from shoal.elastic.ledger import Ledger
from shoal.elastic.programs import DEVNULL, Ended, joined, run
from shoal.elastic.slurm import PATIENCE
from shoal.environments.place import LOCAL, look_command, parse_look, unpack_command
from shoal.errors import HostError
from shoal.hosts.api import Host
from shoal.jobs import courier, staging
from shoal.jobs.model import JOBS_DIRECTORY, Note
from shoal.network.tunnel import conf_file
from shoal.roles.elastic import IDENTITY
from shoal.roles.environments import directory_of
from shoal.roles.rented import rented_containers
from shoal.spec.model import Spec

log = logging.getLogger("shoal.elastic.couriers")

PROGRAM = Path(courier.__file__).read_text()
LOOK_SECONDS = 1.0
AGAIN_SECONDS = 2.0
"""From an attempt that was cut off to the next."""

TURNS = ("squeue", "-h", "-t", "running,completing", "-o", "%A %i %T %U %G %S %N")
"""What runs or is about to end. Nothing of it is a user's to choose: who writes here is not taken for somebody else."""
_FIELD = "\x1f"


def note_command(number: str) -> tuple[str, ...]:
    """Where one job runs and what its comment says, both of them its owner's to choose."""
    return ("squeue", "-h", "-t", "all", "-j", number, "-o", f"%Z{_FIELD}%k")


@dataclass(frozen=True)
class Turn:
    """One turn of a job in a container."""

    number: str
    """Slurm's own."""
    id: str
    """`17`, or `17_3` for one of an array: how its directory is called."""
    state: str
    uid: int
    gid: int
    start: str
    node: str

    @property
    def key(self) -> tuple[str, str]:
        """What tells it from others at the same time."""
        return self.number, self.node


def turns(text: str, containers: Collection[str]) -> list[Turn]:
    """What jobs are in containers, from the answer to TURNS."""
    found = [line.split() for line in text.splitlines()]
    return [
        Turn(number, id, state, int(uid), int(gid), start, node)
        for number, id, state, uid, gid, start, node in (words for words in found if len(words) == 7)
        if node in containers
    ]


def note_of(text: str, root: str) -> Note | None:
    """What `shoal run` noted of a job, from the answer to `note_command`; None for one that is somebody else's affair.

    `root` is where the jobs of `shoal run` are. All tasks of an array, which have a line each, are alike.
    """
    place, _, comment = text.partition("\n")[0].partition(_FIELD)
    return Note.parse(comment) if place == root else None


def ssh(node: str) -> list[str]:
    """How a program of the container is started: on the way of the tunnel to it, with the key that rented it."""
    more = ("-o", "ClearAllForwardings=yes", "-o", "ConnectTimeout=10", "-o", "ControlPath=none")
    return ["ssh", "-F", conf_file(node), "-i", IDENTITY, *more, "tunnel"]


def couriers(spec: Spec, ledger: Ledger, controller: Host) -> Couriers:
    """Those of a cluster."""
    containers = frozenset(rented_containers(spec))

    def present() -> Collection[str]:
        return containers & {rental.node for rental in ledger.live() if rental.state == "joined"} if containers else ()

    environments = {directory_of(spec, one) for one in spec.environments.values()}
    return Couriers(spec.cluster, containers, present, controller, environments)


class Hopeless(Exception):
    """What a job needs cannot be brought, and time does not cure it. The job is told, and ends."""


class Couriers:
    """What carries the files of jobs in containers, as long as it runs."""

    def __init__(
        self,
        cluster: str,
        containers: Collection[str],
        present: Callable[[], Collection[str]],
        slurm: Host,
        environments: Collection[str] = (),
        *,
        root: str | None = None,
        reach: Callable[[str], list[str]] = ssh,
    ) -> None:
        """`present` tells the containers that are there now; `environments` are the directories where some are built.

        `root` and `reach` take the place of where jobs are and how containers are reached, for tests.
        """
        self._root = root or f"{JOBS_DIRECTORY}/{cluster}"
        self._containers = containers
        self._present = present
        self._slurm = slurm
        self._environments = environments
        self._reach = reach
        self._listed: frozenset[tuple[str, str]] = frozenset()
        """The keys of jobs that Slurm has in containers."""
        self._carrying: dict[tuple[str, str], tuple[Turn, asyncio.Task[None]]] = {}
        self._unpacking: defaultdict[tuple[str, str], asyncio.Lock] = defaultdict(asyncio.Lock)

    async def run(self) -> None:
        """Look for ever."""
        try:
            while True:
                try:
                    await self.look()
                except HostError:
                    pass  # slurmctld may be away for a while
                except Exception:
                    log.exception("jobs in containers were not looked for; the next look tries again")
                await asyncio.sleep(LOOK_SECONDS)
        finally:
            tasks = [task for _, task in self._carrying.values()]
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)

    async def look(self) -> None:
        """Begin to carry for jobs that have started."""
        present = self._present()
        if not present and not self._carrying:
            return
        said = await self._slurm.run(TURNS, timeout=PATIENCE)
        if said.status != 0:
            return
        jobs = turns(said.text, self._containers)
        self._listed = frozenset(job.key for job in jobs)
        for job in jobs:
            if job.node in present and self._begins(job):
                self._carrying[job.key] = job, asyncio.create_task(self._carry(job))
        for key in [key for key, (_, task) in self._carrying.items() if task.done() and key not in self._listed]:
            del self._carrying[key]

    def _begins(self, job: Turn) -> bool:
        """Whether nobody has carried for this turn. One that is fetched is still shown until Slurm knows its end."""
        before, task = self._carrying.get(job.key, (None, None))
        if before is None or task is None:
            return True
        return task.done() and job.state == "RUNNING" and job.start != before.start

    async def _carry(self, job: Turn) -> None:
        """Carry for one turn of a job, however often the way breaks, until all is here or the container is gone."""
        said, note = "", None
        while True:
            try:
                if note is None:
                    asked = await self._slurm.run(note_command(job.number), timeout=PATIENCE)
                    note = note_of(asked.text, self._root)
                    if note is None and asked.status == 0:
                        return  # it came by another way
                problem = await self._attempt(job, note) if note else "Slurm does not say where it runs"
            except Exception as error:  # it must not end in silence: the job waits for it
                log.exception("job %s: what carries its files failed", job.id)
                problem = str(error)
            if not problem:
                log.info("job %s: all that it left on %s is here", job.id, job.node)
                return
            if job.node not in self._present() and job.key not in self._listed:
                log.warning("job %s: %s is gone; what it had not sent yet is lost", job.id, job.node)
                return
            if problem != said:
                log.warning("job %s: its files are not carried: %s; trying again", job.id, problem)
            said = problem
            await asyncio.sleep(AGAIN_SECONDS)

    async def _attempt(self, job: Turn, note: Note) -> str:
        """Carry all there is until the job is over. What went wrong, or nothing."""
        directory = f"{self._root}/{job.id}"
        try:
            problem = await self._send_environment(job, note.environment) or await self._send(job, note)
        except Hopeless as error:
            log.warning("job %s: %s", job.id, error)
            problem = (await self._there(job, staging.fail(job.uid, job.gid, directory, str(error)))).problem
        if problem := problem or await self._fetch(job):
            return problem
        return (await self._there(job, staging.done(job.number, job.uid, job.gid, directory))).problem

    async def _send(self, job: Turn, note: Note) -> str:
        """What the job needs."""
        ends = await joined(
            self._courier(job, "send", "there", note.code, note.runtime),
            self._courier_there(job, "take", "there"),
        )
        for end in ends:
            if end.status == courier.TOLD:
                raise Hopeless(end.said)
        return ends[1].problem or ends[0].problem

    async def _fetch(self, job: Turn) -> str:
        """What the job writes, as it writes it."""
        fetching = asyncio.create_task(
            joined(
                self._courier_there(job, "send", "back", staging.over_file(job.number)),
                self._courier(job, "take", "back"),
            )
        )
        try:
            while not fetching.done():
                await asyncio.wait([fetching], timeout=5 * LOOK_SECONDS)
                if job.key not in self._listed and not fetching.done():
                    await self._there(job, staging.say_over(job.number))
        finally:
            fetching.cancel()
            await asyncio.gather(fetching, return_exceptions=True)
        sender, taker = fetching.result()
        return sender.problem or taker.problem

    async def _send_environment(self, job: Turn, id: str) -> str:
        """A copy of the job's environment, where it is one that every node has for itself."""
        archives = [Path(directory, "archives", f"{id}.tar") for directory in self._environments] if id else []
        archive = next(filter(_is_roots, archives), None)
        if archive is None:
            return ""
        place = f"{LOCAL}/{id}"
        async with self._unpacking[(job.node, id)]:
            look = await self._there(job, shlex.join(look_command(place)))
            if look.status == 0 and parse_look(look.said).state == "missing":
                with archive.open("rb") as file:
                    unpacked = await self._there(job, shlex.join(unpack_command(place)), file)
                look = unpacked if unpacked.status else await self._there(job, shlex.join(look_command(place)))
        if look.status == 0 and parse_look(look.said).state == "broken":
            raise Hopeless(f"environment {id} does not run on {job.node}: the Python it was made with is not there")
        return look.problem

    def _courier(self, job: Turn, what: str, way: str, *more: str) -> list[str]:
        """The courier on this host, as the job's user."""
        words = (what, way, self._root, job.id, *more)
        return staging.as_user(job.uid, job.gid, "python3", "-I", "-S", "-c", PROGRAM, *words)

    def _courier_there(self, job: Turn, what: str, way: str, *more: str) -> list[str]:
        return [*self._reach(job.node), staging.marked(job.number, self._courier(job, what, way, *more))]

    async def _there(self, job: Turn, command: str, stdin: IO[bytes] | int = DEVNULL) -> Ended:
        """Run a command of root's shell in the container."""
        return await run([*self._reach(job.node), command], stdin)


def _is_roots(archive: Path) -> bool:
    """Whether an archive is there and nobody but root can have put it there: root unpacks it."""
    try:
        found = [path.lstat() for path in (archive, *archive.parents[:2])]
    except OSError:
        return False
    return all(one.st_uid == 0 and not one.st_mode & 0o022 for one in found)
