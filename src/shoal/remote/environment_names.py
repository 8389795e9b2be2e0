"""Prints the environments that a user may use: their own, and those of the cluster. Run as that user.

    environment_names.py CLUSTER JOBS DIRECTORY...

JOBS is the cluster's directory with one for each user's jobs, or empty; each DIRECTORY has environments of the cluster.
Jobs run what is in an environment, so every directory on the way to it belongs to root or to the user, and nobody else
may write there. Links on the way are resolved first, and the path without them is checked. What a check does not pass
is named in `unsafe`, and not used.

Prints one object of JSON: `user`, `own` (the directory of the user's environments), `directories` (for each its path
without links, `real`, and in `environments` what its names say), and `unsafe` (by directory, why it is not used).
"""

from __future__ import annotations

import json
import os
import pwd
import re
import stat
import sys
from typing import Any

FLAGS = os.O_PATH | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC
MAX_NAME_BYTES = 1 << 20
"""A name lists the packages of its environment."""
MAX_NAMES = 1000


class Unsafe(Exception):
    """Somebody else could change what is there."""


def main(argv: list[str]) -> int:
    cluster, jobs, *directories = argv
    me = pwd.getpwuid(os.getuid())
    jobs_of_user = os.path.join(jobs, me.pw_name) if jobs else os.path.join(me.pw_dir, ".shoal", "jobs", cluster)
    own = os.path.join(os.path.realpath(jobs_of_user), "environments")
    read: dict[str, Any] = {}
    unsafe: dict[str, str] = {}
    for directory in (own, *directories):
        try:
            real = os.path.realpath(directory)
            read[directory] = {"real": real, "environments": read_names(real)}
        except Unsafe as error:
            unsafe[directory] = str(error)
        except OSError as error:
            unsafe[directory] = "%s: %s" % (error.filename or directory, error.strerror)
    answer = {"user": me.pw_name, "own": own, "directories": read, "unsafe": unsafe}
    sys.stdout.write(json.dumps(answer) + "\n")
    return 0


def read_names(real: str) -> list[Any]:
    """What the names in a directory say of the environments that are there."""
    try:
        place = open_checked(real)
        names = enter(place, "names", os.path.join(real, "names"))
    except FileNotFoundError:
        return []
    descriptions = []
    readable = os.open(".", os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC, dir_fd=names)
    for name in sorted(os.listdir(readable))[:MAX_NAMES]:
        description = read_name(names, name) if re.match(r"[a-z][a-z0-9-]*\.json$", name) else None
        if description is None or description.get("name") != name[: -len(".json")]:
            continue
        if description.get("place") != "local":
            try:
                os.close(enter(place, description["id"], os.path.join(real, description["id"])))
            except FileNotFoundError:
                continue
        descriptions.append(description)
    return descriptions


def read_name(names: int, name: str) -> dict[str, Any] | None:
    """The description in one file. A file that is not root's or the user's, or no description, says nothing."""
    try:
        descriptor = os.open(name, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC, dir_fd=names)
    except OSError:
        return None
    with open(descriptor, "rb") as file:
        status = os.fstat(descriptor)
        if not stat.S_ISREG(status.st_mode) or status.st_uid not in (0, os.getuid()):
            return None
        data = file.read(MAX_NAME_BYTES + 1)
    try:
        description = json.loads(data) if len(data) <= MAX_NAME_BYTES else None
    except ValueError:
        return None
    if not isinstance(description, dict) or not re.match(r"[0-9a-f]{16}$", str(description.get("id"))):
        return None
    return description


def open_checked(path: str) -> int:
    """Open a directory from the top. Raises Unsafe."""
    place, at = os.open("/", FLAGS), "/"
    for name in path.strip("/").split("/"):
        at = os.path.join(at, name)
        inner = enter(place, name, at)
        os.close(place)
        place = inner
    return place


def enter(place: int, name: str, path: str) -> int:
    """Open one more directory. Raises Unsafe where others could replace what is in it."""
    try:
        inner = os.open(name, FLAGS, dir_fd=place)
    except FileNotFoundError:
        raise
    except OSError as error:
        raise Unsafe("%s: %s" % (path, error.strerror)) from None
    status = os.fstat(inner)
    if status.st_uid not in (0, os.getuid()):
        raise Unsafe("%s belongs to %s" % (path, user_name(status.st_uid)))
    if status.st_mode & 0o022 and not status.st_mode & stat.S_ISVTX:
        raise Unsafe("others may write to %s" % path)
    return inner


def user_name(uid: int) -> str:
    try:
        return pwd.getpwuid(uid).pw_name
    except KeyError:
        return "user %d" % uid


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
