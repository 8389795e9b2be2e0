"""Makes a user's own directory for jobs, and reads the environments that the user may use. Run as that user.

    job_directory.py make CLUSTER JOBS DIRECTORY CODE RUNTIME    where the user logs in; prints what it has, as JSON
    job_directory.py environments CLUSTER JOBS DIRECTORY...      there as well; prints what is in them, as JSON
    job_directory.py receive ROOT CODE RUNTIME                   on a node: takes the code from standard input

JOBS is the cluster's directory with one for each user, or empty. DIRECTORY is the directory that the user asks for, or
empty; for `environments`, each has environments of the cluster. Jobs run what is in these directories, so every
directory on the way belongs to root or to the user, and nobody else may write there. Links on the way are resolved
first, and the path without them is checked. What is wrong goes to standard error, with status 3.

`environments` prints `user`, `own` (the directory of the user's environments), `directories` (for each its path without
links, `real`, and in `environments` what its names say), and `unsafe` (by directory, why it is not used).
"""

from __future__ import annotations

import contextlib
import errno
import hashlib
import io
import json
import os
import pwd
import re
import shutil
import stat
import sys
import time

TYPE_CHECKING = False
if TYPE_CHECKING:
    from typing import Any, BinaryIO

EXIT_WITH_CAUSE = 3
FLAGS = os.O_PATH | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC
"""Directories on the way may be closed to readers."""
CHUNK_BYTES = 1 << 20
MAX_ARCHIVE_BYTES = 1 << 30
KEEP_NEWEST, KEEP_DAYS = 20, 7
"""On a node: code that no job has used lately is kept while it is among the newest, or young."""

MAX_NAME_BYTES, MAX_NAMES = 1 << 20, 1000
"""A name lists the packages of its environment."""


class Unsafe(Exception):
    """The directory cannot be used, and why."""


def main(argv: list[str]) -> int:
    mode, words = argv[0], argv[1:]
    try:
        if mode == "receive":
            receive(sys.stdin.buffer, *words)
        else:
            answer = environments(*words) if mode == "environments" else make(*words)
            sys.stdout.write(json.dumps(answer) + "\n")
    except (Unsafe, OSError) as error:
        text = str(error) if isinstance(error, Unsafe) else "%s: %s" % (error.filename, error.strerror or error)
        node = os.environ.get("SLURMD_NODENAME")
        sys.stderr.write("shoal: error: cannot keep code on %s: %s\n" % (node, text) if node else text + "\n")
        return EXIT_WITH_CAUSE
    return 0


def make(cluster: str, jobs: str, directory: str, code: str, runtime: str) -> dict[str, object]:
    """Make the directory where the user logs in; which it is, and what it has."""
    root = os.path.realpath(choose(cluster, jobs, directory))
    prepare(root)
    return {
        "root": root,
        "user": pwd.getpwuid(os.getuid()).pw_name,
        "code": has_archive(os.path.join(root, "code", code + ".tar"), code),
        "runtime": is_own_directory(os.path.join(root, "lib", runtime)),
        "marked": os.path.exists(os.path.join(root, ".shared")),
    }


def prepare(root: str) -> None:
    """Make the directory, and those in it for code. Raises Unsafe."""
    place = open_own(root)
    for name in ("code", "lib"):
        os.close(enter(place, name, os.path.join(root, name), make=True))
    os.close(place)
    write_id(root)


def receive(stream: BinaryIO, root: str, code: str, runtime: str) -> None:
    """Write the code of a job, from an archive with one archive for the code and one for Shoal's own part.

    Both must have the content that their names say. What is there already is compared, not trusted.
    """
    import tarfile

    root = os.path.realpath(root)
    prepare(root)
    try:
        with tarfile.open(fileobj=io.BytesIO(stream.read(MAX_ARCHIVE_BYTES)), mode="r:gz") as tar:
            contents = {name: read_member(tar, name) for name in ("code.tar", "lib.tar")}
    except (tarfile.TarError, EOFError) as error:
        raise Unsafe("the code of the job did not arrive: %s" % error) from None
    for name, expected in (("code.tar", code), ("lib.tar", runtime)):
        if not hashlib.sha256(contents[name]).hexdigest().startswith(expected):
            raise Unsafe("%s of the job is not what was sent" % name)
    path = os.path.join(root, "code", code + ".tar")
    if not has_archive(path, code):
        new = "%s.%d" % (path, os.getpid())
        with open(new, "wb") as file:
            file.write(contents["code.tar"])
        os.replace(new, path)
    unpack(contents["lib.tar"], os.path.join(root, "lib", runtime))
    with contextlib.suppress(OSError):
        os.unlink(os.path.join(root, ".shared"))
    for place in ("code", "lib"):
        remove_old(os.path.join(root, place))


def read_member(tar: object, name: str) -> bytes:
    file = tar.extractfile(name)  # type: ignore[attr-defined]
    if file is None:
        raise Unsafe("the code of the job has no %s" % name)
    data = file.read(MAX_ARCHIVE_BYTES)
    assert isinstance(data, bytes)
    return data


def unpack(archive: bytes, path: str) -> None:
    """Unpack an archive, unless the directory has all that is in it. What has other content is put aside."""
    import tarfile

    new = "%s.%d" % (path, os.getpid())
    with tarfile.open(fileobj=io.BytesIO(archive)) as tar:
        files = {member.name: read_member(tar, member.name) for member in tar if member.isreg()}
    if all(has_content(os.path.join(path, name), data) for name, data in files.items()):
        os.utime(path)
        return
    for name, data in files.items():
        place = os.path.join(new, *name.split("/"))
        os.makedirs(os.path.dirname(place), exist_ok=True)
        with open(place, "wb") as file:
            file.write(data)
    with contextlib.suppress(FileNotFoundError):
        os.rename(path, new + ".old")
    try:
        os.rename(new, path)
    except OSError:  # another job of the user's was faster, on the same node
        shutil.rmtree(new)


def has_content(path: str, data: bytes) -> bool:
    with contextlib.suppress(OSError), open_regular(path) as file:
        return os.fstat(file.fileno()).st_size == len(data) and file.read() == data
    return False


def open_regular(path: str, place: int | None = None) -> BinaryIO:
    """Open a regular file, and no link. Raises OSError: a pipe or a device would block, or never end."""
    descriptor = os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC, dir_fd=place)
    if not stat.S_ISREG(os.fstat(descriptor).st_mode):
        os.close(descriptor)
        raise OSError(errno.EINVAL, "not a regular file", path)
    return open(descriptor, "rb")


def remove_old(place: str) -> None:
    """Remove what was used least lately. Failures are ignored: the next job tries again."""
    with contextlib.suppress(OSError):
        ages = sorted((-os.lstat(os.path.join(place, name)).st_mtime, name) for name in os.listdir(place))
        for used, name in ages[KEEP_NEWEST:]:
            if time.time() + used > KEEP_DAYS * 86400:
                path = os.path.join(place, name)
                shutil.rmtree(path, ignore_errors=True) if os.path.isdir(path) else os.unlink(path)


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


def environments(cluster: str, jobs: str, *directories: str) -> dict[str, object]:
    """What the names of environments say, in the user's own directory and in these."""
    own = os.path.join(os.path.realpath(choose(cluster, jobs, "")), "environments")
    read: dict[str, object] = {}
    unsafe: dict[str, str] = {}
    for directory in (own, *directories):
        try:
            real = os.path.realpath(directory)
            read[directory] = {"real": real, "environments": read_names(real)}
        except Unsafe as error:
            unsafe[directory] = str(error)
        except OSError as error:
            unsafe[directory] = "%s: %s" % (error.filename or directory, error.strerror)
    return {"user": pwd.getpwuid(os.getuid()).pw_name, "own": own, "directories": read, "unsafe": unsafe}


def read_names(real: str) -> list[dict[str, Any]]:
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
    with contextlib.suppress(OSError, ValueError):
        with open_regular(name, names) as file:
            data = file.read(MAX_NAME_BYTES + 1)
            owner = os.fstat(file.fileno()).st_uid
        description = json.loads(data) if len(data) <= MAX_NAME_BYTES and owner in (0, os.getuid()) else None
        if isinstance(description, dict) and re.match(r"[0-9a-f]{16}$", str(description.get("id"))):
            return description
    return None


def open_own(path: str) -> int:
    """Open a directory of the user's, and make what is missing. Raises Unsafe."""
    place = open_checked(path, make=True)
    status = os.fstat(place)
    if status.st_uid != os.getuid():
        raise Unsafe("%s belongs to %s" % (path, user_name(status.st_uid)))
    if stat.S_IMODE(status.st_mode) != 0o700:
        os.chmod(".", 0o700, dir_fd=place)
        if stat.S_IMODE(os.fstat(place).st_mode) != 0o700:
            raise Unsafe("%s is on storage that keeps no modes, so others could change the job's code" % path)
    return place


def open_checked(path: str, *, make: bool = False) -> int:
    """Open a directory from the top. Raises Unsafe."""
    place, at = os.open("/", FLAGS), "/"
    for name in path.strip("/").split("/"):
        at = os.path.join(at, name)
        inner = enter(place, name, at, make=make)
        os.close(place)
        place = inner
    return place


def enter(place: int, name: str, path: str, *, make: bool = False) -> int:
    """Open one more directory, or make it. Raises Unsafe where others could replace what is in it."""
    try:
        inner = os.open(name, FLAGS, dir_fd=place)
    except FileNotFoundError:
        if not make:
            raise
        os.mkdir(name, 0o700, dir_fd=place)
        inner = os.open(name, FLAGS, dir_fd=place)
    except OSError as error:
        raise Unsafe("%s: %s" % (path, error.strerror)) from None
    status = os.fstat(inner)
    if status.st_uid not in (0, os.getuid()):
        raise Unsafe("%s belongs to %s" % (path, user_name(status.st_uid)))
    if status.st_mode & 0o022 and not status.st_mode & stat.S_ISVTX:
        raise Unsafe("others may write to %s, and so replace what jobs run" % path)
    return inner


def user_name(uid: int) -> str:
    try:
        return pwd.getpwuid(uid).pw_name
    except KeyError:
        return "user %d" % uid


def has_archive(path: str, expected: str) -> bool:
    """Whether an archive is there with the content that its name says. Another one is removed."""
    digest = hashlib.sha256()
    try:
        with open_regular(path) as file:
            for chunk in iter(lambda: file.read(CHUNK_BYTES), b""):
                digest.update(chunk)
    except OSError:
        pass
    else:
        if digest.hexdigest().startswith(expected):
            os.utime(path)
            return True
    with contextlib.suppress(FileNotFoundError):
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
