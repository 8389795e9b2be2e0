"""Carries a job's files between the controller and a container: one program of the standard library, run at both ends.

    courier.py send there ROOT JOB CODE RUNTIME    on the controller: what the job needs, and what it left before
    courier.py send back ROOT JOB OVER             in the container: what it writes, until the file OVER is there
    courier.py take there|back ROOT JOB            the other end of either

It runs as the job's own user on both sides and touches nothing but the job's directory, ROOT/JOB, and its output,
ROOT/JOB.out. The two ends are joined by pipes. Who takes first tells what it has, in one line; who sends answers with
what is new: for each file a line of JSON, then its bytes in pieces, each with its length before it. An end that knows
what went wrong leaves with status 3 and a sentence.
"""

from __future__ import annotations

import contextlib
import json
import os
import shutil
import stat
import struct
import sys
import time

TYPE_CHECKING = False
if TYPE_CHECKING:
    from typing import Any, BinaryIO, Iterator

    Listing = dict[str, list[int]]

TOLD = 3
READY, FAILED = "sent/.ready", "sent/.failed"
"""In the job's directory in the container: the batch script waits for one of them."""
PATIENCE = 120
"""Seconds for a batch script to begin."""
PIECE, LONGEST_LINE = 1 << 20, 1 << 20
SMALL, QUIET = 1 << 20, 3.0
"""A larger file that is changed over and over waits until nobody has written to it for some seconds."""
PAUSE, LONGEST_PAUSE = 0.5, 5.0
"""Between two looks at what the job has written; more where a look takes long."""
BEAT = 10.0
"""So often there is something to send: who sends into a broken connection ends by that."""
CHECKPOINTS = "checkpoints"
UNFINISHED = (".tmp-", ".old-")
"""In the names of checkpoints that are being written or deleted."""


def main(argv: list[str]) -> int:
    what, way, root, job = argv[:4]
    os.umask(0o022)
    try:
        if what == "take":
            Taker(root, job, way).run(sys.stdin.buffer, sys.stdout.buffer)
        elif way == "there":
            Sender(root, job, sys.stdin.buffer, sys.stdout.buffer).send_there(argv[4], argv[5])
        else:
            Sender(root, job, sys.stdin.buffer, sys.stdout.buffer).send_back(argv[4])
    except BrokenPipeError:
        return 1  # the other end has gone, and says itself why
    except OSError as error:
        sys.stderr.write("%s: %s\n" % (os.fsdecode(error.filename or root), error.strerror or error))
        return TOLD
    return 0


class Sender:
    """Sends what the other end does not have."""

    def __init__(self, root: str, job: str, heard: BinaryIO, out: BinaryIO) -> None:
        self.root, self.job = root, job
        self.out = out
        line = heard.readline()
        if not line.endswith(b"\n"):
            raise BrokenPipeError
        told = json.loads(line)
        self.known: Listing = told["files"]
        self.submission: str = told["submission"]

    def send_there(self, code: str, runtime: str) -> None:
        """What the job needs. Where it is there already, the job is at work on it: what it has now is newer."""
        if self._name(READY) not in self.known:
            directory = os.path.join(self.root, self.job)
            if self._is_of_another_job(directory):
                put_aside(directory, self.submission)
            for name, path in files_of(self.root, self.job):
                if not os.path.basename(name).startswith("rank-"):  # nobody reads earlier logs there
                    self._send(name, path)
            archive = "code/%s.tar" % code
            self._send(self._name("sent/" + archive), os.path.join(self.root, archive))
            library = os.path.join(self.root, "lib", runtime)
            for name, path in walk(library, self._name("sent/lib/" + runtime)):
                self._send(name, path)
            self._header({"name": self._name(READY), "mode": 0o644, "time": 0})
            self._piece(b"")
        self._end()

    def send_back(self, over: str) -> None:
        """What the job writes, until it is over; then all of the rest."""
        last, beat = False, 0.0
        while not last:
            last, began = os.path.exists(over), time.monotonic()
            for name, path in files_of(self.root, self.job):
                if not is_only_here(name, path):
                    self._send(name, path, last=last)
            self._forget_checkpoints()
            if began - beat > BEAT:
                beat = began
                self._header({})
            self.out.flush()
            if not last:
                time.sleep(min(LONGEST_PAUSE, max(PAUSE, 5 * (time.monotonic() - began))))
        self._end()

    def _name(self, inside: str) -> str:
        return "%s/%s" % (self.job, inside)

    def _is_of_another_job(self, directory: str) -> bool:
        """A cluster that was built again counts its jobs from 1 again, and may find files of an earlier one."""
        with contextlib.suppress(OSError), open(os.path.join(directory, "submission")) as file:
            return file.read() != self.submission
        return True

    def _send(self, name: str, path: str, last: bool = True) -> None:
        try:
            status = os.lstat(path)
        except OSError:
            return  # it has gone since we looked
        known, now = self.known.get(name), [status.st_size, status.st_mtime_ns]
        if known == now:
            return
        if stat.S_ISLNK(status.st_mode):
            self._send_link(name, path, now)
        elif stat.S_ISREG(status.st_mode):
            changing = status.st_size > SMALL and time.time() - status.st_mtime < QUIET
            whole = only_grows(name) or name.startswith(self._name(CHECKPOINTS) + "/")
            if last or whole or not changing:
                self._send_file(name, path, now, known)

    def _send_link(self, name: str, path: str, now: list[int]) -> None:
        target = os.readlink(path)
        if not os.path.isabs(target) and ".." not in target.split("/"):
            self._header({"name": name, "link": target})
            self.known[name] = now

    def _send_file(self, name: str, path: str, now: list[int], known: list[int] | None) -> None:
        try:
            handle = os.open(path, os.O_RDONLY | os.O_NOFOLLOW)
        except FileNotFoundError:
            return  # it has gone since we looked
        with open(handle, "rb") as file:
            mode = os.fstat(file.fileno()).st_mode & 0o755
            header: dict[str, Any] = {"name": name, "mode": mode, "time": now[1]}
            left = now[0]  # what comes while we read is sent the next time
            if only_grows(name):
                header["from"] = known[0] if known and known[0] <= now[0] else 0
                left -= file.seek(header["from"])
            self._header(header)
            while left > 0:
                data = file.read(min(left, PIECE))
                if not data:
                    break
                self._piece(data)
                left -= len(data)
            self._piece(b"")
        self.known[name] = now

    def _forget_checkpoints(self) -> None:
        """Checkpoints that the job has deleted go at the other end too, as long as another one stays."""
        place = os.path.join(self.root, self.job, CHECKPOINTS)
        try:
            here = {name for name in os.listdir(place) if not any(mark in name for mark in UNFINISHED)}
        except OSError:
            return
        start = self._name(CHECKPOINTS) + "/"
        names = {name[len(start) :].partition("/")[0] for name in self.known if name.startswith(start)}
        for gone in sorted(names - here) if names & here else ():
            self._header({"gone": start + gone})
            self.known = {name: at for name, at in self.known.items() if not name.startswith(start + gone + "/")}

    def _end(self) -> None:
        self._header({"end": True})
        self.out.flush()

    def _header(self, header: dict[str, Any]) -> None:
        self.out.write(json.dumps(header).encode() + b"\n")

    def _piece(self, data: bytes) -> None:
        self.out.write(struct.pack("!I", len(data)) + data)


class Taker:
    """Tells what it has, and takes what is sent. Whatever it is sent, nothing outside of the job's files is touched."""

    def __init__(self, root: str, job: str, way: str) -> None:
        self.root, self.job, self.way = root, job, way

    def run(self, stream: BinaryIO, out: BinaryIO) -> None:
        submission = wait_for_submission(os.path.join(self.root, self.job)) if self.way == "there" else ""
        out.write(json.dumps({"submission": submission, "files": listing(self.root, self.job)}).encode() + b"\n")
        out.flush()
        out.close()
        while True:
            header = json.loads(stream.readline(LONGEST_LINE) or b'{"cut": true}')
            if "end" in header:
                return
            if "cut" in header:
                raise BrokenPipeError
            if "gone" in header:
                self._remove(self._parts(header["gone"]))
            elif "link" in header:
                self._link(self._parts(header["name"]), header["link"])
            elif header:
                self._file(self._parts(header["name"]), header, stream)

    def _parts(self, name: str) -> list[str]:
        parts = name.split("/")
        if name == self.job + ".out" or (parts[0] == self.job and len(parts) > 1 and not {"", ".", ".."} & set(parts)):
            return parts
        raise OSError(0, "was sent, and is not a file of the job", name)

    def _file(self, parts: list[str], header: dict[str, Any], stream: BinaryIO) -> None:
        with directory_of(self.root, parts) as place:
            grown = "from" in header
            name = parts[-1] if grown else ".%s.part" % parts[-1]
            flags = os.O_WRONLY | os.O_CREAT | os.O_NOFOLLOW | (0 if grown else os.O_TRUNC)
            with open(os.open(name, flags, 0o600, dir_fd=place), "wb") as file:
                start = int(header.get("from", 0))
                os.ftruncate(file.fileno(), start)
                file.seek(start)
                while length := struct.unpack("!I", exactly(stream, 4))[0]:
                    file.write(exactly(stream, length))
                file.flush()
                os.fchmod(file.fileno(), int(header["mode"]) & 0o755)
                os.utime(file.fileno(), ns=(int(header["time"]), int(header["time"])))
            if not grown:
                os.rename(name, parts[-1], src_dir_fd=place, dst_dir_fd=place)

    def _link(self, parts: list[str], target: str) -> None:
        if os.path.isabs(target) or ".." in target.split("/"):
            return
        with directory_of(self.root, parts) as place:
            with contextlib.suppress(FileNotFoundError):
                os.unlink(parts[-1], dir_fd=place)
            os.symlink(target, parts[-1], dir_fd=place)

    def _remove(self, parts: list[str]) -> None:
        if parts[1:2] == [CHECKPOINTS] and len(parts) == 3:
            with directory_of(self.root, parts) as place:
                # Cut short, it lacks what its manifest names, and counts no more.
                shutil.rmtree("/proc/self/fd/%d/%s" % (place, parts[-1]), ignore_errors=True)


def files_of(root: str, job: str) -> Iterator[tuple[str, str]]:
    """The job's files by their names below `root`. A checkpoint's manifest, which makes it whole, comes last."""
    yield job + ".out", os.path.join(root, job + ".out")
    for name, path in sorted(walk(os.path.join(root, job), job), key=lambda one: "/MANIFEST" in one[0]):
        if not name.startswith(job + "/sent/"):
            yield name, path


def walk(directory: str, name: str) -> Iterator[tuple[str, str]]:
    """Files and links below a directory; links are not followed."""
    try:
        entries = sorted(os.scandir(directory), key=lambda entry: entry.name)
    except OSError:
        return  # it has gone since we looked
    for entry in entries:
        inside = "%s/%s" % (name, entry.name)
        if not entry.is_dir(follow_symlinks=False):
            if not (entry.name.startswith(".") and entry.name.endswith(".part")):  # one that was cut short
                yield inside, entry.path
        elif not any(mark in entry.name for mark in UNFINISHED):
            yield from walk(entry.path, inside)


def is_only_here(name: str, path: str) -> bool:
    """What is of no use elsewhere: locks, process numbers, and the code as it was sent, which has the date of 1970."""
    inside = name.split("/")[1:]
    if inside[:1] == ["tree"]:
        with contextlib.suppress(OSError):
            return os.lstat(path).st_mtime <= 0
    return bool(inside) and (inside[0] == "tree.lock" or inside[0].startswith(("pids.", "tree.")))


def only_grows(name: str) -> bool:
    """Files that are only ever added to: of these what is new is sent."""
    inside = name.split("/")[1:]
    if not inside:
        return True  # the batch script's output
    return (len(inside) == 1 and inside[0].endswith(".log")) or (inside[0] == "tracking" and name.endswith(".jsonl"))


def listing(root: str, job: str) -> Listing:
    found: Listing = {}
    ready = os.path.join(root, job, READY)
    for name, path in (*files_of(root, job), ("%s/%s" % (job, READY), ready)):
        with contextlib.suppress(OSError):
            status = os.lstat(path)
            found[name] = [status.st_size, status.st_mtime_ns]
    return found


def wait_for_submission(directory: str) -> str:
    """Which submission the batch script belongs to, as it says when it begins."""
    end = time.monotonic() + PATIENCE
    while time.monotonic() < end:
        with contextlib.suppress(OSError), open(os.path.join(directory, "submission")) as file:
            return file.read()
        time.sleep(0.1)
    raise OSError(0, "the batch script has not begun", directory)


def put_aside(directory: str, submission: str) -> None:
    """What an earlier job of this number left keeps another name, with its output."""
    try:
        for path in (directory, directory + ".out"):
            with contextlib.suppress(FileNotFoundError):
                os.rename(path, "%s.before-%s" % (path, submission))
    except PermissionError as error:
        text = "an earlier job of this number left it on the controller, and it is another user's: remove it there"
        raise OSError(error.errno, text, directory) from None


@contextlib.contextmanager
def directory_of(root: str, parts: list[str]) -> Iterator[int]:
    """The directory that a file is in, made where need be, and reached by no link."""
    flags = os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW
    place = os.open(root, flags)
    try:
        for part in parts[:-1]:
            with contextlib.suppress(FileExistsError):
                os.mkdir(part, dir_fd=place)
            place, before = os.open(part, flags, dir_fd=place), place
            os.close(before)
        yield place
    finally:
        os.close(place)


def exactly(stream: BinaryIO, length: int) -> bytes:
    data = stream.read(length) if length <= PIECE else b""
    if len(data) < length:
        raise BrokenPipeError
    return data


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
