"""Makes a user's own directory for jobs, as that user, and says what it has.

    job_directory.py CLUSTER JOBS DIRECTORY CODE RUNTIME

DIRECTORY is what the user asks for, or empty; JOBS is the cluster's directory with one for each user, or empty. Every
directory on the way belongs to root or to the user, and nobody else may write there: code runs from here. Links on the
way are resolved first, and the path without them is checked. Prints one object of JSON; what is wrong goes to standard
error, with status 3.
"""

from __future__ import annotations

import hashlib
import json
import os
import pwd
import stat
import sys

EXIT_WITH_CAUSE = 3
FLAGS = os.O_PATH | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC
"""Directories on the way may be closed to readers."""
CHUNK_BYTES = 1 << 20


class Unsafe(Exception):
    """The directory cannot be used, and why."""


def main(argv: list[str]) -> int:
    cluster, jobs, directory, code, runtime = argv
    try:
        root = os.path.realpath(choose(cluster, jobs, directory))
        place = open_own(root)
        for name in ("code", "lib"):
            os.close(enter(place, name, os.path.join(root, name)))
        answer = {
            "root": root,
            "user": pwd.getpwuid(os.getuid()).pw_name,
            "code": has_archive(os.path.join(root, "code", code + ".tar"), code),
            "runtime": is_own_directory(os.path.join(root, "lib", runtime)),
        }
        write_id(root)
    except (Unsafe, OSError) as error:
        text = str(error) if isinstance(error, Unsafe) else "%s: %s" % (error.filename, error.strerror)
        sys.stderr.write(text + "\n")
        return EXIT_WITH_CAUSE
    sys.stdout.write(json.dumps(answer) + "\n")
    return 0


def choose(cluster: str, jobs: str, directory: str) -> str:
    """The directory as it is asked for. One that belongs to somebody else has one for each user in it."""
    me = pwd.getpwuid(os.getuid())
    if directory:
        try:
            return directory if os.stat(directory).st_uid == me.pw_uid else os.path.join(directory, me.pw_name)
        except FileNotFoundError:
            return directory
    if jobs:
        return os.path.join(jobs, me.pw_name)
    return os.path.join(me.pw_dir, ".shoal", "jobs", cluster)


def open_own(path: str) -> int:
    """Open a directory of the user's, from the top, and make what is missing. Raises Unsafe."""
    place, at = os.open("/", FLAGS), "/"
    for name in path.strip("/").split("/"):
        at = os.path.join(at, name)
        inner = enter(place, name, at)
        os.close(place)
        place = inner
    status = os.fstat(place)
    if status.st_uid != os.getuid():
        raise Unsafe("%s belongs to %s" % (path, user_name(status.st_uid)))
    if stat.S_IMODE(status.st_mode) != 0o700:
        os.chmod(".", 0o700, dir_fd=place)
        if stat.S_IMODE(os.fstat(place).st_mode) != 0o700:
            raise Unsafe("%s is on storage that keeps no modes, so others could change the job's code" % path)
    return place


def enter(place: int, name: str, path: str) -> int:
    """Open one more directory. Raises Unsafe where others could replace what is in it."""
    try:
        inner = os.open(name, FLAGS, dir_fd=place)
    except FileNotFoundError:
        os.mkdir(name, 0o700, dir_fd=place)
        inner = os.open(name, FLAGS, dir_fd=place)
    except OSError as error:
        raise Unsafe("%s: %s" % (path, error.strerror)) from None
    status = os.fstat(inner)
    if status.st_uid not in (0, os.getuid()):
        raise Unsafe("%s belongs to %s" % (path, user_name(status.st_uid)))
    if status.st_mode & 0o022 and not status.st_mode & stat.S_ISVTX:
        raise Unsafe("others may write to %s, and so replace the job's code" % path)
    return inner


def user_name(uid: int) -> str:
    try:
        return pwd.getpwuid(uid).pw_name
    except KeyError:
        return "user %d" % uid


def has_archive(path: str, expected: str) -> bool:
    """Whether an archive is there with the content that its name says. Another one is removed."""
    try:
        descriptor = os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC)
    except OSError:
        return False
    digest = hashlib.sha256()
    with open(descriptor, "rb") as file:
        regular = stat.S_ISREG(os.fstat(descriptor).st_mode)
        for chunk in iter(lambda: file.read(CHUNK_BYTES) if regular else b"", b""):
            digest.update(chunk)
    if regular and digest.hexdigest().startswith(expected):
        os.utime(path)
        return True
    os.unlink(path)
    return False


def is_own_directory(path: str) -> bool:
    try:
        status = os.lstat(path)
    except OSError:
        return False
    return stat.S_ISDIR(status.st_mode) and status.st_uid == os.getuid()


def write_id(root: str) -> None:
    """A number of this storage's own: `shoal logs` tells by it which hosts show the same files."""
    path = os.path.join(root, ".id")
    if not os.path.exists(path):
        with open(path, "w") as file:
            file.write(os.urandom(12).hex())


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
