#!/usr/bin/python3 -I
"""Runs ssh for sshfs, and reconnects when the connection is lost, without sshfs noticing.

Measured: `sshfs -o reconnect` (3.7.3) fails every read and write of an open file with EIO, during and after an outage.

Here a request waits until it has its answer: files are opened again, pending requests are repeated, and what was
written since the last fsync is written again, as a server that lost power has lost it. Its arguments are those of ssh.
"""

from __future__ import annotations

import os
import struct
import subprocess
import sys
import threading
import time
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
MAX_UNSYNCED_BYTES = 64 << 20
"""Bytes kept to be written again. Beyond this the proxy sends an fsync."""
OWN_REQUESTS = 0xF0000000
"""The proxy numbers its own requests from here; sshfs counts from 0."""
RECONNECT_PAUSE_S = 1.0
SHARED_ACCOUNT_PREFIX = "shoal-share@"
"""In ssh's arguments, the account of shares. Its files are open to all users, on the server too."""


class OpenFile:
    """A file or directory that sshfs has open."""

    def __init__(self, request: bytes, handle: bytes) -> None:
        self.kind = request[4]
        self.path = string_at(request, 9)
        self.flags = struct.unpack_from(">I", request, 13 + len(self.path))[0] if self.kind == OPEN else 0
        self.handle = handle
        """The server's handle; the one that sshfs has stays the same across connections."""
        self.reads = 0
        """How many parts of a directory were read."""
        self.unsynced: list[bytes] = []


class ProxySession:
    """sshfs on standard input and output, and the server behind an ssh that may be replaced."""

    def __init__(self, connect: Callable[[], subprocess.Popen[bytes]], client_in: int = 0, client_out: int = 1) -> None:
        self.connect = connect
        self.shared_account = False
        self.client_in, self.client_out = client_in, client_out
        self.pending: dict[int, bytes] = {}
        self.opened: dict[bytes, OpenFile] = {}
        self.repeated: set[int] = set()
        self.unsynced = 0
        self.limit = MAX_UNSYNCED_BYTES
        self.count = 0
        self.sent: set[int] = set()
        """Requests sent over the current connection."""
        self.fsync_counts: dict[int, int] = {}
        """By fsync request: how many writes of the file were answered when it was sent."""
        self.epoch = 0
        self.ready = False
        self.client_init = b""
        self.version_sent = False
        self.ended = False
        self.state_lock = threading.Lock()
        self.server_lock = threading.Lock()
        self.client_lock = threading.Lock()
        self.server: subprocess.Popen[bytes] | None = None

    def run(self) -> None:
        """Runs until sshfs ends."""
        requests = packets(self.client_in)
        self.client_init = next(requests, b"")
        if not self.client_init:
            return
        threading.Thread(target=self._read_replies, daemon=True).start()
        for packet in requests:
            self._request(widen_mode(packet) if self.shared_account else packet)
        self.ended = True
        if self.server:
            self.server.kill()

    def _request(self, packet: bytes) -> None:
        number = struct.unpack_from(">I", packet, 5)[0]
        with self.state_lock:
            self.pending[number] = packet
        with self.server_lock:
            with self.state_lock:
                if not self.ready or number in self.sent or number not in self.pending:
                    return  # the reconnect has sent it, or will
                data = self._prepare(number)
            self._write(data)

    def _prepare(self, number: int) -> bytes:
        """The request for the server; "" where the proxy answers it itself."""
        packet = self.pending[number]
        data = self._translate(packet)
        if data is None:
            threading.Thread(target=self._fail_request, args=(number,), daemon=True).start()
            return b""
        self.sent.add(number)
        if packet[4] == EXTENDED and FSYNC in packet[:40]:
            at = handle_offset(packet) or 0
            self.fsync_counts[number] = len(self.opened[packet[at + 4 : at + 8]].unsynced)
        return data

    def _translate(self, packet: bytes) -> bytes | None:
        """The request with the server's handle. None if the file is no longer open."""
        at = handle_offset(packet)
        if at is None:
            return packet
        name = string_at(packet, at)
        file = self.opened.get(name)
        return string(packet[4:at] + string(file.handle) + packet[at + 4 + len(name) :]) if file else None

    def _write(self, data: bytes) -> None:
        try:
            assert self.server and self.server.stdin
            write_all(self.server.stdin.fileno(), data)
        except (OSError, ValueError):
            pass  # the reader of replies notices too, and reconnects

    def _fail_request(self, number: int) -> None:
        with self.state_lock:
            self.pending.pop(number, None)
            self.sent.discard(number)
            self.repeated.discard(number)
        if number < OWN_REQUESTS:
            self._reply(string(bytes([STATUS]) + struct.pack(">II", number, FAILURE) + string(b"stale") + string(b"")))

    def _read_replies(self) -> None:
        while not self.ended:
            incoming = self._reconnect()
            threading.Thread(target=self._repeat_pending, args=(self.epoch,), daemon=True).start()
            for packet in incoming:
                answer = self._handle_reply(packet)
                if answer:
                    self._reply(answer)

    def _reply(self, data: bytes) -> None:
        try:
            with self.client_lock:
                write_all(self.client_out, data)
        except OSError:
            os._exit(0)  # sshfs has ended

    def _handle_reply(self, packet: bytes) -> bytes:
        """Record what a reply changes; the reply for sshfs."""
        kind, number = packet[4], struct.unpack_from(">I", packet, 5)[0]
        with self.state_lock:
            request = self.pending.pop(number, None)
            if request is None:
                return b""  # to the proxy's own request, or a second reply
            is_repeat = number in self.repeated
            self.repeated.discard(number)
            self.sent.discard(number)
            if kind == HANDLE and request[4] in (OPEN, OPENDIR):
                self.count += 1
                client_handle = struct.pack(">I", self.count)
                self.opened[client_handle] = OpenFile(request, packet[13:])
                return string(packet[4:9] + string(client_handle))
            code = struct.unpack_from(">I", packet, 9)[0] if kind == STATUS else None
            if is_repeat and code is not None and succeeded_before(request, code):
                code, packet = OK, string(packet[4:9] + struct.pack(">I", OK) + string(b"") + string(b""))
            self._record(request, kind, code)
        return packet if number < OWN_REQUESTS else b""

    def _record(self, request: bytes, kind: int, code: int | None) -> None:
        at = handle_offset(request)
        if at is None:
            if code == OK:
                self._rename_open(request)
            return
        name = request[at + 4 : at + 8]
        file = self.opened.get(name)
        if file is None:
            return
        if request[4] == CLOSE:
            self._forget_writes(file, len(file.unsynced))
            del self.opened[name]
        elif request[4] == READDIR and kind == NAME:
            file.reads += 1
        elif request[4] == WRITE and code == OK:
            file.unsynced.append(request)
            self.unsynced += len(request)
            if self.unsynced > self.limit:
                self._sync_largest()
        elif request[4] == EXTENDED and FSYNC in request[:40]:
            number = struct.unpack_from(">I", request, 5)[0]
            count = self.fsync_counts.pop(number, 0)
            self._forget_writes(file, count if code == OK else 0)

    def _rename_open(self, request: bytes) -> None:
        """An open file stays open under its new name."""
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

    def _forget_writes(self, file: OpenFile, count: int) -> None:
        self.unsynced -= sum(map(len, file.unsynced[:count]))
        file.unsynced = file.unsynced[count:]
        self.limit = MAX_UNSYNCED_BYTES

    def _sync_largest(self) -> None:
        """Send an fsync for the file with the most unsynced data."""
        name, _ = max(self.opened.items(), key=lambda pair: sum(map(len, pair[1].unsynced)))
        self.count += 1
        number = OWN_REQUESTS + self.count % 0xFFFFFF
        request = string(bytes([EXTENDED]) + struct.pack(">I", number) + string(FSYNC) + string(name))
        self.limit = self.unsynced + MAX_UNSYNCED_BYTES  # not again before the reply
        threading.Thread(target=self._request, args=(request,), daemon=True).start()

    def _reconnect(self) -> Iterator[bytes]:
        """Connect, however long it takes, and restore the open files."""
        while not self.ended:
            if self.server:
                self.server.kill()
                self.server.wait()
            with self.server_lock, self.state_lock:
                self.ready = False
                self.epoch += 1
                self.sent.clear()
            server = self.server = self.connect()
            assert server.stdin and server.stdout
            try:
                write_all(server.stdin.fileno(), self.client_init)
                incoming = packets(server.stdout.fileno())
                version = next(incoming, b"")
                if version and version[4] == VERSION:
                    with self.state_lock:
                        files = list(self.opened.items())
                    for name, file in files:
                        self._reopen(server, incoming, name, file)
                    if not self.version_sent:
                        self._reply(version)
                    self.version_sent = True
                    return incoming
            except (OSError, EOFError):
                pass
            time.sleep(RECONNECT_PAUSE_S)
        return iter(())

    def _reopen(self, server: subprocess.Popen[bytes], incoming: Iterator[bytes], name: bytes, file: OpenFile) -> None:
        """Open a file again, and write again what the server may have lost."""
        answer = request_reply(server, incoming, bytes([file.kind]), reopen_body(file))
        if answer[4] != HANDLE:
            with self.state_lock:
                if self.opened.pop(name, None):  # removed meanwhile: requests for it fail
                    self._forget_writes(file, len(file.unsynced))
            return
        file.handle = answer[13:]
        for _ in range(file.reads):
            request_reply(server, incoming, bytes([READDIR]), string(file.handle))
        for request in file.unsynced:
            offset_and_data = request[13 + len(string_at(request, 9)) :]
            request_reply(server, incoming, bytes([WRITE]), string(file.handle) + offset_and_data)

    def _repeat_pending(self, epoch: int) -> None:
        """Repeat all pending requests, then let new ones through."""
        with self.server_lock:
            while epoch == self.epoch:
                with self.state_lock:
                    unsent = [number for number in self.pending if number not in self.sent]
                    self.ready = not unsent
                    if not unsent:
                        return
                    requests = [without_exclusive(self._prepare(number)) for number in unsent]
                    self.repeated.update(unsent)
                    # Requests that the proxy answers itself must not be repeated.
                    self.sent.update(unsent)
                for request in requests:
                    self._write(request)


def widen_mode(request: bytes) -> bytes:
    """Make a file that others may read writable for them: all users share the account that owns it."""
    if request[4] not in (OPEN, MKDIR):
        return request
    at = 13 + struct.unpack_from(">I", request, 9)[0] + (4 if request[4] == OPEN else 0)
    flags = struct.unpack_from(">I", request, at)[0]
    at += 4 + (8 if flags & SIZE else 0) + (8 if flags & OWNER else 0)
    if not flags & MODE:
        return request
    mode = struct.unpack_from(">I", request, at)[0]
    wide = mode | (mode >> 6 & 7) * 0o111 if mode & 0o004 else mode
    return request[:at] + struct.pack(">I", wide) + request[at + 4 :]


def reopen_body(file: OpenFile) -> bytes:
    """The body of a request that opens the same file without creating or truncating it.

    Nor does it append: repeated writes must go to the same offset.
    """
    if file.kind == OPENDIR:
        return string(file.path)
    return string(file.path) + struct.pack(">II", file.flags & ~(APPEND | CREATE | TRUNCATE | EXCLUSIVE), 0)


def without_exclusive(request: bytes) -> bytes:
    """A repeated request must not demand that the file is new: the first one may have created it."""
    if not request or request[4] != OPEN:
        return request
    at = 13 + struct.unpack_from(">I", request, 9)[0]
    flags = struct.unpack_from(">I", request, at)[0] & ~EXCLUSIVE
    return request[:at] + struct.pack(">I", flags) + request[at + 4 :]


def succeeded_before(request: bytes, code: int) -> bool:
    """Whether the error of a repeated request shows that the first one succeeded."""
    kind = request[4]
    if kind == EXTENDED:
        return code == NO_SUCH_FILE if RENAMES in request[:48] else code == FAILURE and b"hardlink" in request[:48]
    if kind in (REMOVE, RMDIR, RENAME):
        return code == NO_SUCH_FILE
    return kind in (MKDIR, SYMLINK) and code == FAILURE


def handle_offset(packet: bytes) -> int | None:
    """Where in a request the handle begins."""
    if packet[4] in WITH_HANDLE:
        return 9
    extension = string_at(packet, 9) if packet[4] == EXTENDED else b""
    return 13 + len(extension) if extension in HANDLES else None


def request_reply(server: subprocess.Popen[bytes], incoming: Iterator[bytes], kind: bytes, rest: bytes) -> bytes:
    assert server.stdin
    write_all(server.stdin.fileno(), string(kind + struct.pack(">I", OWN_REQUESTS) + rest))
    answer = next(incoming, b"")
    if not answer:
        raise EOFError
    return answer


def packets(fd: int) -> Iterator[bytes]:
    """Whole packets, each with its length in front, until the other side closes."""
    with open(fd, "rb", 1 << 18, closefd=False) as stream:
        try:
            while len(head := stream.read(4)) == 4:
                size = struct.unpack(">I", head)[0]
                body = stream.read(size)
                if len(body) < size:
                    return
                yield head + body
        except OSError:
            return


def string(data: bytes) -> bytes:
    """Data with its length in front, as SFTP has packets and strings."""
    return struct.pack(">I", len(data)) + data


def string_at(packet: bytes, at: int) -> bytes:
    size = struct.unpack_from(">I", packet, at)[0]
    return packet[at + 4 : at + 4 + size]


def write_all(fd: int, data: bytes) -> None:
    view = memoryview(data)
    while view:
        view = view[os.write(fd, view) :]


def ssh() -> subprocess.Popen[bytes]:
    line = ["ssh", *sys.argv[1:]]
    # In its own session: signals of the terminal where sshfs was started by hand do not reach it.
    return subprocess.Popen(line, stdin=subprocess.PIPE, stdout=subprocess.PIPE, start_new_session=True)


if __name__ == "__main__":
    session = ProxySession(ssh)
    session.shared_account = any(word.startswith(SHARED_ACCOUNT_PREFIX) for word in sys.argv)
    session.run()
