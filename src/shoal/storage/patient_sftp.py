#!/usr/bin/python3 -I
"""What sshfs starts in place of ssh: ssh, and when the connection is lost, ssh again, with nobody the wiser.

sshfs alone answers "Input/output error" to all that is under way when its server goes, and to every file that was open
when it returns. Here a request waits until it has its answer: files are opened again, what was asked is asked again,
and what was written since the last fsync is written again, as a server that lost its power has forgotten it.

Runs on the hosts: the standard library of Python 3.8 and later, nothing else. Its arguments are those of ssh.
"""

from __future__ import annotations

import os
import struct
import subprocess
import sys
import threading
import time

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

INIT, VERSION, OPEN, CLOSE, READ, WRITE = 1, 2, 3, 4, 5, 6
FSTAT, FSETSTAT, OPENDIR, READDIR, REMOVE, MKDIR, RMDIR = 8, 10, 11, 12, 13, 14, 15
RENAME, SYMLINK, STATUS, HANDLE, NAME, EXTENDED = 18, 20, 101, 102, 104, 200
WITH_HANDLE = (CLOSE, READ, WRITE, FSTAT, FSETSTAT, READDIR)
OK, NO_SUCH_FILE, FAILURE = 0, 2, 4
APPEND, CREATE, TRUNCATE, EXCLUSIVE = 0x04, 0x08, 0x10, 0x20
SIZE, OWNER, MODE = 0x01, 0x02, 0x04
FSYNC, RENAMES = b"fsync@openssh.com", b"posix-rename@openssh.com"
HANDLES = (FSYNC, b"fstatvfs@openssh.com")
MOST_UNSYNCED = 64 << 20
"""Bytes that are kept to be written again. When there are more, the server is asked to put them on its disk."""
OURS = 0xF0000000
"""Requests of our own have numbers from here on; sshfs counts from 0."""
PAUSE = 1.0
EVERYBODYS = "shoal-share@"
"""How the shares' account is called among ssh's arguments. What it makes is everybody's, on the server too."""


class Opened:
    """A file or directory that sshfs has open."""

    def __init__(self, request: bytes, handle: bytes) -> None:
        self.kind = request[4]
        self.path = string_at(request, 9)
        self.flags = struct.unpack_from(">I", request, 13 + len(self.path))[0] if self.kind == OPEN else 0
        self.handle = handle
        """The server's name for it; ours does not change when the server's does."""
        self.answers = 0
        """How often a directory has been read from."""
        self.unsynced: list[bytes] = []


class Session:
    """sshfs on our standard input and output, and the server behind an ssh that may come and go."""

    def __init__(
        self,
        connect: Callable[[], subprocess.Popen[bytes]],
        client_in: int = 0,
        client_out: int = 1,
        everybodys: bool = False,
    ) -> None:
        self.connect = connect
        self.everybodys = everybodys
        self.client_in, self.client_out = client_in, client_out
        self.waiting: dict[int, bytes] = {}
        self.opened: dict[bytes, Opened] = {}
        self.repeated: set[int] = set()
        self.unsynced = 0
        self.limit = MOST_UNSYNCED
        self.count = 0
        self.sent: set[int] = set()
        """Requests that this ssh has been given."""
        self.marks: dict[int, int] = {}
        """How much of a file's writes had their answer when its fsync was asked for."""
        self.epoch = 0
        self.ready = False
        self.hello = b""
        self.greeted = False
        self.over = False
        self.state = threading.Lock()
        self.writing = threading.Lock()
        self.answering = threading.Lock()
        self.server: subprocess.Popen[bytes] | None = None

    def run(self) -> None:
        """Returns when sshfs has gone."""
        requests = packets(self.client_in)
        self.hello = next(requests, b"")
        if not self.hello:
            return
        threading.Thread(target=self._answers, daemon=True).start()
        for packet in requests:
            self._ask(for_everybody(packet) if self.everybodys else packet)
        self.over = True
        if self.server:
            self.server.kill()

    # ---- from sshfs to the server

    def _ask(self, packet: bytes) -> None:
        number = struct.unpack_from(">I", packet, 5)[0]
        with self.state:
            self.waiting[number] = packet
        with self.writing:
            with self.state:
                if not self.ready or number in self.sent or number not in self.waiting:
                    return  # it has been asked again already, or will be
                told = self._send(number)
            self._write(told)

    def _send(self, number: int) -> bytes:
        """The request as the server is to get it; "" where it is answered without the server."""
        packet = self.waiting[number]
        told = self._to_server(packet)
        if told is None:
            threading.Thread(target=self._answer_ourselves, args=(number,), daemon=True).start()
            return b""
        self.sent.add(number)
        if packet[4] == EXTENDED and FSYNC in packet[:40]:
            at = handle_at(packet) or 0
            self.marks[number] = len(self.opened[packet[at + 4 : at + 8]].unsynced)
        return told

    def _to_server(self, packet: bytes) -> bytes | None:
        """The request with the server's name for its file. None when there is no such file any more."""
        at = handle_at(packet)
        if at is None:
            return packet
        size = struct.unpack_from(">I", packet, at)[0]
        found = self.opened.get(packet[at + 4 : at + 4 + size])
        if found is None:
            return None
        return framed(packet[4:at] + string(found.handle) + packet[at + 4 + size :])

    def _write(self, data: bytes) -> None:
        server = self.server
        try:
            assert server and server.stdin
            write_all(server.stdin.fileno(), data)
        except (OSError, ValueError):
            pass  # the reader of answers notices too, and asks again

    def _answer_ourselves(self, number: int) -> None:
        with self.state:
            self.waiting.pop(number, None)
            self.sent.discard(number)
            self.repeated.discard(number)
        if number < OURS:
            self._tell(framed(bytes([STATUS]) + struct.pack(">II", number, FAILURE) + string(b"stale") + string(b"")))

    # ---- from the server to sshfs

    def _answers(self) -> None:
        while not self.over:
            incoming = self._meet()
            threading.Thread(target=self._ask_again, args=(self.epoch,), daemon=True).start()
            for packet in incoming:
                answer = self._take(packet)
                if answer:
                    self._tell(answer)

    def _tell(self, data: bytes) -> None:
        try:
            with self.answering:
                write_all(self.client_out, data)
        except OSError:
            os._exit(0)  # sshfs has gone

    def _take(self, packet: bytes) -> bytes:
        """What an answer changes, and what sshfs gets to see of it."""
        kind, number = packet[4], struct.unpack_from(">I", packet, 5)[0]
        with self.state:
            request = self.waiting.pop(number, None)
            if request is None:
                return b""  # to one of ours, or the second answer to one
            again = number in self.repeated
            self.repeated.discard(number)
            self.sent.discard(number)
            if kind == HANDLE and request[4] in (OPEN, OPENDIR):
                self.count += 1
                ours = struct.pack(">I", self.count)
                self.opened[ours] = Opened(request, packet[13:])
                return framed(packet[4:9] + string(ours))
            code = struct.unpack_from(">I", packet, 9)[0] if kind == STATUS else None
            if again and code is not None and done_before(request, code):
                code, packet = OK, framed(packet[4:9] + struct.pack(">I", OK) + string(b"") + string(b""))
            self._keep(request, kind, code)
        return packet if number < OURS else b""

    def _keep(self, request: bytes, kind: int, code: int | None) -> None:
        at = handle_at(request)
        if at is None:
            if code == OK:
                self._renamed(request)
            return
        name = request[at + 4 : at + 8]
        found = self.opened.get(name)
        if found is None:
            return
        if request[4] == CLOSE:
            self._synced(found, len(found.unsynced))
            del self.opened[name]
        elif request[4] == READDIR and kind == NAME:
            found.answers += 1
        elif request[4] == WRITE and code == OK:
            found.unsynced.append(request)
            self.unsynced += len(request)
            if self.unsynced > self.limit:
                self._sync_most()
        elif request[4] == EXTENDED and FSYNC in request[:40]:
            number = struct.unpack_from(">I", request, 5)[0]
            count = self.marks.pop(number, 0)
            self._synced(found, count if code == OK else 0)

    def _renamed(self, request: bytes) -> None:
        """A file that is open keeps open under its new name."""
        at = 9
        if request[4] == EXTENDED and string_at(request, 9) == RENAMES:
            at = 13 + len(RENAMES)
        elif request[4] != RENAME:
            return
        old = string_at(request, at)
        new = string_at(request, at + 4 + len(old))
        for file in self.opened.values():
            if file.path == old or file.path.startswith(old + b"/"):
                file.path = new + file.path[len(old) :]

    def _synced(self, file: Opened, count: int) -> None:
        self.unsynced -= sum(map(len, file.unsynced[:count]))
        file.unsynced = file.unsynced[count:]
        self.limit = MOST_UNSYNCED

    def _sync_most(self) -> None:
        """Ask the server to put on its disk what is kept of the file with the most of it."""
        name, _ = max(self.opened.items(), key=lambda pair: sum(map(len, pair[1].unsynced)))
        self.count += 1
        number = OURS + self.count % 0xFFFFFF
        request = framed(bytes([EXTENDED]) + struct.pack(">I", number) + string(FSYNC) + string(name))
        self.limit = self.unsynced + MOST_UNSYNCED  # and not again before it has answered
        threading.Thread(target=self._ask, args=(request,), daemon=True).start()

    # ---- after the connection was lost

    def _meet(self) -> Iterator[bytes]:
        """Connect for as long as it takes, and bring the server to where the last one was."""
        while not self.over:
            if self.server:
                self.server.kill()
                self.server.wait()
            with self.writing, self.state:
                self.ready = False
                self.epoch += 1
                self.sent.clear()
            server = self.server = self.connect()
            assert server.stdin and server.stdout
            try:
                write_all(server.stdin.fileno(), self.hello)
                incoming = packets(server.stdout.fileno())
                greeting = next(incoming, b"")
                if greeting and greeting[4] == VERSION:
                    with self.state:
                        files = list(self.opened.items())
                    for name, file in files:
                        self._reopen(server, incoming, name, file)
                    if not self.greeted:
                        self._tell(greeting)
                    self.greeted = True
                    return incoming
            except (OSError, EOFError):
                pass
            time.sleep(PAUSE)
        return iter(())

    def _reopen(self, server: subprocess.Popen[bytes], incoming: Iterator[bytes], name: bytes, file: Opened) -> None:
        """Open a file again, and write again what the server may have forgotten."""
        answer = exchange(server, incoming, bytes([file.kind]), reopening(file))
        if answer[4] != HANDLE:
            with self.state:
                if self.opened.pop(name, None):  # somebody removed it; what is asked of it now fails
                    self._synced(file, len(file.unsynced))
            return
        file.handle = answer[13:]
        for _ in range(file.answers):
            exchange(server, incoming, bytes([READDIR]), string(file.handle))
        for request in file.unsynced:
            rest = request[13 + len(string_at(request, 9)) :]
            exchange(server, incoming, bytes([WRITE]), string(file.handle) + rest)

    def _ask_again(self, epoch: int) -> None:
        """All that has no answer yet, once more, and then what sshfs asks next."""
        with self.writing:
            while epoch == self.epoch:
                with self.state:
                    due = [number for number in self.waiting if number not in self.sent]
                    self.ready = not due
                    if not due:
                        return
                    told = [repeatable(self._send(number)) for number in due]
                    self.repeated.update(due)
                    # Those that need no server are answered, and must not be asked for a third time.
                    self.sent.update(due)
                for request in told:
                    self._write(request)


def for_everybody(request: bytes) -> bytes:
    """Who makes what others may read lets them write to it: its owner is an account that all of them share."""
    if request[4] not in (OPEN, MKDIR):
        return request
    at = 13 + struct.unpack_from(">I", request, 9)[0] + (4 if request[4] == OPEN else 0)
    given = struct.unpack_from(">I", request, at)[0]
    at += 4 + (8 if given & SIZE else 0) + (8 if given & OWNER else 0)
    if not given & MODE:
        return request
    mode = struct.unpack_from(">I", request, at)[0]
    wide = mode | (mode >> 6 & 7) * 0o111 if mode & 0o004 else mode
    return request[:at] + struct.pack(">I", wide) + request[at + 4 :]


def reopening(file: Opened) -> bytes:
    """The rest of a request that opens the same file and neither makes nor empties it.

    Nor does it append: what is written a second time must come to the place where it was the first time.
    """
    if file.kind == OPENDIR:
        return string(file.path)
    return string(file.path) + struct.pack(">II", file.flags & ~(APPEND | CREATE | TRUNCATE | EXCLUSIVE), 0)


def repeatable(request: bytes) -> bytes:
    """The request as it may be asked a second time: that a file must be new no longer holds."""
    if not request or request[4] != OPEN:
        return request
    at = 13 + struct.unpack_from(">I", request, 9)[0]
    flags = struct.unpack_from(">I", request, at)[0] & ~EXCLUSIVE
    return request[:at] + struct.pack(">I", flags) + request[at + 4 :]


def done_before(request: bytes, code: int) -> bool:
    """Whether a refusal of a repeated request says that the first one was heard."""
    kind = request[4]
    if kind == EXTENDED:
        return code == NO_SUCH_FILE if RENAMES in request[:48] else code == FAILURE and b"hardlink" in request[:48]
    if kind in (REMOVE, RMDIR, RENAME):
        return code == NO_SUCH_FILE
    return kind in (MKDIR, SYMLINK) and code == FAILURE


def handle_at(packet: bytes) -> int | None:
    """Where in a request the name of an open file begins."""
    if packet[4] in WITH_HANDLE:
        return 9
    if packet[4] == EXTENDED:
        size = struct.unpack_from(">I", packet, 9)[0]
        return 13 + size if packet[13 : 13 + size] in HANDLES else None
    return None


def exchange(server: subprocess.Popen[bytes], incoming: Iterator[bytes], kind: bytes, rest: bytes) -> bytes:
    assert server.stdin
    write_all(server.stdin.fileno(), framed(kind + struct.pack(">I", OURS) + rest))
    answer = next(incoming, b"")
    if not answer:
        raise EOFError
    return answer


def packets(fd: int) -> Iterator[bytes]:
    """Whole packets, with their length in front, until the other side closes."""
    kept = b""
    while True:
        at = 0
        while len(kept) - at >= 5:
            end = at + 4 + struct.unpack_from(">I", kept, at)[0]
            if end > len(kept):
                break
            yield kept[at:end]
            at = end
        kept = kept[at:]
        try:
            data = os.read(fd, 1 << 18)
        except OSError:
            return
        if not data:
            return
        kept += data


def framed(body: bytes) -> bytes:
    return struct.pack(">I", len(body)) + body


def string(data: bytes) -> bytes:
    return struct.pack(">I", len(data)) + data


def string_at(packet: bytes, at: int) -> bytes:
    size = struct.unpack_from(">I", packet, at)[0]
    return packet[at + 4 : at + 4 + size]


def write_all(fd: int, data: bytes) -> None:
    view = memoryview(data)
    while view:
        view = view[os.write(fd, view) :]


def ssh() -> subprocess.Popen[bytes]:
    # In a session of its own: what is typed where sshfs was started by hand is not for it.
    return subprocess.Popen(
        ["ssh", *sys.argv[1:]], stdin=subprocess.PIPE, stdout=subprocess.PIPE, start_new_session=True
    )


if __name__ == "__main__":
    Session(ssh, everybodys=any(word.startswith(EVERYBODYS) for word in sys.argv)).run()
