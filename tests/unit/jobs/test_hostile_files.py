"""What a user may put where a job's log or progress is expected, and root reads: nothing but their own files comes."""

import hashlib
import json
import os
import resource
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Sequence
from pathlib import Path

import pytest
from tests.support.cases import cases

from shoal.remote import log_reader
from shoal.remote.runner.node import verified_archive

as_root = pytest.mark.skipif(os.geteuid() != 0, reason="only root can become another user")
ALICE = 65533
"""A uid without a name. It owns the files of the test."""
MEMORY_BYTES = 512 << 20


def read(
    *words: str | Path, memory: int = MEMORY_BYTES, before: Sequence[str] = (), stdin: bytes = b""
) -> subprocess.CompletedProcess[bytes]:
    """Run the reader as root does, with little memory. A file that blocks it fails the test."""

    def limit() -> None:
        resource.setrlimit(resource.RLIMIT_AS, (memory, memory))

    line = [*before, sys.executable, "-I", "-S", log_reader.__file__, *map(str, words)]
    return subprocess.run(line, capture_output=True, input=stdin, timeout=60, preexec_fn=limit)


def logs(job: Path, output: str | Path = "", owner: str = "") -> bytes:
    return read("logs", owner, job, output or f"{job}.out", output or f"{job}.out", "0").stdout


@pytest.fixture
def place() -> Iterator[Path]:
    """Not below pytest's own directory, which root alone may enter."""
    with tempfile.TemporaryDirectory() as name:
        Path(name).chmod(0o755)
        yield Path(name)


@pytest.fixture
def job(place: Path) -> Path:
    made = place / "17"
    made.mkdir()
    (made / "rank-0.0.log").write_text("1.0 mine\n")
    for path in (made, made / "rank-0.0.log"):
        os.chown(path, ALICE, ALICE) if os.geteuid() == 0 else None
    return made


@as_root
def test_output_path_shows_no_file_that_its_owner_cannot_read(job: Path, place: Path) -> None:
    secret = place / "shadow"
    secret.write_text("root:secret\n")
    secret.chmod(0o600)
    for owner in (str(ALICE), ""):
        shown = logs(job, secret, owner)
        assert b"secret" not in shown and b"1.0 mine" in shown


@as_root
def test_logs_of_a_user_who_is_not_on_the_host_stay_closed(job: Path) -> None:
    assert logs(job, owner="nobody-here") == b""


SQUASHED = ("setpriv", "--bounding-set=-dac_override,-dac_read_search", "--inh-caps=-all")
"""Root that may read no more than others may, as on a share that takes root for nobody."""


@as_root
@cases("owner", str(ALICE), "", ids=["known", "found"])
def test_files_on_a_share_that_squashes_root_are_read_as_their_owner(job: Path, place: Path, owner: str) -> None:
    """A job that Slurm has forgotten has no known owner."""
    os.chown(place, ALICE, ALICE)
    place.chmod(0o700)
    closed = job / "roots"
    closed.mkdir(mode=0o700)
    (closed / "file").touch()
    (job / "shadow").touch(mode=0o600)
    assert b"1.0 mine" in read("logs", owner, job, "", "", "0", before=SQUASHED).stdout
    lines = read("files", owner, job, "", before=SQUASHED, stdin=b"{}\n").stdout.splitlines()
    messages = [json.loads(line) for line in lines if line.startswith(b"{")]
    assert {"sent": "rank-0.0.log"} in messages
    skipped = {message["name"]: message["skipped"] for message in messages if "skipped" in message}
    assert skipped == {"roots": "closed to the job's user", "shadow": "it cannot be read"}


@as_root
def test_directory_that_is_closed_to_the_jobs_user_is_not_taken_for_missing(job: Path, place: Path) -> None:
    place.chmod(0o700)
    assert json.loads(read("files", str(ALICE), job, "").stdout)["closed"] is True
    assert json.loads(read("files", str(ALICE), "/none/17", "").stdout)["closed"] is False
    assert b"there is no user alice-of-nowhere on" in read("files", "alice-of-nowhere", job, "").stderr


def test_symbolic_links_are_not_followed(job: Path, place: Path) -> None:
    (place / "other").write_text("secret\n")
    (job / "rank-1.0.log").symlink_to(place / "other")
    (place / "17.out").symlink_to(place / "other")
    (job / "progress.json").symlink_to(place / "other")
    assert b"secret" not in logs(job) and read("progress", "", job, "progress.json").stdout == b""


@cases("kind", "fifo", "device")
def test_pipe_or_device_does_not_block_the_reader(job: Path, kind: str, place: Path) -> None:
    if kind == "fifo":
        paths = [job / "rank-1.0.log", job / "progress.json", place / "17.out"]
        for path in paths:
            os.mkfifo(path)
        output = paths[-1]
    else:
        output = Path("/dev/zero")
    assert logs(job, output) == b"rank-0.0.log\t1.0 mine\n"
    progress = job / "progress.json" if kind == "fifo" else output
    assert read("progress", "", progress.parent, progress.name).stdout == b""


def test_sparse_log_takes_little_memory_and_shows_its_end(job: Path) -> None:
    with open(job / "rank-1.0.log", "wb") as file:
        file.truncate(4 << 30)
        file.seek(0, os.SEEK_END)
        file.write(b"\n2.0 the end\n")
    shown = logs(job)
    assert len(shown) < log_reader.MAX_READ_BYTES + (1 << 20)
    assert shown.rstrip(b"\n").rpartition(b"\nrank-1.0.log\t")[2] == b"2.0 the end"
    assert b"1.0 mine" in shown and b"bytes of" in shown and b"are left out" in shown


def test_progress_is_bounded(job: Path) -> None:
    with open(job / "progress.json", "wb") as file:
        file.truncate(1 << 30)
    assert len(read("progress", "", job, "progress.json").stdout) == log_reader.MAX_PROGRESS_BYTES + 1
    (job / "progress.json").write_text(json.dumps({"step": 3}))
    assert json.loads(read("progress", "", job, "progress.json").stdout) == {"step": 3}


def test_many_large_logs_share_the_limit_and_small_ones_are_whole() -> None:
    assert log_reader.divide(100 << 20, [1 << 20, 400 << 20, 400 << 20]) == [1 << 20, 99 << 19, 99 << 19]
    assert log_reader.divide(10, [0]) == [log_reader.MIN_READ_BYTES]


def test_code_that_was_changed_does_not_run(tmp_path: Path) -> None:
    archive = tmp_path / "c0de.tar"
    archive.write_bytes(b"mine")
    digest = hashlib.sha256(b"mine").hexdigest()[:20]
    assert verified_archive(str(archive), digest) == b"mine"
    archive.write_bytes(b"theirs")
    with pytest.raises(OSError, match="this is not the code that was sent"):
        verified_archive(str(archive), digest)
