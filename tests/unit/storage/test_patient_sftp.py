"""A server that dies under an open share: every request gets its one answer, and nothing that was synced is lost."""

from __future__ import annotations

import os
import struct
import subprocess
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

import pytest

from shoal.storage import patient_sftp as sftp
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
        self.session = sftp.Session(self.connect, here_in, here_out)
        self.thread = threading.Thread(target=self.session.run, daemon=True)
        self.thread.start()
        self.incoming = sftp.packets(self.from_session)
        sftp.write_all(self.to_session, sftp.framed(struct.pack(">BI", sftp.INIT, 3)))
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
        sftp.write_all(self.to_session, sftp.framed(struct.pack(">BI", kind, self.number) + rest))
        return self.number

    def ask(self, kind: int, rest: bytes) -> bytes:
        number = self.send(kind, rest)
        answer = next(self.incoming)
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
        answer = self.ask(sftp.READ, sftp.string(handle) + struct.pack(">QI", offset, size))
        return answer[13:]

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
    monkeypatch.setattr(sftp, "PAUSE", 0.01)
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


def test_a_file_that_was_open_is_written_and_read_on_through_many_losses(share: Share, tmp_path: Path) -> None:
    handle = share.open(tmp_path / "x", READ | WRITE | CREATE)
    whole = write_through_losses(share, handle)
    assert share.read(handle, 0, 1000) == whole == (tmp_path / "x").read_bytes()
    assert share.status(sftp.CLOSE, sftp.string(handle)) == sftp.OK
    assert len(share.servers) == 7
    assert not share.session.waiting and not share.session.opened and not share.session.unsynced


def test_what_a_server_forgot_that_lost_its_power_is_written_again_before_it_is_synced(
    share: Share, tmp_path: Path
) -> None:
    handle = share.open(tmp_path / "x", WRITE | CREATE)
    assert share.write(handle, 0, b"on disk\n") == share.sync(handle) == sftp.OK
    assert share.write(handle, 8, b"only in memory\n") == sftp.OK
    share.lose()
    (tmp_path / "x").write_bytes(b"on disk\n")  # as after a power cut
    assert share.sync(handle) == sftp.OK
    assert (tmp_path / "x").read_bytes() == b"on disk\nonly in memory\n"


def test_what_is_kept_to_be_written_again_has_a_limit_and_the_server_syncs_instead(
    share: Share, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sftp, "MOST_UNSYNCED", 100_000)
    share.session.limit = 100_000
    handle = share.open(tmp_path / "x", WRITE | CREATE)
    for block in range(100):
        assert share.write(handle, block * 10_000, b"x" * 10_000) == sftp.OK
    end = time.monotonic() + 60
    while share.session.unsynced > 110_000 and time.monotonic() < end:
        time.sleep(0.05)  # the server syncs while it is written to, and may take its time
    assert share.session.unsynced <= 110_000
    assert share.status(sftp.CLOSE, sftp.string(handle)) == sftp.OK
    assert (tmp_path / "x").stat().st_size == 1_000_000


def test_many_requests_under_way_get_one_answer_each(share: Share, tmp_path: Path) -> None:
    handle = share.open(tmp_path / "x", READ | WRITE | CREATE)
    blocks = range(200)
    sent = set()
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


def test_what_was_done_before_the_loss_and_is_asked_again_has_succeeded(share: Share, tmp_path: Path) -> None:
    """The answer was lost, not the deed. Both ends are taken by hand: only so is it certain which came first."""
    place = sftp.string(os.fsencode(tmp_path / "d"))
    for kind, rest, code in [
        (sftp.MKDIR, place + struct.pack(">I", 0), sftp.FAILURE),
        (sftp.RMDIR, place, sftp.NO_SUCH_FILE),
        (sftp.RENAME, place + place, sftp.NO_SUCH_FILE),
        (sftp.EXTENDED, sftp.string(sftp.RENAMES) + place + place, sftp.NO_SUCH_FILE),
    ]:
        request = sftp.framed(struct.pack(">BI", kind, 9) + rest)
        assert sftp.done_before(request, code)
        assert not sftp.done_before(request, 3)  # permission denied is what it says
    assert not sftp.done_before(sftp.framed(struct.pack(">BI", sftp.MKDIR, 9) + place), sftp.NO_SUCH_FILE)


def test_a_file_that_had_to_be_new_may_be_there_the_second_time() -> None:
    request = sftp.framed(struct.pack(">BI", sftp.OPEN, 1) + sftp.string(b"/x") + struct.pack(">II", 0x2A, 0))
    assert struct.unpack_from(">I", sftp.repeatable(request), 15)[0] == 0x2A & ~EXCLUSIVE
    assert struct.unpack_from(">I", sftp.reopening(sftp.Opened(request, b"")), 6)[0] == WRITE


@pytest.mark.parametrize(("asked", "made"), [(0o644, 0o666), (0o755, 0o777), (0o600, 0o600), (0o640, 0o640)])
def test_what_others_may_read_of_a_share_they_may_write_on_the_server_too(
    tmp_path: Path, asked: int, made: int
) -> None:
    flags = struct.pack(">II", WRITE | CREATE, sftp.MODE | sftp.SIZE) + struct.pack(">QI", 0, asked)
    opening = sftp.framed(struct.pack(">BI", sftp.OPEN, 1) + sftp.string(b"/data/file") + flags)
    assert sftp.for_everybody(opening)[-4:] == struct.pack(">I", made)
    plain = sftp.framed(struct.pack(">BI", sftp.OPEN, 1) + sftp.string(b"/data/file") + struct.pack(">II", READ, 0))
    assert sftp.for_everybody(plain) == plain


def test_the_shares_account_makes_everybodys_files_and_a_user_his_own(share: Share, tmp_path: Path) -> None:
    assert f"{sshfs.ACCOUNT}@" == sftp.EVERYBODYS
    attributes = struct.pack(">II", sftp.MODE, 0o755)
    assert share.status(sftp.MKDIR, sftp.string(str(tmp_path / "own").encode()) + attributes) == sftp.OK
    share.session.everybodys = True
    assert share.status(sftp.MKDIR, sftp.string(str(tmp_path / "all").encode()) + attributes) == sftp.OK
    assert [oct((tmp_path / name).stat().st_mode & 0o777) for name in ("own", "all")] == ["0o755", "0o777"]


def test_what_is_appended_is_there_once_and_in_its_place(share: Share, tmp_path: Path) -> None:
    handle = share.open(tmp_path / "log", WRITE | CREATE | APPEND)
    whole = write_through_losses(share, handle)
    assert (tmp_path / "log").read_bytes() == whole


@pytest.mark.parametrize("kind", [sftp.RENAME, sftp.EXTENDED])
def test_a_file_that_was_renamed_while_it_was_open_goes_on_under_its_new_name(
    share: Share, tmp_path: Path, kind: int
) -> None:
    handle = share.open(tmp_path / "new", WRITE | CREATE)
    assert share.write(handle, 0, b"one\n") == sftp.OK
    names = sftp.string(os.fsencode(tmp_path / "new")) + sftp.string(os.fsencode(tmp_path / "whole"))
    assert share.status(kind, (sftp.string(sftp.RENAMES) if kind == sftp.EXTENDED else b"") + names) == sftp.OK
    (tmp_path / "new").write_text("somebody else's")
    share.lose()
    assert share.write(handle, 4, b"two\n") == share.sync(handle) == sftp.OK
    assert (tmp_path / "whole").read_text() == "one\ntwo\n"
    assert (tmp_path / "new").read_text() == "somebody else's"


def test_a_file_that_somebody_removed_meanwhile_is_an_error_and_no_wait(share: Share, tmp_path: Path) -> None:
    handle = share.open(tmp_path / "x", WRITE | CREATE)
    other = share.open(tmp_path / "y", WRITE | CREATE)
    assert share.write(handle, 0, b"kept to be written again") == sftp.OK
    share.lose()
    (tmp_path / "x").unlink()
    assert share.write(handle, 0, b"lost") == sftp.FAILURE
    assert share.write(other, 0, b"kept") == share.sync(other) == sftp.OK
    session = share.session
    assert not session.unsynced and not session.sent and not session.repeated


def test_sshfs_is_told_nothing_of_what_it_did_not_ask(share: Share, tmp_path: Path) -> None:
    """A sync of our own, for a file that sshfs has closed meanwhile."""
    own = struct.pack(">BI", sftp.EXTENDED, sftp.OURS + 1) + sftp.string(sftp.FSYNC) + sftp.string(b"gone")
    handle = share.open(tmp_path / "x", WRITE | CREATE)
    for _ in range(20):
        share.session._ask(sftp.framed(own))
    while share.session.waiting:
        time.sleep(0.01)
    assert share.sync(handle) == sftp.OK  # the first answer that comes is the one to this


def test_a_directory_is_listed_once_although_the_server_went_while_it_was_read(share: Share, tmp_path: Path) -> None:
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
