"""Who is at the other end of a socket: the user, and the Slurm job of the process that connected."""

from __future__ import annotations

import errno
import functools
import json
import os
import pwd
import re
import socket
import struct
import subprocess

TYPE_CHECKING = False  # `typing` is slow to import, and only a type checker needs it
if TYPE_CHECKING:
    from typing import Mapping, Optional, Sequence, Tuple

SO_PEERPIDFD = 77
"""A handle of the process that connected, from Linux 6.5 on."""
SLURM_TIMEOUT_S = 30
_JOB_V1 = re.compile(r"\d+:freezer:(?P<group>/slurm(?:_[^/]+)?/uid_(?P<uid>\d+)/job_(?P<job>\d+))(?:/.*)?")
_JOB_V2 = re.compile(r"0::(?P<group>/system\.slice/(?:[^/]+_)?slurmstepd\.scope/job_(?P<job>\d+))(?:/.*)?")
"""Slurm's own groups, from the root on: a user may have groups of any name below user.slice."""
_LIMITS = {
    "core": "Max core file size",
    "cpu": "Max cpu time",
    "data": "Max data size",
    "fsize": "Max file size",
    "locks": "Max file locks",
    "memlock": "Max locked memory",
    "msgqueue": "Max msgqueue size",
    "nice": "Max nice priority",
    "nofile": "Max open files",
    "nproc": "Max processes",
    "rss": "Max resident set",
    "rtprio": "Max realtime priority",
    "rttime": "Max realtime timeout",
    "sigpending": "Max pending signals",
    "stack": "Max stack size",
}
"""Docker's names of limits, and the kernel's in /proc/PID/limits."""


class Rejection(Exception):
    """A request that is not let through. The text is for the user."""


class Caller:
    """A process of a job."""

    def __init__(
        self,
        uid: int,
        gid: int,
        job: str,
        cgroup: str,
        groups: Sequence[int] = (),
        limits: Optional[Mapping[str, float]] = None,
    ) -> None:
        self.uid, self.gid, self.job, self.cgroup, self.groups = uid, gid, job, cgroup, groups
        self.limits = limits or {}
        """The hard limits that it has, by Docker's names."""

    @property
    def user(self) -> str:
        try:
            return pwd.getpwuid(self.uid).pw_name
        except KeyError:
            raise Rejection(f"this node has no user {self.uid}") from None

    def resolve(self, path: str) -> Optional[tuple[str, int]]:
        """The real path and the owner of a file, found with the caller's rights; None where these do not reach it."""
        receive, send = os.pipe()
        child = os.fork()
        if not child:
            try:
                self._take_rights()
                file = os.open(path, os.O_PATH)
                real = os.readlink(f"/proc/self/fd/{file}")
                if os.path.samestat(os.fstat(file), os.lstat(real)):  # else it has been removed or is no file
                    os.write(send, json.dumps([real, os.fstat(file).st_uid]).encode())
            finally:
                os._exit(0)
        os.close(send)
        with open(receive, "rb") as pipe:
            answer = pipe.read()
        os.waitpid(child, 0)
        if not answer:
            return None
        real, owner = json.loads(answer)
        return real, owner

    def _take_rights(self) -> None:
        if self.uid != os.getuid():
            os.setgroups(self.groups)
            os.setresgid(self.gid, self.gid, self.gid)
            os.setresuid(self.uid, self.uid, self.uid)


def peer_ids(connection: socket.socket) -> Tuple[int, int, int]:
    """The process, user and group that connected."""
    credentials = connection.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, struct.calcsize("3i"))
    pid, uid, gid = struct.unpack("3i", credentials)
    return pid, uid, gid


class Peer:
    """The process that connected. A number may be used again: every answer is about that very process, or none."""

    def __init__(self, connection: socket.socket, proc: str = "/proc") -> None:
        self.pid, self.uid, self.gid = peer_ids(connection)
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
        job, cgroup, owner = found
        if self.uid != (job_owner(job) if owner is None else owner):
            raise Rejection(f"job {job} is another user's: use docker in a job of your own")
        groups = re.search(r"^Groups:([ \t\d]*)$", self._read("status"), re.MULTILINE)
        numbers = [int(word) for word in groups[1].split()] if groups else ()
        return Caller(self.uid, self.gid, job, cgroup, numbers, hard_limits(self._read("limits")))

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


def find_job(cgroups: str) -> Optional[tuple[str, str, Optional[int]]]:
    """The job, its cgroup and, where the group says so, its user, from a /proc/PID/cgroup."""
    for line in cgroups.split("\n"):  # the names of groups may have any other character
        match = _JOB_V1.fullmatch(line) or _JOB_V2.fullmatch(line)
        if match:
            owner = match.groupdict().get("uid")
            return match["job"], match["group"], None if owner is None else int(owner)
    return None


def hard_limits(text: str) -> dict[str, float]:
    """The hard limits in a /proc/PID/limits."""
    limits = {}
    for name, words in _LIMITS.items():
        match = re.search(rf"^{words} +\S+ +(unlimited|\d+)\b", text, re.MULTILINE)
        if match:
            limits[name] = float("inf") if match[1] == "unlimited" else int(match[1])
    return limits


@functools.lru_cache(maxsize=None)
def job_owner(job: str) -> int:
    """The user of a job, as Slurm has it. `scontrol` would show the job's name first, which may say anything."""
    command = ["squeue", "--noheader", "--states=all", "--format=%U", f"--jobs={job}"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=SLURM_TIMEOUT_S)
    users = set(done.stdout.split())
    if len(users) != 1:
        raise Rejection(f"Slurm does not say whose job {job} is: try again")
    return int(users.pop())


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
