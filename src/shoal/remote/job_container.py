"""Becomes a command in the image that a job runs in on this node: standard library, Python 3.8.

    job_container.py COMMAND...

A step of the job runs it, as the job's user. Where no process of the job is in an image, the command runs on the node.
"""

from __future__ import annotations

import ctypes
import os
import sys
import warnings  # noqa: F401 - os.execvpe imports it, and inside there is no Python of the node

CLONE_NEWNS, CLONE_NEWUSER, PR_SET_NO_NEW_PRIVS = 0x20000, 0x10000000, 38
MARK = b"SHOAL_CONTAINER="
"""A variable of every process in an image."""
NOT_RUNNABLE = 127


def main(command: list[str]) -> int:
    try:
        pid = find_process(os.environ["SLURM_JOB_ID"])
        environment = enter(pid) if pid else dict(os.environ)
    except OSError as error:
        sys.stderr.write("shoal: error: cannot enter the job's image: %s\n" % error.strerror)
        return NOT_RUNNABLE
    try:
        os.execvpe(command[0], command, environment)
    except OSError as error:
        sys.stderr.write("shoal: error: cannot run %s: %s\n" % (command[0], error.strerror))
    return NOT_RUNNABLE


def find_process(job: str) -> int:
    """The first process of the job on this node that is in an image; 0 where there is none."""
    here = os.readlink("/proc/self/ns/user")
    for pid in sorted(int(name) for name in os.listdir("/proc") if name.isdecimal()):
        try:
            if os.stat("/proc/%d" % pid).st_uid != os.getuid() or os.readlink("/proc/%d/ns/user" % pid) == here:
                continue
            variables = read_variables(pid)
        except OSError:
            continue  # it has ended, or does not belong to this user
        if b"SLURM_JOB_ID=" + job.encode() in variables and any(entry.startswith(MARK) for entry in variables):
            return pid
    return 0


def read_variables(pid: int) -> list[bytes]:
    with open("/proc/%d/environ" % pid, "rb") as file:
        return file.read().split(b"\0")


def enter(pid: int) -> dict[str, str]:
    """Join the namespaces of the process, in its directory. Returns its variables, with this terminal's type."""
    entries = [os.fsdecode(entry).partition("=")[::2] for entry in read_variables(pid) if b"=" in entry]
    places = [os.open("/proc/%d/%s" % (pid, name), os.O_RDONLY | os.O_CLOEXEC) for name in ("ns/user", "ns/mnt")]
    directory = os.open("/proc/%d/cwd" % pid, os.O_PATH | os.O_CLOEXEC)
    libc = ctypes.CDLL(None, use_errno=True)
    for place, kind in zip(places, (CLONE_NEWUSER, CLONE_NEWNS)):
        if libc.setns(place, kind) != 0:
            code = ctypes.get_errno()
            raise OSError(code, os.strerror(code))
    os.fchdir(directory)
    libc.prctl(PR_SET_NO_NEW_PRIVS, 1, 0, 0, 0)
    terminal = {"TERM": os.environ["TERM"]} if "TERM" in os.environ else {}
    return {**dict(entries), **terminal}


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
