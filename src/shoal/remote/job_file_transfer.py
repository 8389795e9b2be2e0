"""Copies a job's files between the controller and a container: one program of the standard library, run at both ends.

rsync needs three passes for a look at a job (files, growing logs, manifests): 38 ms of CPU, where this needs 0.5 ms.

    send there ROOT JOB CODE RUNTIME    on the controller: what the job needs, and what it left before
    send back ROOT JOB ENDED            in the container: what the job writes, until the file ENDED exists
    take there|back ROOT JOB            the other end of either

It runs as the job's user at both ends and touches only the job's directory, ROOT/JOB, and its output, ROOT/JOB.out.
Pipes join the two ends. The receiver first lists what it has, in one line. The sender answers with what is new: for
each file a line of JSON, then its bytes in chunks, each after its length. An end that knows the cause of a failure
exits with status 3 and a message.
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

    FileTimes = dict[str, list[int]]

EXIT_WITH_CAUSE = 3
READY, FAILED = "sent/.ready", "sent/.failed"
"""In the job's directory in the container: the batch script waits for one of them."""
SENT_TIME = 1
"""The time of files that were sent, as in `log_reader.py`."""
BATCH_SCRIPT_TIMEOUT_S = 120
MAX_CHUNK_BYTES, MAX_LINE_BYTES = 1 << 20, 1 << 20
SMALL_FILE_BYTES, SETTLE_S = 1 << 20, 3.0
"""A larger file is sent once nothing has written to it for some seconds."""
MIN_PAUSE_S, MAX_PAUSE_S = 0.5, 5.0
"""Between two scans of what the job has written; longer where a scan takes long."""
HEARTBEAT_S = 10.0
"""A sender on a broken connection ends at its next write, so it writes this often."""
CHECKPOINTS = "checkpoints"
UNFINISHED = (".tmp-", ".old-")
"""In the names of checkpoints that are being written or deleted."""


def main(argv: list[str]) -> int:
    what, way, root, job = argv[:4]
    os.umask(0o022)
    try:
        if what == "take":
            Receiver(root, job, way).run(sys.stdin.buffer, sys.stdout.buffer)
        else:
            sender = Sender(root, job, sys.stdin.buffer, sys.stdout.buffer)
            (sender.send_there if way == "there" else sender.send_back)(*argv[4:])
            sender.end()
    except BrokenPipeError:
        return 1  # the other end has ended, and reports the cause itself
    except OSError as error:
        sys.stderr.write("%s: %s\n" % (os.fsdecode(error.filename or root), error.strerror or error))
        return EXIT_WITH_CAUSE
    return 0


class Sender:
    """Sends what the receiver does not have."""

    def __init__(self, root: str, job: str, stream_in: BinaryIO, out: BinaryIO) -> None:
        self.root, self.job = root, job
        self.out = out
        line = stream_in.readline()
        if not line.endswith(b"\n"):
            raise BrokenPipeError
        answer = json.loads(line)
        self.receiver_files: FileTimes = answer["files"]
        self.submission: str = answer["submission"]

    def send_there(self, code: str, runtime: str) -> None:
        """Send what the job needs, unless it has it: the files of a job that runs are newer."""
        if self._name(READY) not in self.receiver_files:
            directory = os.path.join(self.root, self.job)
            if self._belongs_to_another_job(directory):
                set_aside(directory, self.submission)
            for name, path in job_files(self.root, self.job):
                if not os.path.basename(name).startswith("rank-"):  # earlier logs are not read there
                    self._send(name, path)
            archive = "code/%s.tar" % code
            self._send(self._name("sent/" + archive), os.path.join(self.root, archive))
            library = os.path.join(self.root, "lib", runtime)
            for name, path in walk(library, self._name("sent/lib/" + runtime)):
                self._send(name, path)
            self._send_header({"name": self._name(READY), "mode": 0o644, "time": 0})
            self._send_chunk(b"")

    def send_back(self, ended: str) -> None:
        """Send what the job writes until it has ended, then the rest."""
        last, heartbeat = False, 0.0
        while not last:
            last, began = os.path.exists(ended), time.monotonic()
            for name, path in job_files(self.root, self.job):
                if not is_local(name, path):
                    self._send(name, path, last=last)
            self._delete_checkpoints()
            if began - heartbeat > HEARTBEAT_S:
                heartbeat = began
                self._send_header({})
            self.out.flush()
            if not last:
                time.sleep(min(MAX_PAUSE_S, max(MIN_PAUSE_S, 5 * (time.monotonic() - began))))

    def _name(self, inside: str) -> str:
        return "%s/%s" % (self.job, inside)

    def _belongs_to_another_job(self, directory: str) -> bool:
        """A cluster that was built again numbers its jobs from 1 again, and may have files of an earlier job."""
        with contextlib.suppress(OSError), open(os.path.join(directory, "submission")) as file:
            return file.read() != self.submission
        return True

    def _send(self, name: str, path: str, last: bool = True) -> None:
        try:
            status = os.lstat(path)
        except OSError:
            return  # deleted since the scan
        received, now = self.receiver_files.get(name), [status.st_size, status.st_mtime_ns]
        if received == now:
            return
        if stat.S_ISLNK(status.st_mode):
            target = os.readlink(path)
            if stays_inside(target):
                self._send_header({"name": name, "link": target})
                self.receiver_files[name] = now
        elif stat.S_ISREG(status.st_mode):
            changing = status.st_size > SMALL_FILE_BYTES and time.time() - status.st_mtime < SETTLE_S
            safe = is_append_only(name) or name.startswith(self._name(CHECKPOINTS) + "/")
            if last or safe or not changing:
                self._send_file(name, path, now, received)

    def _send_file(self, name: str, path: str, now: list[int], received: list[int] | None) -> None:
        try:
            handle = os.open(path, os.O_RDONLY | os.O_NOFOLLOW)
        except FileNotFoundError:
            return  # deleted since the scan
        with open(handle, "rb") as file:
            mode = os.fstat(file.fileno()).st_mode & 0o755
            header: dict[str, Any] = {"name": name, "mode": mode, "time": now[1]}
            left = now[0]  # what is appended meanwhile is sent next time
            if is_append_only(name):
                header["from"] = received[0] if received and received[0] <= now[0] else 0
                left -= file.seek(header["from"])
            self._send_header(header)
            while left > 0:
                data = file.read(min(left, MAX_CHUNK_BYTES))
                if not data:
                    break
                self._send_chunk(data)
                left -= len(data)
            self._send_chunk(b"")
        self.receiver_files[name] = now

    def _delete_checkpoints(self) -> None:
        """Have the receiver delete the checkpoints that the job has deleted, as long as another one stays."""
        place = os.path.join(self.root, self.job, CHECKPOINTS)
        try:
            existing = {name for name in os.listdir(place) if not any(mark in name for mark in UNFINISHED)}
        except OSError:
            return
        start = self._name(CHECKPOINTS) + "/"
        names = {name[len(start) :].partition("/")[0] for name in self.receiver_files if name.startswith(start)}
        for deleted in sorted(names - existing) if names & existing else ():
            self._send_header({"delete": start + deleted})
            for name in [name for name in self.receiver_files if name.startswith(start + deleted + "/")]:
                del self.receiver_files[name]

    def end(self) -> None:
        self._send_header({"end": True})
        self.out.flush()

    def _send_header(self, header: dict[str, Any]) -> None:
        self.out.write(json.dumps(header).encode() + b"\n")

    def _send_chunk(self, data: bytes) -> None:
        self.out.write(struct.pack("!I", len(data)) + data)


class Receiver:
    """Lists what it has and writes what it receives. Whatever that is, it touches nothing but the job's files."""

    def __init__(self, root: str, job: str, way: str) -> None:
        self.root, self.job, self.way = root, job, way

    def run(self, stream: BinaryIO, out: BinaryIO) -> None:
        submission = wait_for_submission(os.path.join(self.root, self.job)) if self.way == "there" else ""
        out.write(json.dumps({"submission": submission, "files": list_files(self.root, self.job)}).encode() + b"\n")
        out.flush()
        out.close()
        while True:
            header = json.loads(stream.readline(MAX_LINE_BYTES) or b'{"interrupted": true}')
            if "end" in header:
                return
            if "interrupted" in header:
                raise BrokenPipeError
            if "delete" in header:
                self._delete(self._check_name(header["delete"]))
            elif "link" in header:
                self._write_link(self._check_name(header["name"]), header["link"])
            elif header:
                self._write_file(self._check_name(header["name"]), header, stream)

    def _check_name(self, name: str) -> list[str]:
        components = name.split("/")
        if name == self.job + ".out" or (
            components[0] == self.job and len(components) > 1 and not {"", ".", ".."} & set(components)
        ):
            return components
        raise OSError(0, "received a file that is not the job's", name)

    def _write_file(self, components: list[str], header: dict[str, Any], stream: BinaryIO) -> None:
        with open_directory(self.root, components) as directory:
            grown = "from" in header
            name = components[-1] if grown else ".%s.part" % components[-1]
            flags = os.O_WRONLY | os.O_CREAT | os.O_NOFOLLOW | (0 if grown else os.O_TRUNC)
            with open(os.open(name, flags, 0o600, dir_fd=directory), "wb") as file:
                start = int(header.get("from", 0))
                os.ftruncate(file.fileno(), start)
                file.seek(start)
                while length := struct.unpack("!I", read_exactly(stream, 4))[0]:
                    file.write(read_exactly(stream, length))
                file.flush()
                os.fchmod(file.fileno(), int(header["mode"]) & 0o755)
                os.utime(file.fileno(), ns=(int(header["time"]), int(header["time"])))
            if not grown:
                os.rename(name, components[-1], src_dir_fd=directory, dst_dir_fd=directory)

    def _write_link(self, components: list[str], target: str) -> None:
        if stays_inside(target):
            with open_directory(self.root, components) as directory:
                with contextlib.suppress(FileNotFoundError):
                    os.unlink(components[-1], dir_fd=directory)
                os.symlink(target, components[-1], dir_fd=directory)

    def _delete(self, components: list[str]) -> None:
        if components[1:2] == [CHECKPOINTS] and len(components) == 3:
            with open_directory(self.root, components) as directory:
                # Interrupted, it leaves a checkpoint without what its manifest names: that is not used.
                shutil.rmtree("/proc/self/fd/%d/%s" % (directory, components[-1]), ignore_errors=True)


def job_files(root: str, job: str) -> Iterator[tuple[str, str]]:
    """The job's files by name below `root`. The manifest, which completes a checkpoint, comes last."""
    yield job + ".out", os.path.join(root, job + ".out")
    for name, path in sorted(walk(os.path.join(root, job), job), key=lambda file: "/MANIFEST" in file[0]):
        if not name.startswith(job + "/sent/"):
            yield name, path


def walk(directory: str, name: str) -> Iterator[tuple[str, str]]:
    """Files and links below a directory; links are not followed."""
    try:
        entries = sorted(os.scandir(directory), key=lambda entry: entry.name)
    except OSError:
        return  # deleted since the scan
    for entry in entries:
        inside = "%s/%s" % (name, entry.name)
        if not entry.is_dir(follow_symlinks=False):
            if not (entry.name.startswith(".") and entry.name.endswith(".part")):  # interrupted
                yield inside, entry.path
        elif not any(mark in entry.name for mark in UNFINISHED):
            yield from walk(entry.path, inside)


def stays_inside(target: str) -> bool:
    return not os.path.isabs(target) and ".." not in target.split("/")


def is_local(name: str, path: str) -> bool:
    """Files of no use elsewhere: locks, process numbers, and the code as it was sent, dated 1970."""
    inside = name.split("/")[1:]
    if inside[:1] == ["tree"]:
        with contextlib.suppress(OSError):
            return os.lstat(path).st_mtime <= SENT_TIME
    return bool(inside) and (inside[0] == "tree.lock" or inside[0].startswith(("pids.", "tree.")))


def is_append_only(name: str) -> bool:
    """Whether a file only grows: then only the new part is sent."""
    inside = name.split("/")[1:]
    if not inside:
        return True  # the batch script's output
    return (len(inside) == 1 and inside[0].endswith(".log")) or (inside[0] == "tracking" and name.endswith(".jsonl"))


def list_files(root: str, job: str) -> FileTimes:
    files: FileTimes = {}
    ready = os.path.join(root, job, READY)
    for name, path in (*job_files(root, job), ("%s/%s" % (job, READY), ready)):
        with contextlib.suppress(OSError):
            status = os.lstat(path)
            files[name] = [status.st_size, status.st_mtime_ns]
    return files


def wait_for_submission(directory: str) -> str:
    """The submission that the batch script belongs to, which it writes when it starts."""
    end = time.monotonic() + BATCH_SCRIPT_TIMEOUT_S
    while time.monotonic() < end:
        with contextlib.suppress(OSError), open(os.path.join(directory, "submission")) as file:
            return file.read()
        time.sleep(0.1)
    raise OSError(0, "the batch script has not started", directory)


def set_aside(directory: str, submission: str) -> None:
    """Rename what an earlier job of this number left, and its output."""
    try:
        for path in (directory, directory + ".out"):
            with contextlib.suppress(FileNotFoundError):
                os.rename(path, "%s.before-%s" % (path, submission))
    except PermissionError as error:
        text = "an earlier job of this number, another user's, left it on the controller: remove it there"
        raise OSError(error.errno, text, directory) from None


@contextlib.contextmanager
def open_directory(root: str, parts: list[str]) -> Iterator[int]:
    """The directory of a file, created if missing, reached without following links."""
    flags = os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW
    directory = os.open(root, flags)
    try:
        for part in parts[:-1]:
            with contextlib.suppress(FileExistsError):
                os.mkdir(part, dir_fd=directory)
            directory, before = os.open(part, flags, dir_fd=directory), directory
            os.close(before)
        yield directory
    finally:
        os.close(directory)


def read_exactly(stream: BinaryIO, length: int) -> bytes:
    data = stream.read(length) if length <= MAX_CHUNK_BYTES else b""
    if len(data) < length:
        raise BrokenPipeError
    return data


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
