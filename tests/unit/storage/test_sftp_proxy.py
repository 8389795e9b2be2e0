"""A server that fails under an open share: every request gets one answer, and no synced data is lost."""

import os
import struct
import subprocess
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

import pytest
from tests.support.cases import cases

from shoal.remote import sftp_proxy as sftp
from shoal.storage import sshfs

SERVER = "/usr/lib/openssh/sftp-server"
READ, WRITE, APPEND, CREATE, EXCLUSIVE = 1, 2, 4, 8, 0x20

pytestmark = pytest.mark.skipif(not os.path.exists(SERVER), reason="needs OpenSSH's sftp-server")


class Share:
    """sshfs's end of a session, and the servers that were behind it one after another."""

    def __init__(self) -> None:
        self.servers: list[subprocess.Popen[bytes]] = []
        self.number = 0
        here_in, self.to_session = os.pipe()
        self.from_session, here_out = os.pipe()
        self.session = sftp.ProxySession(self.connect, here_in, here_out)
        self.thread = threading.Thread(target=self.session.run, daemon=True)
        self.thread.start()
        self.incoming = sftp.packets(self.from_session)
        sftp.write_all(self.to_session, sftp.string(struct.pack(">BI", sftp.INIT, 3)))
        assert next(self.incoming)[4] == sftp.VERSION

    def connect(self) -> subprocess.Popen[bytes]:
        self.servers.append(subprocess.Popen([SERVER, "-u", "0"], stdin=subprocess.PIPE, stdout=subprocess.PIPE))
        return self.servers[-1]

    def lose(self) -> None:
        """The server is gone, with all that it had not put on its disk."""
        self.servers[-1].kill()
        self.servers[-1].wait()

    def send(self, kind: int, rest: bytes) -> int:
        self.number += 1
        sftp.write_all(self.to_session, sftp.string(struct.pack(">BI", kind, self.number) + rest))
        return self.number

    def ask(self, kind: int, rest: bytes) -> bytes:
        number, answer = self.send(kind, rest), next(self.incoming)
        assert struct.unpack_from(">I", answer, 5)[0] == number
        return answer

    def status(self, kind: int, rest: bytes) -> int:
        answer = self.ask(kind, rest)
        assert answer[4] == sftp.STATUS, answer
        return int(struct.unpack_from(">I", answer, 9)[0])

    def open(self, path: Path, flags: int) -> bytes:
        answer = self.ask(sftp.OPEN, sftp.string(os.fsencode(path)) + struct.pack(">II", flags, 0))
        assert answer[4] == sftp.HANDLE, answer
        return answer[13:]

    def write(self, handle: bytes, offset: int, data: bytes) -> int:
        return self.status(sftp.WRITE, sftp.string(handle) + struct.pack(">Q", offset) + sftp.string(data))

    def read(self, handle: bytes, offset: int, size: int) -> bytes:
        return self.ask(sftp.READ, sftp.string(handle) + struct.pack(">QI", offset, size))[13:]

    def sync(self, handle: bytes) -> int:
        return self.status(sftp.EXTENDED, sftp.string(sftp.FSYNC) + sftp.string(handle))


@contextmanager
def mounted() -> Iterator[Share]:
    share = Share()
    try:
        yield share
    finally:
        os.close(share.to_session)
        share.thread.join()
        for server in share.servers:
            server.kill()
            server.wait()
            for end in (server.stdin, server.stdout):
                with suppress(OSError):
                    assert end
                    end.close()


@pytest.fixture
def share(monkeypatch: pytest.MonkeyPatch) -> Iterator[Share]:
    monkeypatch.setattr(sftp, "RECONNECT_PAUSE_S", 0.01)
    with mounted() as one:
        yield one


def write_through_losses(share: Share, handle: bytes) -> bytes:
    """Line after line, with six servers lost on the way, and synced: what the file must hold then."""
    lines = [b"%03d\n" % line for line in range(60)]
    for number, line in enumerate(lines):
        assert share.write(handle, number * 4, line) == sftp.OK
        if number % 10 == 7:
            share.lose()
    assert share.sync(handle) == sftp.OK
    return b"".join(lines)


def test_open_file_survives_many_lost_connections(share: Share, tmp_path: Path) -> None:
    handle = share.open(tmp_path / "x", READ | WRITE | CREATE)
    whole = write_through_losses(share, handle)
    assert share.read(handle, 0, 1000) == whole == (tmp_path / "x").read_bytes()
    assert share.status(sftp.CLOSE, sftp.string(handle)) == sftp.OK and len(share.servers) == 7
    assert not share.session.pending and not share.session.opened and not share.session.unsynced


def test_data_lost_in_a_power_cut_is_written_again_before_the_sync(share: Share, tmp_path: Path) -> None:
    handle = share.open(tmp_path / "x", WRITE | CREATE)
    assert share.write(handle, 0, b"on disk\n") == share.sync(handle) == sftp.OK
    assert share.write(handle, 8, b"only in memory\n") == sftp.OK
    (tmp_path / "x").write_bytes(b"on disk\n")  # as after a power cut, which the next server finds
    share.lose()
    assert share.sync(handle) == sftp.OK and (tmp_path / "x").read_bytes() == b"on disk\nonly in memory\n"


def test_unsynced_data_is_bounded_by_a_sync(share: Share, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sftp, "MAX_UNSYNCED_BYTES", 100_000)
    share.session.limit = 100_000
    handle = share.open(tmp_path / "x", WRITE | CREATE)
    for block in range(100):
        assert share.write(handle, block * 10_000, b"x" * 10_000) == sftp.OK
    end = time.monotonic() + 60
    while share.session.unsynced > 110_000 and time.monotonic() < end:
        time.sleep(0.05)  # the server syncs while it is written to, and may take its time
    assert share.session.unsynced <= 110_000 and share.status(sftp.CLOSE, sftp.string(handle)) == sftp.OK
    assert (tmp_path / "x").stat().st_size == 1_000_000


def test_pending_requests_get_a_single_reply_each(share: Share, tmp_path: Path) -> None:
    handle = share.open(tmp_path / "x", READ | WRITE | CREATE)
    blocks, sent = range(200), set()
    for block in blocks:
        data = struct.pack(">Q", block * 100) + sftp.string(b"%0100d" % block)
        sent.add(share.send(sftp.WRITE, sftp.string(handle) + data))
        if block == 150:
            share.lose()
    answers = [next(share.incoming) for _ in blocks]
    assert {struct.unpack_from(">I", answer, 5)[0] for answer in answers} == sent
    assert {struct.unpack_from(">I", answer, 9)[0] for answer in answers} == {sftp.OK}
    assert share.sync(handle) == sftp.OK
    assert (tmp_path / "x").read_bytes() == b"".join(b"%0100d" % block for block in blocks)


def test_repeated_request_that_succeeded_before_succeeds_again(share: Share, tmp_path: Path) -> None:
    """The answer was lost, not the deed. Both ends are taken by hand: only so is it certain which came first."""
    place = sftp.string(os.fsencode(tmp_path / "d"))
    for kind, rest, code in [
        (sftp.MKDIR, place + struct.pack(">I", 0), sftp.FAILURE),
        (sftp.RMDIR, place, sftp.NO_SUCH_FILE),
        (sftp.RENAME, place + place, sftp.NO_SUCH_FILE),
        (sftp.EXTENDED, sftp.string(sftp.RENAMES) + place + place, sftp.NO_SUCH_FILE),
    ]:
        request = sftp.string(struct.pack(">BI", kind, 9) + rest)
        assert sftp.succeeded_before(request, code)
        assert not sftp.succeeded_before(request, 3)  # the status is permission denied
    assert not sftp.succeeded_before(sftp.string(struct.pack(">BI", sftp.MKDIR, 9) + place), sftp.NO_SUCH_FILE)


def test_repeated_exclusive_open_accepts_an_existing_file() -> None:
    request = sftp.string(struct.pack(">BI", sftp.OPEN, 1) + sftp.string(b"/x") + struct.pack(">II", 0x2A, 0))
    assert struct.unpack_from(">I", sftp.without_exclusive(request), 15)[0] == 0x2A & ~EXCLUSIVE
    assert struct.unpack_from(">I", sftp.reopen_body(sftp.OpenFile(request, b"")), 6)[0] == WRITE


@cases("asked, made", (0o644, 0o666), (0o755, 0o777), (0o600, 0o600), (0o640, 0o640))
def test_files_readable_by_others_are_writable_by_them_on_the_server(tmp_path: Path, asked: int, made: int) -> None:
    flags = struct.pack(">II", WRITE | CREATE, sftp.MODE | sftp.SIZE) + struct.pack(">QI", 0, asked)
    opening = sftp.string(struct.pack(">BI", sftp.OPEN, 1) + sftp.string(b"/data/file") + flags)
    assert sftp.widen_mode(opening)[-4:] == struct.pack(">I", made)
    plain = sftp.string(struct.pack(">BI", sftp.OPEN, 1) + sftp.string(b"/data/file") + struct.pack(">II", READ, 0))
    assert sftp.widen_mode(plain) == plain


def test_only_the_share_account_widens_modes(share: Share, tmp_path: Path) -> None:
    assert f"{sshfs.ACCOUNT}@" == sftp.SHARED_ACCOUNT_PREFIX
    attributes = struct.pack(">II", sftp.MODE, 0o755)
    assert share.status(sftp.MKDIR, sftp.string(str(tmp_path / "own").encode()) + attributes) == sftp.OK
    share.session.shared_account = True
    assert share.status(sftp.MKDIR, sftp.string(str(tmp_path / "all").encode()) + attributes) == sftp.OK
    assert [oct((tmp_path / name).stat().st_mode & 0o777) for name in ("own", "all")] == ["0o755", "0o777"]


def test_appended_data_is_written_once_and_in_place(share: Share, tmp_path: Path) -> None:
    handle = share.open(tmp_path / "log", WRITE | CREATE | APPEND)
    whole = write_through_losses(share, handle)
    assert (tmp_path / "log").read_bytes() == whole


@cases("kind", sftp.RENAME, sftp.EXTENDED)
def test_file_renamed_while_open_continues_under_its_new_name(share: Share, tmp_path: Path, kind: int) -> None:
    handle = share.open(tmp_path / "new", WRITE | CREATE)
    assert share.write(handle, 0, b"one\n") == sftp.OK
    names = sftp.string(os.fsencode(tmp_path / "new")) + sftp.string(os.fsencode(tmp_path / "whole"))
    assert share.status(kind, (sftp.string(sftp.RENAMES) if kind == sftp.EXTENDED else b"") + names) == sftp.OK
    (tmp_path / "new").write_text("somebody else's")
    share.lose()
    assert share.write(handle, 4, b"two\n") == share.sync(handle) == sftp.OK
    assert (tmp_path / "whole").read_text() == "one\ntwo\n" and (tmp_path / "new").read_text() == "somebody else's"


def test_file_removed_meanwhile_gives_an_error_at_once(share: Share, tmp_path: Path) -> None:
    handle = share.open(tmp_path / "x", WRITE | CREATE)
    other = share.open(tmp_path / "y", WRITE | CREATE)
    assert share.write(handle, 0, b"kept to be written again") == sftp.OK
    share.lose()
    (tmp_path / "x").unlink()
    assert share.write(handle, 0, b"lost") == sftp.FAILURE
    assert share.write(other, 0, b"kept") == share.sync(other) == sftp.OK
    session = share.session
    assert not session.unsynced and not session.sent and not session.repeated


def test_own_requests_of_the_proxy_are_not_answered_to_sshfs(share: Share, tmp_path: Path) -> None:
    """A sync that the proxy sends, for a file that sshfs has closed in the meantime."""
    own = struct.pack(">BI", sftp.EXTENDED, sftp.OWN_REQUESTS + 1) + sftp.string(sftp.FSYNC) + sftp.string(b"gone")
    handle = share.open(tmp_path / "x", WRITE | CREATE)
    for _ in range(20):
        share.session._request(sftp.string(own))
    while share.session.pending:
        time.sleep(0.01)
    assert share.sync(handle) == sftp.OK  # the first answer that comes is the one to this


def test_directory_is_listed_once_across_a_lost_connection(share: Share, tmp_path: Path) -> None:
    for number in range(250):  # sftp-server tells a hundred at a time
        (tmp_path / f"f{number}").touch()
    handle = share.ask(sftp.OPENDIR, sftp.string(os.fsencode(tmp_path)))[13:]
    names: list[bytes] = []
    while (answer := share.ask(sftp.READDIR, sftp.string(handle)))[4] == sftp.NAME:
        names += _names(answer)
        share.lose()
    assert sorted(names) == sorted([b".", b"..", *(b"f%d" % number for number in range(250))])


def _names(answer: bytes) -> list[bytes]:
    found, at = [], 13
    for _ in range(struct.unpack_from(">I", answer, 9)[0]):
        size = struct.unpack_from(">I", answer, at)[0]
        found.append(answer[at + 4 : at + 4 + size])
        at += 4 + size
        at += 4 + struct.unpack_from(">I", answer, at)[0] + 4  # the long name, and which attributes follow
        at += 8 + 8 + 4 + 8
    return found
