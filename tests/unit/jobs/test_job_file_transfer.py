"""The transfer of a job's files between controller and rented container: both ends for real, joined by pipes."""

import asyncio
import json
import os
import shutil
import struct
import subprocess
import sys
import threading
from pathlib import Path

import pytest
from tests.support.cases import cases
from tests.support.waiting import wait_for

from shoal.cloud.service.processes import ProcessResult, run_connected
from shoal.remote import job_file_transfer
from shoal.remote.job_file_transfer import EXIT_WITH_CAUSE
from shoal.remote.log_reader import SENT_TIME

LIMIT = 60.0


class Ends:
    """The jobs' directories of a controller and of a container, with one job of one submission."""

    def __init__(self, place: Path) -> None:
        self.controller, self.container, self.over = place / "controller", place / "container", place / "over"
        for path, text in {"code/c0de.tar": "tar", "lib/11b/start.py": "start", "lib/11b/shoal/x.py": "x"}.items():
            self.write(self.controller / path, text)
        self.begin("first")

    def begin(self, submission: str) -> None:
        """A container without anything, in which the batch script has begun."""
        shutil.rmtree(self.container, ignore_errors=True)
        self.write(self.container / "7/submission", submission)
        self.write(self.container / "7.out", "")
        self.over.unlink(missing_ok=True)

    def send(self) -> tuple[ProcessResult, ProcessResult]:
        there = ("take", "there", str(self.container), "7")
        return run(("send", "there", str(self.controller), "7", "c0de", "11b"), there)

    def fetch(self) -> tuple[ProcessResult, ProcessResult]:
        """All that there is, for a job that is over."""
        self.over.touch()
        return self.follow()

    def follow(self) -> tuple[ProcessResult, ProcessResult]:
        back = ("send", "back", str(self.container), "7", str(self.over))
        return run(back, ("take", "back", str(self.controller), "7"))

    @staticmethod
    def write(path: Path, text: str) -> None:
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)


def line(*words: str) -> list[str]:
    return [sys.executable, "-I", "-S", job_file_transfer.__file__, *words]


def run(sender: tuple[str, ...], taker: tuple[str, ...]) -> tuple[ProcessResult, ProcessResult]:
    return asyncio.run(run_connected(line(*sender), line(*taker)))


def files(directory: Path) -> dict[str, str]:
    return {
        path.relative_to(directory).as_posix(): path.read_text()
        for path in sorted(directory.rglob("*"))
        if path.is_file() and not path.is_symlink()
    }


@pytest.fixture
def ends(tmp_path: Path) -> Ends:
    return Ends(tmp_path)


WELL = (ProcessResult(0), ProcessResult(0))


def test_ready_file_is_written_after_the_bundle(ends: Ends) -> None:
    assert ends.send() == WELL
    assert files(ends.container / "7/sent") == {
        ".ready": "",
        "code/c0de.tar": "tar",
        "lib/11b/start.py": "start",
        "lib/11b/shoal/x.py": "x",
    }


def test_job_files_are_fetched_without_local_files(ends: Ends) -> None:
    ends.send()
    job = ends.container / "7"
    kept = ("checkpoints/step-1/x", "rank-0.0.end", "rank-0.0.log", "tree/model.pt")
    for path in (*kept, "checkpoints/step-2.tmp-9f/x", "tree/train.py", "tree.lock", "pids.pods1/12", "tree.a.3/half"):
        ends.write(job / path, path)
    os.utime(job / "tree/train.py", (SENT_TIME, SENT_TIME))
    ends.write(ends.container / "7.out", "srun: error\n")
    assert ends.fetch() == WELL
    assert files(ends.controller / "7") == {"submission": "first", **{path: path for path in kept}}
    assert (ends.controller / "7.out").read_text() == "srun: error\n"


def test_files_are_fetched_while_the_job_runs(ends: Ends) -> None:
    log = ends.container / "7/rank-0.0.log"
    ends.write(log, "1.0 one\n")
    done: list[tuple[ProcessResult, ProcessResult]] = []
    following = threading.Thread(target=lambda: done.append(ends.follow()))
    following.start()
    here = ends.controller / "7/rank-0.0.log"
    wait_for(lambda: here.exists() and here.read_text() == "1.0 one\n")
    with log.open("a") as file:
        file.write("2.0 two\n")
    ends.write(ends.container / "7/progress.json", '{"step": 1}')
    wait_for(lambda: here.read_text() == "1.0 one\n2.0 two\n" and (ends.controller / "7/progress.json").exists())
    ends.over.touch()
    following.join(LIMIT)
    assert done == [WELL]


def test_deleted_checkpoints_are_deleted_here_except_the_last(ends: Ends) -> None:
    checkpoints = ends.container / "7/checkpoints"
    ends.write(checkpoints / "step-1/x", "1")
    ends.fetch()
    ends.write(checkpoints / "step-2/x", "2")
    shutil.rmtree(checkpoints / "step-1")
    ends.fetch()
    assert files(ends.controller / "7/checkpoints") == {"step-2/x": "2"}
    shutil.rmtree(checkpoints / "step-2")
    ends.fetch()
    assert files(ends.controller / "7/checkpoints") == {"step-2/x": "2"}


def test_next_container_gets_the_files_of_the_first(ends: Ends) -> None:
    ends.send()
    for path in ("checkpoints/step-1/x", "tracking/metrics.jsonl", "rank-0.0.log"):
        ends.write(ends.container / "7" / path, path)
    ends.write(ends.container / "7.out", "turn 0\n")
    ends.fetch()
    ends.begin("first")
    assert ends.send() == WELL
    there = files(ends.container / "7")
    assert there["checkpoints/step-1/x"] and there["tracking/metrics.jsonl"] and "rank-0.0.log" not in there
    with (ends.container / "7.out").open("a") as output:  # as slurmstepd has it open
        output.write("turn 1\n")
    ends.write(ends.container / "7/rank-0.1.log", "second")
    ends.fetch()
    assert (ends.controller / "7.out").read_text() == "turn 0\nturn 1\n"
    assert {"rank-0.0.log", "rank-0.1.log"} <= files(ends.controller / "7").keys()


def test_restarted_service_does_not_overwrite_files_of_a_running_job(ends: Ends) -> None:
    ends.send()
    ends.write(ends.controller / "7/progress.json", "old")
    ends.write(ends.container / "7/progress.json", "new")
    assert ends.send() == WELL and (ends.container / "7/progress.json").read_text() == "new"


def test_files_of_an_earlier_job_with_the_same_id_are_moved_aside(ends: Ends) -> None:
    ends.write(ends.controller / "7/submission", "of last year")
    ends.write(ends.controller / "7/checkpoints/step-9/x", "not ours")
    ends.write(ends.controller / "7.out", "not ours")
    assert ends.send() == WELL and "checkpoints/step-9/x" not in files(ends.container / "7")
    assert files(ends.controller / "7.before-first")["checkpoints/step-9/x"] == "not ours"
    assert (ends.controller / "7.out.before-first").read_text() == "not ours"


def test_nothing_is_moved_aside_if_the_container_does_not_answer(ends: Ends) -> None:
    ends.fetch()
    sender, taker = asyncio.run(
        run_connected(line("send", "there", str(ends.controller), "7", "c0de", "11b"), ["sh", "-c", "exit 255"])
    )
    assert (sender.status, taker.status) == (1, 255) and files(ends.controller / "7") == {"submission": "first"}


def test_interrupted_stream_fails_without_a_partial_file(ends: Ends) -> None:
    whole = json.dumps({"name": "7/x", "mode": 0o644, "time": 0}).encode() + b"\n" + struct.pack("!I", 4) + b"abcd"
    for stream in (whole, b""):
        taker = line("take", "back", str(ends.controller), "7")
        assert subprocess.run(taker, input=stream, capture_output=True, timeout=LIMIT).returncode == 1
    assert "x" not in files(ends.controller / "7")


@cases("name", "../etc/passwd", "/etc/passwd", "8/checkpoints/step-1/x", "7/../8/x", "7", "8.out", "code/c0de.tar")
def test_container_can_write_only_the_files_of_its_job(ends: Ends, name: str) -> None:
    before = files(ends.controller.parent)
    done = took(ends, {"name": name, "mode": 0o644, "time": 0})
    assert done.returncode == EXIT_WITH_CAUSE
    assert done.stderr.decode() == f"{name}: received a file that is not the job's\n"
    assert files(ends.controller.parent) == before


def test_controller_follows_no_links_of_a_container(ends: Ends, tmp_path: Path) -> None:
    (tmp_path / "home").mkdir()
    for link in (str(tmp_path / "home"), "../../home"):
        took(ends, {"name": "7/away", "link": link})
        assert not os.path.lexists(ends.controller / "7/away")
    (ends.controller / "7").mkdir(exist_ok=True)
    (ends.controller / "7/away").symlink_to(tmp_path / "home")
    assert took(ends, {"name": "7/away/authorized_keys", "mode": 0o644, "time": 0}).returncode == EXIT_WITH_CAUSE
    assert list((tmp_path / "home").iterdir()) == []


def test_container_can_delete_only_checkpoints(ends: Ends) -> None:
    ends.write(ends.controller / "7/results/x", "kept")
    ends.write(ends.controller / "7/checkpoints/step-1/x", "1")
    for path in ("7/results", "7/checkpoints"):
        assert took(ends, {"delete": path}, {"end": True}).returncode == 0
    assert {"results/x", "checkpoints/step-1/x"} <= files(ends.controller / "7").keys()


def took(ends: Ends, *headers: object) -> subprocess.CompletedProcess[bytes]:
    """The controller's end, with these lines from an untrusted container."""
    stream = b"".join(json.dumps(header).encode() + b"\n" for header in headers)
    taker = line("take", "back", str(ends.controller), "7")
    return subprocess.run(taker, input=stream, capture_output=True, timeout=LIMIT)


def test_links_inside_the_job_are_fetched_as_links(ends: Ends) -> None:
    ends.write(ends.container / "7/checkpoints/step-1/x", "1")
    (ends.container / "7/newest").symlink_to("checkpoints/step-1")
    ends.fetch()
    assert os.readlink(ends.controller / "7/newest") == "checkpoints/step-1"
