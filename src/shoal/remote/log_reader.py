"""Reads a job's files on one node and prints them.

    log_reader.py logs OWNER DIRECTORY OUTPUT ERROR TAIL [follow]
    log_reader.py progress OWNER DIRECTORY FILE
    log_reader.py files OWNER DIRECTORY PATH

The paths are the job owner's choice, so they are opened with the owner's rights, and only if they are regular files and
no links. OWNER may be empty: then it is the owner of the job's directory.

Each line of a log is `FILE<tab>TIME TEXT`, where FILE is `rank-R.N.node`, `rank-R.N.log`, `rank-R.N.end`, or
`output@STORAGE` and `error@STORAGE` for those of the batch script: every turn of a job appends to these on the node it
starts on, and only where nodes share storage is it the same file. The node of a rank comes before what it printed. With
TAIL above 0 only the last so many bytes of each file are read. With `follow` it goes on until its input ends or says
something. `rank-R.N.bar` is the state of a line that is not finished, printed when it changes; empty when it is gone.

`progress` prints FILE in DIRECTORY, and as another line of JSON how many seconds ago a rank last ran
on this node.

`files` sends PATH below DIRECTORY, or below the copy of the working tree there; without PATH, all that the job has
made. It prints one line of JSON about the storage it is on, reads one line with the files that the receiver has, and
answers in lines: JSON for each file, link or omission, and behind a `+` the content of the last file in base64.
"""

from __future__ import annotations

import os
import pwd
import select
import stat
import sys
import time

TYPE_CHECKING = False
if TYPE_CHECKING:
    from typing import Any, BinaryIO, Iterator

MAX_READ_BYTES = 64 << 20
"""So much of all files together; of larger ones the last part."""
MIN_READ_BYTES = 4 << 10
"""So much of each file at least."""
MAX_FILES = 20000
MAX_PROGRESS_BYTES = 64 << 10
MAX_BAR_BYTES = 4 << 10
LAST_END = "last_end_seconds"
NOBODY = 65534
CHUNK_BYTES = 1 << 20
"""A line that is longer is printed as several."""
SEND_BYTES = 48 << 10
TREE = "tree"
"""The job's copy of the working tree."""
SENT_TIME = 1
"""The time of its files until the job writes to them, in seconds since 1970. sshfs takes 0 for the present."""
INTERNAL = ("pids.", "tree.", "submission", "sent/")
"""How names of what Shoal itself keeps in a job's directory begin."""


def main(argv: list[str]) -> int:
    mode, owner, path = argv[:3]
    if mode == "files":
        import base64  # noqa: F401 - logs are read without these, and a job's user may not be able to load them
        import json  # noqa: F401
    if not take_identity(owner, *(word for word in argv[2:4] if word.startswith("/"))):
        print("there is no user %s on %s" % (owner, os.uname().nodename), file=sys.stderr)
        return 1
    if mode == "progress":
        return print_progress(path, argv[3])
    if mode == "files":
        return send_files(path, argv[3])
    output, error, tail = argv[3:6]
    print_logs(path, output, error, int(tail), argv[6:] == ["follow"])
    return 0


def take_identity(owner: str, *paths: str) -> bool:
    """Become the owner of the job for good, where root runs this. False where there is no such user here."""
    if os.geteuid() != 0:
        return True
    try:
        uid = (int(owner) if owner.isdigit() else pwd.getpwnam(owner).pw_uid) if owner else owner_of(*paths)
    except KeyError:
        return False
    if uid == 0:
        return True
    try:
        user = pwd.getpwuid(uid)
        os.initgroups(user.pw_name, user.pw_gid)
        os.setgid(user.pw_gid)
    except KeyError:
        os.setgroups([])
        os.setgid(NOBODY)
    os.setuid(uid)
    return True


def owner_of(*paths: str) -> int:
    """The owner of the first that exists; nobody where none does."""
    for path in paths:
        try:
            return os.lstat(path).st_uid
        except PermissionError:
            return owner_above(path)
        except OSError:
            continue
    return NOBODY


def owner_above(path: str) -> int:
    """The owner of what is closed to root: a share may take root for nobody, and FUSE may admit its user alone.

    That is the user who mounted it, or the owner of the nearest directory above that root can see. Never root.
    """
    import re

    with open("/proc/self/mounts", encoding="utf-8", errors="surrogateescape") as file:
        mounts = dict(re.findall(r"^\S+ (\S+) fuse\S* \S*\buser_id=(\d+)", file.read(), re.MULTILINE))
    while path != "/" and path not in mounts:
        path = os.path.dirname(path)
        try:
            return os.lstat(path).st_uid or NOBODY
        except OSError:
            continue
    return int(mounts.get(path, NOBODY)) or NOBODY


def open_regular(path: str) -> BinaryIO | None:
    """The file, if it is a regular one and can be read. A pipe or a device would block, or never end."""
    try:
        descriptor = os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC)
    except OSError:
        return None
    if not stat.S_ISREG(os.fstat(descriptor).st_mode):
        os.close(descriptor)
        return None
    return open(descriptor, "rb", buffering=0)


def print_progress(directory: str, name: str) -> int:
    """Print a file that is small, as a whole, and when a rank last ran."""
    file = open_regular(os.path.join(directory, name))
    if file is not None:
        with file:
            sys.stdout.buffer.write((file.read(MAX_PROGRESS_BYTES) or b"").rstrip(b"\n") + b"\n")
            sys.stdout.buffer.flush()
    ago = seconds_since_rank(directory)
    if ago is not None:
        print('{"%s": %.0f}' % (LAST_END, ago))
    return 0


def seconds_since_rank(directory: str) -> float | None:
    """How long ago a rank last ended on this node: 0 while one runs, None where none has started."""
    last = 0.0
    try:
        pids = os.path.join(directory, "pids." + os.uname().nodename)
        if os.path.isdir(pids) and any(os.path.exists("/proc/" + pid) for pid in os.listdir(pids)):
            return 0.0
        with os.scandir(directory) as entries:
            for entry in entries:
                if entry.name.startswith("rank-") and entry.name.endswith(".end"):
                    last = max(last, entry.stat(follow_symlinks=False).st_mtime)
    except OSError:
        return None
    return max(0.0, time.time() - last) if last else None


def print_logs(directory: str, output: str, error: str, tail: int, follow: bool) -> None:
    at: dict[str, int] = {}
    bars: dict[str, bytes] = {}
    while True:
        found = sorted(files(directory, output, error), key=lambda file: (not file[0].endswith(".node"), file))
        limits = divide(MAX_READ_BYTES, [size - at.get(name, 0) for name, _, size in found])
        for (name, path, _), limit in zip(found, limits):
            if not name.endswith(".bar"):
                read(name, path, min(tail or limit, limit), at, last=not follow, tail=bool(tail))
        print_bars({name: path for name, path, _ in found if name.endswith(".bar")}, bars)
        sys.stdout.buffer.flush()
        if not follow:
            return
        ready, _, _ = select.select([0], [], [], 0.3)
        if ready:
            follow = False  # one last look


def print_bars(paths: dict[str, str], printed: dict[str, bytes]) -> None:
    """Print the states of unfinished lines that have changed."""
    states = dict.fromkeys(printed, b"")
    for name, path in paths.items():
        file = open_regular(path)
        if file is not None:
            with file:
                state = file.read(MAX_BAR_BYTES) or b""
            # A state that is being written has no end yet.
            states[name] = state.partition(b"\n")[0] if state.endswith(b"\n") else printed.get(name, b"")
    for name, state in states.items():
        if state != printed.get(name, b""):
            printed[name] = state
            sys.stdout.buffer.write(name.encode("utf-8", "replace") + b"\t" + state + b"\n")


def divide(total: int, sizes: list[int]) -> list[int]:
    """How much of each file is read: small ones whole, of the others equally much."""
    limits = [0] * len(sizes)
    for position, index in enumerate(sorted(range(len(sizes)), key=lambda index: sizes[index])):
        limits[index] = max(MIN_READ_BYTES, min(max(0, sizes[index]), total // (len(sizes) - position)))
        total -= min(total, limits[index])
    return limits


def files(directory: str, output: str, error: str) -> Iterator[tuple[str, str, int]]:
    """The name, path and size of each file."""
    for name, path in (("output@", output), ("error@", error if error != output else "")):
        size = regular_size(path)
        if size is not None:
            yield name + storage(path, os.path.dirname(directory)), path, size
    try:
        with os.scandir(directory) as entries:
            for _, entry in zip(range(MAX_FILES), entries):
                if entry.name.startswith("rank-") and entry.name.endswith((".node", ".log", ".end", ".bar")):
                    size = regular_size(entry.path)
                    if size is not None:
                        yield entry.name, entry.path, size
    except OSError:
        return


def regular_size(path: str) -> int | None:
    try:
        status = os.lstat(path)
    except OSError:
        return None
    return status.st_size if stat.S_ISREG(status.st_mode) else None


def storage(path: str, root: str) -> str:
    """A name of the storage that a file is on, the same on all nodes that share it: below `root` its own number."""
    try:
        if not path.startswith(root + "/"):
            return "inode-%d" % os.stat(path).st_ino
    except OSError:
        return os.uname().nodename
    file = open_regular(os.path.join(root, ".id"))
    if file is None:
        return os.uname().nodename
    with file:
        return (file.read(64) or b"").decode("ascii", "replace").strip()


def read(name: str, path: str, limit: int, at: dict[str, int], last: bool, tail: bool) -> None:
    """Print what is new in a file: whole lines, the rest of one only when nothing more will come.

    Of more than `limit` bytes only the last ones; unless a `tail` was asked for, a line says so.
    """
    file = open_regular(path)
    if file is None:
        return
    with file:
        status = os.fstat(file.fileno())
        head = name.encode("utf-8", "replace") + b"\t"
        stamp = b"%.6f " % status.st_mtime if "@" in name else b""
        begin = at.get(name, 0)
        position = max(begin, status.st_size - limit)
        skip = position > begin  # begins inside of a line
        if skip and not tail and not name.endswith((".node", ".end")):
            text = "shoal: %d bytes of %s on %s are left out here" % (position - begin, path, os.uname().nodename)
            sys.stdout.buffer.write(head + b"%.6f " % status.st_mtime + text.encode("utf-8", "replace") + b"\n")
        rest = b""
        try:
            file.seek(position)
            while position < status.st_size:
                data = file.read(min(CHUNK_BYTES, status.st_size - position))
                if not data:
                    break
                position += len(data)
                rest = rest + data
                end = rest.rfind(b"\n") + 1
                if not end and len(rest) >= CHUNK_BYTES:
                    rest, end = rest + b"\n", len(rest) + 1
                for line in rest[:end].split(b"\n")[:-1]:
                    if not skip:
                        sys.stdout.buffer.write(head + stamp + line + b"\n")
                    skip = False
                rest = rest[end:]
        except OSError:
            pass  # it was cut, or its disk fails: the rest is read with the next look
        at[name] = position - len(rest)
        if last and rest and not skip:
            sys.stdout.buffer.write(head + stamp + rest + b"\n")
            at[name] = position


def send_files(directory: str, path: str) -> int:
    """Send what the receiver does not have. No link is followed, on the way to the files or among them."""
    import json

    start = find_inside(directory, path)
    place = storage(directory, os.path.dirname(directory))
    send({"storage": place, "found": bool(start), "closed": not start and is_closed(directory)})
    known = sys.stdin.readline() if start else ""
    if not known.strip():
        return 0
    received = json.loads(known)
    base = os.path.dirname(start) if path else start
    files = [(os.path.relpath(name, base), name, status) for name, status in walk(start)]
    if not path:
        files = [file for file in files if not is_internal(file[0], file[2])]
    sizes = [status.st_size for _, _, status in files if status is not None and stat.S_ISREG(status.st_mode)]
    send({"files": len(files), "bytes": sum(sizes)})
    for name, place, status in files:
        try:
            if status is None:
                send({"name": name, "skipped": "closed to the job's user"})
            elif stat.S_ISLNK(status.st_mode):
                send({"name": name, "link": os.readlink(place)})
            elif not stat.S_ISREG(status.st_mode):
                send({"name": name, "skipped": "not a regular file"})
            elif received.get(name) == [status.st_size, status.st_mtime_ns]:
                send({"name": name, "unchanged": status.st_size})
            else:
                send_file(name, place)
        except OSError as error:
            send({"name": name, "skipped": error.strerror})
    send({"end": True})
    return 0


def find_inside(directory: str, path: str) -> str:
    """Where that path is, in the job's directory or in its copy of the working tree; empty where it is in neither."""
    words = [word for word in path.split("/") if word not in ("", ".")]
    for start in ([], [TREE]):
        place, steps = directory, start + words
        while steps and steps[0] != ".." and not os.path.islink(place):
            place = os.path.join(place, steps.pop(0))
        if not steps and os.path.lexists(place):
            return place
    return ""


def is_closed(directory: str) -> bool:
    """Whether the job's user cannot look into it. Nobody is who reads where there is no such directory."""
    try:
        return not os.lstat(os.path.join(directory, "."))
    except OSError as error:
        return isinstance(error, PermissionError) and os.geteuid() != NOBODY


def walk(place: str) -> Iterator[tuple[str, os.stat_result | None]]:
    """The path and status of each file, link or other thing that is no directory. None for what is closed."""
    try:
        status = os.lstat(place)
        if not stat.S_ISDIR(status.st_mode):
            yield place, status
            return
        names = sorted(os.listdir(place))
    except PermissionError:
        yield place, None
        return
    except OSError:
        return  # removed meanwhile
    for name in names:
        yield from walk(os.path.join(place, name))


def is_internal(name: str, status: os.stat_result | None) -> bool:
    """Whether it is Shoal's own, or came with the job's code and is unchanged."""
    if name.startswith(TREE + "/"):
        return status is not None and status.st_mtime <= SENT_TIME
    return name.startswith(INTERNAL)


def send_file(name: str, path: str) -> None:
    import base64

    file = open_regular(path)
    if file is None:
        return send({"name": name, "skipped": "it cannot be read"})
    with file:
        status = os.fstat(file.fileno())
        send({"name": name, "size": status.st_size, "mode": status.st_mode & 0o755, "time": status.st_mtime_ns})
        left = status.st_size  # what is appended meanwhile comes next time
        while left > 0:
            data = file.read(min(left, SEND_BYTES))
            if not data:
                break
            sys.stdout.buffer.write(b"+" + base64.b64encode(data) + b"\n")
            left -= len(data)
    return send({"sent": name})


def send(message: dict[str, Any]) -> None:
    import json

    # Bytes that are no UTF-8 are escaped as lone surrogates.
    sys.stdout.buffer.write(json.dumps(message).encode("ascii") + b"\n")
    sys.stdout.buffer.flush()


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
