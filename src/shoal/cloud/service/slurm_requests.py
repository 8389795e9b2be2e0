"""What Slurm's programs on the controller ask of the service: power requests, and jobs that wait for their nodes.

Before each job slurmctld runs `job_start.sh`, and checks the job's nodes when that ends. While nodes are woken, the
program waits at a named pipe, and the service writes to it as soon as all nodes are up. slurmctld alone would check
only every 30 s.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import logging
import os
import stat
from collections import defaultdict
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path

from shoal.cloud.service.slurm import run_slurm
from shoal.errors import SlurmError
from shoal.hostlist import HostlistError, compress, expand
from shoal.hosts.api import Host
from shoal.remote.power_request import MAX_REQUEST_BYTES, REQUESTS, VERBS
from shoal.roles.elastic import STARTS

log = logging.getLogger("shoal.elastic")


@dataclass(frozen=True)
class PowerRequest:
    """A request of Slurm to power nodes up or down."""

    verb: str
    nodes: tuple[str, ...]
    jobs: tuple[tuple[str, tuple[str, ...]], ...] = ()
    """Jobs with the nodes that they wait for."""


class RequestQueue:
    """A directory that Slurm's user writes to. Its content is not trusted: it only starts a step."""

    def __init__(self, directory: Path = Path(REQUESTS)) -> None:
        self._directory = directory

    def waiting(self) -> bool:
        """Whether there are requests."""
        return bool(self._names())

    def take(self) -> list[PowerRequest]:
        """Remove and return all requests, oldest first. Invalid ones are logged and dropped."""
        requests: list[PowerRequest] = []
        for name in self._names():
            path = self._directory / name
            try:
                requests.append(_read(path))
            except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
                log.warning("ignoring request %s: %s", name, error)
            path.unlink(missing_ok=True)
        return requests

    def _names(self) -> list[str]:
        try:
            entries = [entry for entry in os.scandir(self._directory) if not entry.name.startswith(".")]
            # a directory is no request
            return sorted(entry.name for entry in entries if not entry.is_dir(follow_symlinks=False))
        except FileNotFoundError:
            return []


def _read(path: Path) -> PowerRequest:
    # never through a link: the directory belongs to another user
    with os.fdopen(os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK), "rb") as file:
        request = json.loads(file.read(MAX_REQUEST_BYTES))
    if request["verb"] not in VERBS:
        raise ValueError(f"unknown verb {request['verb']!r}")
    try:
        jobs = tuple((str(job["id"]), tuple(expand(job["nodes"]))) for job in request["jobs"])
        return PowerRequest(request["verb"], tuple(expand(request["nodes"])), jobs)
    except HostlistError as error:
        raise ValueError(str(error)) from error


POLL_INTERVAL_S = 0.5
"""The interval between two checks while jobs wait."""
WAITING_COMMAND = ("squeue", "-h", "-t", "CONFIGURING", "-o", "%A %N")
ABSENT_STATE_MARKS = frozenset("~#%!")
"""What sinfo appends to the state of a node whose machine is missing, starting or ending."""


class JobStarter:
    """Starts jobs that wait at a pipe. The directory belongs to Slurm's user, so its content is not trusted."""

    def __init__(self, host: Host, directory: Path = Path(STARTS)) -> None:
        self._host = host
        self._directory = directory

    async def run(self) -> None:
        """Check forever."""
        while True:
            await asyncio.sleep(POLL_INTERVAL_S)
            try:
                await self.step()
            except SlurmError:
                pass  # slurmctld does not answer, so it starts no job either
            except Exception:  # the jobs start without us, a little later
                log.exception("cannot check jobs that wait for nodes")

    async def step(self) -> None:
        """Start jobs whose nodes are up, and release those that no longer wait. Raises SlurmError."""
        pipes = self._pipes()  # before slurmctld is queried: a job at a pipe already has its nodes
        if not pipes:
            return
        waiting = await self._waiting()
        absent = await self._absent({node for job in pipes for node in waiting.get(job, ())})
        for job in pipes:
            if absent.isdisjoint(waiting.get(job, ())):
                for pipe in pipes[job]:
                    _wake(pipe)

    def _pipes(self) -> dict[str, list[Path]]:
        """By job id."""
        pipes: dict[str, list[Path]] = defaultdict(list)
        with contextlib.suppress(FileNotFoundError):
            for entry in os.scandir(self._directory):
                if not entry.name.startswith(".") and stat.S_ISFIFO(entry.stat(follow_symlinks=False).st_mode):
                    pipes[entry.name.partition(".")[0]].append(Path(entry.path))
        return pipes

    async def _waiting(self) -> dict[str, list[str]]:
        """The nodes of every job that has nodes and does not run yet."""
        lines = [line.partition(" ") for line in (await run_slurm(self._host, WAITING_COMMAND)).splitlines()]
        return {job: expand(nodes) for job, _, nodes in lines}

    async def _absent(self, nodes: Iterable[str]) -> set[str]:
        """Those of the nodes that are not up yet."""
        if not (names := sorted(nodes)):
            return set()
        text = await run_slurm(self._host, ("sinfo", "-h", "-N", "-n", compress(names), "-o", "%N %t"))
        return {name for name, state in map(str.split, text.splitlines()) if ABSENT_STATE_MARKS & set(state)}


def _wake(pipe: Path) -> None:
    """Let the program at a pipe end, and remove the pipe."""
    with contextlib.suppress(OSError):
        handle = os.open(pipe, os.O_WRONLY | os.O_NONBLOCK | os.O_NOFOLLOW)
        try:
            if stat.S_ISFIFO(os.fstat(handle).st_mode):
                os.write(handle, b"\n")
        finally:
            os.close(handle)
    pipe.unlink(missing_ok=True)
