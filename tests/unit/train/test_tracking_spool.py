"""Records on disk survive whatever happens to the process or the disk."""

import json
import logging
import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from shoal.train.tracking.spool import BUFFER_BYTES, Spool, read_position, read_spool, read_tail, write_position


def steps(path: Path) -> list[int]:
    return [record["step"] for _, record in read_spool(path, size=1 << 30) if record]


def test_record_is_in_the_file_when_append_returns(tmp_path: Path) -> None:
    spool = Spool(tmp_path / "s")
    spool.append({"step": 1, "name": "größe\n"})
    assert (tmp_path / "s").read_text() == '{"step":1,"name":"größe\\n"}\n'
    spool.close()


def test_truncated_last_line_is_skipped_and_the_next_start_appends(tmp_path: Path) -> None:
    path = tmp_path / "s"
    path.write_bytes(b'{"step":1}\n{"step":2,"x\r')
    assert steps(path) == [1]
    spool = Spool(path)
    spool.append({"step": 3})
    spool.close()
    assert steps(path) == [1, 3] and json.loads(path.read_bytes().split(b"\n")[-2]) == {"step": 3}


def test_unfinished_line_is_read_once_complete(tmp_path: Path) -> None:
    path = tmp_path / "s"
    path.write_bytes(b'{"step":1}\n{"step"')
    ((end, record),) = read_spool(path)
    assert record == {"step": 1}
    with path.open("ab") as file:
        file.write(b":2}\n")
    assert [record for _, record in read_spool(path, end)] == [{"step": 2}]


def test_line_longer_than_the_read_size_is_read_whole(tmp_path: Path) -> None:
    path = tmp_path / "s"
    path.write_text(json.dumps({"step": 1, "x": "y" * 5000}) + "\n")
    assert [record["step"] for _, record in read_spool(path, size=100) if record] == [1]


def test_process_killed_at_any_time_keeps_every_acknowledged_record(tmp_path: Path) -> None:
    program = (
        "import sys; from pathlib import Path; from shoal.train.tracking.spool import Spool\n"
        "spool = Spool(Path(sys.argv[1])); n = int(sys.argv[2])\n"
        "while True:\n"
        "    spool.append({'step': n}); sys.stdout.write(f'{n}\\n'); sys.stdout.flush(); n += 1\n"
    )
    path, expected = tmp_path / "s", 0
    for kill in (1, 40, 333):
        process = subprocess.Popen([sys.executable, "-c", program, str(path), str(expected)], stdout=subprocess.PIPE)
        for _ in range(kill):
            process.stdout.readline()
        process.send_signal(signal.SIGKILL)
        said = process.stdout.read().split()
        process.stdout.close()
        process.wait()
        told, found = expected + kill + len(said), steps(path)
        # The record whose number was not printed yet may be there or not; all others are, once.
        assert found in (list(range(told)), list(range(told + 1)))
        expected = len(found)


def test_disk_full_within_a_line_loses_nothing_once_space_is_free(tmp_path: Path) -> None:
    program = (
        "import resource, sys; from pathlib import Path; from shoal.train.tracking.spool import Spool\n"
        "spool = Spool(Path(sys.argv[1]))\n"
        "resource.setrlimit(resource.RLIMIT_FSIZE, (105, resource.RLIM_INFINITY))\n"
        "for n in range(20): spool.append({'step': n})\n"
        "resource.setrlimit(resource.RLIMIT_FSIZE, (resource.RLIM_INFINITY, resource.RLIM_INFINITY))\n"
        "spool.append({'step': 20}); spool.close()\n"
    )
    done = subprocess.run([sys.executable, "-c", program, str(tmp_path / "s")], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert steps(tmp_path / "s") == list(range(21)) and ": File too large" in done.stderr


@pytest.mark.skipif(not os.path.exists("/dev/full"), reason="needs /dev/full")
def test_full_disk_is_logged_once_and_raises_nothing(caplog: pytest.LogCaptureFixture) -> None:
    spool = Spool(Path("/dev/full"))
    with caplog.at_level(logging.ERROR):
        for _ in range(3):
            spool.append({"step": 1})
    assert [record.getMessage() for record in caplog.records] == [
        "tracking: cannot write /dev/full: No space left on device; 11 bytes are in memory, 0 records are lost"
    ]
    for _ in range(3):
        spool.append({"x": "y" * (BUFFER_BYTES // 2)})
    assert len(spool._buffer) <= BUFFER_BYTES and spool._lost == 2


def test_tail_starts_at_a_whole_record(tmp_path: Path) -> None:
    path = tmp_path / "s"
    path.write_text("".join(json.dumps({"step": n}) + "\n" for n in range(100)))
    assert [record["step"] for record in read_tail(path, 40)] == [97, 98, 99]
    assert len(read_tail(path, 1 << 20)) == 100 and read_tail(tmp_path / "none", 10) == []


def test_delivery_position_is_valid_only_for_its_run_and_spool_length(tmp_path: Path) -> None:
    path = tmp_path / "s"
    path.write_bytes(b"{}\n" * 10)
    assert read_position(path, "a") == 0
    write_position(path, "a", 12)
    assert read_position(path, "a") == 12 and read_position(path, "b") == 0
    path.write_bytes(b"{}\n")
    assert read_position(path, "a") == 0
    (tmp_path / "s.sent").write_bytes(b"")
    assert read_position(path, "a") == 0 and sorted(p.name for p in tmp_path.iterdir()) == ["s", "s.sent"]
