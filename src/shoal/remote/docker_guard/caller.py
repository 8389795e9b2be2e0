"""Who is at the other end of a socket: the user, and the Slurm job of the process that connected."""

from __future__ import annotations

import errno
import os
import pwd
import re
import socket
import struct

TYPE_CHECKING = False  # `typing` is slow to import, and only a type checker needs it
if TYPE_CHECKING:
    from typing import Optional

SO_PEERPIDFD = 77
"""A handle of the process that connected, from Linux 6.5 on."""
_JOB = re.compile(r"\d+:(?:freezer)?:(/(?:[^/]+/)*[^/]*slurm[^/]*/(?:uid_\d+/)?job_(\d+))(?:/.*)?")


class Rejection(Exception):
    """A request that is not let through. The text is for the user."""


class Caller:
    """A process of a job."""

    def __init__(self, uid: int, gid: int, job: str, cgroup: str) -> None:
        self.uid, self.gid, self.job, self.cgroup = uid, gid, job, cgroup

    @property
    def user(self) -> str:
        try:
            return pwd.getpwuid(self.uid).pw_name
        except KeyError:
            raise Rejection(f"this node has no user {self.uid}") from None


class Peer:
    """The process that connected. A number may be used again: every answer is about that very process, or none."""

    def __init__(self, connection: socket.socket, proc: str = "/proc") -> None:
        credentials = connection.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, struct.calcsize("3i"))
        self.pid, self.uid, self.gid = struct.unpack("3i", credentials)
        self._directory = -1
        try:
            # A process's directory never becomes that of another process with the same number.
            self._directory = os.open(f"{proc}/{self.pid}", os.O_RDONLY | os.O_DIRECTORY)
        except OSError:
            return
        if os.fstat(self._directory).st_uid not in (self.uid, 0) or not _is_peer(connection, self.pid, proc):
            self.close()

    def caller(self) -> Caller:
        """Asked at every request: the job may have ended, and its socket may be in other hands."""
        found = find_job(self._read("cgroup"))
        if not found:
            raise Rejection("docker works inside a job of Slurm only: use it in srun, sbatch or `shoal run`")
        return Caller(self.uid, self.gid, *found)

    def _read(self, name: str) -> str:
        if self._directory < 0:
            return ""
        try:
            descriptor = os.open(name, os.O_RDONLY, dir_fd=self._directory)
        except OSError:
            return ""
        with os.fdopen(descriptor, encoding="utf-8", errors="replace") as file:
            try:
                return file.read()
            except OSError:  # the process has ended
                return ""

    def close(self) -> None:
        if self._directory >= 0:
            os.close(self._directory)
            self._directory = -1


def find_job(cgroups: str) -> Optional[tuple[str, str]]:
    """The number of the job and its cgroup, from a /proc/PID/cgroup. Users cannot make such groups."""
    matches = filter(None, map(_JOB.fullmatch, cgroups.splitlines()))
    return next(((match.group(2), match.group(1)) for match in matches), None)


def _is_peer(connection: socket.socket, pid: int, proc: str) -> bool:
    """Whether the process that connected still runs, so that the number is still its own."""
    try:
        handle = connection.getsockopt(socket.SOL_SOCKET, SO_PEERPIDFD)
    except OSError as error:
        # An older kernel. The same user's other process may have the number now; another user's is told by its owner.
        return error.errno == errno.ENOPROTOOPT
    try:
        with open(f"{proc}/self/fdinfo/{handle}", encoding="ascii") as file:
            return f"Pid:\t{pid}\n" in file.read()
    except OSError:
        return False
    finally:
        os.close(handle)
