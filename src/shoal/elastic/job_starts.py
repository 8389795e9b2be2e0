"""Starts jobs as soon as their nodes are there. slurmctld alone would look every 30 s whether they are.

Before each job slurmctld runs `start.sh`, and looks at the job's nodes when that ends. Where they have to be woken it
waits at a pipe of its own in a directory, and the service says through it that there is nothing more to wait for.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import os
import stat
from collections import defaultdict
from collections.abc import Iterable, Sequence
from pathlib import Path

from shoal.errors import HostError, SlurmError
from shoal.hostlist import compress, expand
from shoal.hosts.api import Host
from shoal.roles.elastic import STARTS

LOOK_SECONDS = 0.5
"""From one look to the next while jobs wait."""
PATIENCE = 60.0
"""Seconds for slurmctld to answer."""
WAITING_COMMAND = ("squeue", "-h", "-t", "CONFIGURING", "-o", "%A %N")
ABSENT = frozenset("~#%!")
"""What sinfo puts behind the state of a node without a machine, or with one that is not a node yet or no longer."""

log = logging.getLogger("shoal.elastic.job_starts")


class Starts:
    """The jobs that wait, each at its pipe. The directory is Slurm's user's: what is in it is not trusted."""

    def __init__(self, host: Host, directory: Path = Path(STARTS)) -> None:
        self._host = host
        self._directory = directory

    async def run(self) -> None:
        """Look for ever."""
        while True:
            await asyncio.sleep(LOOK_SECONDS)
            try:
                await self.step()
            except SlurmError:
                pass  # slurmctld cannot be asked, and so starts no job either
            except Exception:  # the jobs start without us, a little later
                log.exception("jobs that wait for nodes could not be looked at")

    async def step(self) -> None:
        """Have jobs start whose nodes are there, and let go of those that no longer wait. Raises SlurmError."""
        pipes = self._pipes()  # before slurmctld is asked: whoever is at a pipe now has its nodes already
        if not pipes:
            return
        waiting = await self._waiting()
        absent = await self._absent({node for job in pipes for node in waiting.get(job, ())})
        for job in pipes:
            if absent.isdisjoint(waiting.get(job, ())):
                for pipe in pipes[job]:
                    _wake(pipe)

    def _pipes(self) -> dict[str, list[Path]]:
        """By the number of the job."""
        found: dict[str, list[Path]] = defaultdict(list)
        with contextlib.suppress(FileNotFoundError):
            for entry in os.scandir(self._directory):
                if not entry.name.startswith(".") and stat.S_ISFIFO(entry.stat(follow_symlinks=False).st_mode):
                    found[entry.name.partition(".")[0]].append(Path(entry.path))
        return dict(found)

    async def _waiting(self) -> dict[str, list[str]]:
        """The nodes of every job that has some and does not run yet."""
        found: dict[str, list[str]] = {}
        for line in await self._ask(WAITING_COMMAND):
            job, _, nodes = line.partition(" ")
            found[job] = expand(nodes)
        return found

    async def _absent(self, nodes: Iterable[str]) -> set[str]:
        """Those of the nodes that are not there yet."""
        names = sorted(nodes)
        lines = await self._ask(("sinfo", "-h", "-N", "-n", compress(names), "-o", "%N %t")) if names else []
        return {name for name, state in (line.split() for line in lines) if ABSENT & set(state)}

    async def _ask(self, argv: Sequence[str]) -> list[str]:
        try:
            done = await self._host.run(argv, timeout=PATIENCE)
        except HostError as error:
            raise SlurmError(error.message, hint=error.hint) from error
        if done.status != 0:
            raise SlurmError(f"{argv[0]}: {done.error_text.strip() or f'exit status {done.status}'}")
        return done.text.splitlines()


def _wake(pipe: Path) -> None:
    """Let the program at a pipe end. Where none is any more, the pipe alone goes."""
    with contextlib.suppress(OSError):
        handle = os.open(pipe, os.O_WRONLY | os.O_NONBLOCK | os.O_NOFOLLOW)
        try:
            if stat.S_ISFIFO(os.fstat(handle).st_mode):
                os.write(handle, b"\n")
        finally:
            os.close(handle)
    pipe.unlink(missing_ok=True)
