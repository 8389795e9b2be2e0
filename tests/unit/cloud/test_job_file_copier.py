"""The files of jobs in rented containers are copied there and back. A directory stands for the container."""

import asyncio
import os
import platform
import sys
import tarfile
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager, suppress
from pathlib import Path

import pytest
from tests.support.cases import cases

from shoal.cloud.service import job_file_copier
from shoal.cloud.service.job_file_copier import ContainerJob, JobFileCopier, JobNote, parse_jobs, parse_note
from shoal.hosts.api import Result, Target
from shoal.jobs import staging
from shoal.jobs.record import JobComment
from shoal.remote.environment_builder import MARK
from shoal_simulators.fake_host import Call, FakeHost

pytestmark = pytest.mark.skipif(os.geteuid() != 0, reason="only root acts as a job's user")

LIMIT = 60.0
SHELL = "import os, sys; os.execvp('sh', ['sh', '-c', sys.argv[3].replace(sys.argv[1], sys.argv[2])])"
ROOT = "/var/lib/shoal/jobs/reef"


def line(number: str = "7", *, id: str = "", state: str = "RUNNING", start: str = "t0", node: str = "pods1") -> str:
    return f"{number} {id or number} {state} {os.getuid()} {os.getgid()} {start} {node}\n"


def test_jobs_and_array_tasks_in_containers_are_parsed() -> None:
    text = line() + line("9", id="8_3", state="COMPLETING") + line("10", node="gpu1") + line("11", node="pods[1-2]")
    who = (os.getuid(), os.getgid(), "t0", "pods1")
    assert parse_jobs(text, {"pods1", "pods2"}) == [
        ContainerJob("7", "7", "RUNNING", *who),
        ContainerJob("9", "8_3", "COMPLETING", *who),
    ]


@cases(
    "said, note",
    (f"{ROOT}\x1fshoal:c0de/11b@e44\n", JobComment("c0de", "11b", "", "e44")),
    (f"{ROOT}\x1fmine\n", None),
    (f"{ROOT}\x1f(null)\n", None),
    ("/etc\x1fshoal:c0de/11b\n", None),
    (2 * f"{ROOT}\x1fshoal:c0de/11b\n", JobComment("c0de", "11b")),
    ("", None),
)
def test_only_jobs_of_shoal_run_in_the_jobs_directory_have_a_note(said: str, note: JobComment | None) -> None:
    assert parse_note(said, (ROOT, "/jobs/alice")) == (JobNote(ROOT, note) if note else None)


def test_job_of_a_user_is_in_the_directory_of_that_user() -> None:
    said = "/jobs/alice\x1fshoal:c0de/11b\n"
    assert parse_note(said, (ROOT, "/jobs/alice")) == JobNote("/jobs/alice", JobComment("c0de", "11b"))
    assert parse_note(said, (ROOT, "/jobs/bob")) is None


def test_ssh_uses_the_rental_key_and_no_secret_is_an_argument() -> None:
    assert job_file_copier.ssh("pods1")[:5] == [
        "ssh",
        "-F",
        "/etc/shoal/tunnels/pods1.conf",
        "-i",
        "/etc/shoal/elastic/id_ed25519",
    ]


class Scene:
    """A controller and a container, which are two directories; and a Slurm with scripted answers."""

    def __init__(self, place: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        self.controller, self.container, self.marks = place / "controller", place / "container", place / "marks"
        self.queue, self.comment, self.asked, self.cut = "", "", 0, False
        self.present = {"pods1"}
        monkeypatch.setattr(staging, "MARKS", str(self.marks))
        monkeypatch.setattr(job_file_copier, "SCAN_INTERVAL_S", 0.05)
        monkeypatch.setattr(job_file_copier, "RETRY_PAUSE_S", 0.2)
        for path in ("code/c0de.tar", "lib/11b/start.py"):
            self.write(self.controller / path, path)
        self.container.mkdir()
        self.slurm = FakeHost(Target("controller"), {("squeue",): self._squeue})
        self.copier = JobFileCopier(
            "reef",
            {"pods1", "pods2"},
            lambda: self.present,
            self.slurm,
            {str(place / "environments")},
            root=str(self.controller),
            reach=self._reach,
        )

    def _squeue(self, call: Call) -> bytes | Result:
        if "-j" in call.argv:
            return f"{self.controller}\x1f{self.comment}\n".encode()
        self.asked += 1
        return self.queue.encode()

    def _reach(self, node: str) -> list[str]:
        """A shell, in which the jobs' directory of the controller is that of the container."""
        if self.cut:
            return ["sh", "-c", "echo cut off >&2; exit 255", "sh"]
        return [sys.executable, "-c", SHELL, str(self.controller), str(self.container)]

    @staticmethod
    def write(path: Path, text: str) -> None:
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)

    def start(self, start: str = "t0", comment: str = "shoal:c0de/11b") -> None:
        """Slurm starts the batch script in the container."""
        self.write(self.container / "7/submission", "first")
        self.queue, self.comment = line(start=start), comment

    @asynccontextmanager
    async def running(self) -> AsyncIterator[None]:
        task = asyncio.create_task(self.copier.run())
        try:
            async with asyncio.timeout(LIMIT):
                yield
        finally:
            task.cancel()
            with suppress(asyncio.CancelledError):
                await task


async def until(condition: Callable[[], bool]) -> None:
    while not condition():  # noqa: ASYNC110 what other processes do
        await asyncio.sleep(0.05)


@pytest.fixture
def scene(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Scene:
    return Scene(tmp_path, monkeypatch)


async def test_job_gets_its_bundle_and_its_files_are_fetched_before_the_end(scene: Scene) -> None:
    scene.start()
    async with scene.running():
        await until((scene.container / "7/sent/.ready").exists)
        assert (scene.container / "7/sent/code/c0de.tar").read_text() == "code/c0de.tar"
        scene.write(scene.container / "7/rank-0.0.log", "1.0 hello\n")
        here = scene.controller / "7/rank-0.0.log"
        await until(lambda: here.exists() and here.read_text() == "1.0 hello\n")
        assert (scene.marks / "7").exists()
        scene.write(scene.container / "7/rank-0.0.end", "{}")
        (scene.marks / "7.over").touch()  # the Epilog
        await until(lambda: not (scene.marks / "7").exists())
        assert (scene.controller / "7/rank-0.0.end").read_text() == "{}"
        assert not (scene.container / "7").exists()
        asked = scene.asked
        await until(lambda: scene.asked > asked + 2)  # Slurm still shows it: it is not started again
        assert not (scene.marks / "7").exists()


async def test_requeued_job_gets_its_earlier_files(scene: Scene) -> None:
    scene.start()
    async with scene.running():
        await until((scene.container / "7/sent/.ready").exists)
        scene.write(scene.container / "7/checkpoints/step-1/x", "1")
        (scene.marks / "7.over").touch()
        await until(lambda: not (scene.marks / "7").exists())
        scene.start(start="t1")
        await until((scene.container / "7/sent/.ready").exists)
        assert (scene.container / "7/checkpoints/step-1/x").read_text() == "1"


async def test_lost_connection_is_retried(scene: Scene, caplog: pytest.LogCaptureFixture) -> None:
    scene.cut = True
    scene.start()
    async with scene.running():
        await until(lambda: "cannot copy its files: cut off; trying again" in caplog.text)
        scene.cut = False
        await until((scene.container / "7/sent/.ready").exists)


async def test_files_of_an_unlisted_job_are_fetched(scene: Scene) -> None:
    scene.start()
    async with scene.running():
        await until((scene.container / "7/sent/.ready").exists)
        scene.write(scene.container / "7/rank-0.0.log", "1.0 late\n")
        scene.queue = ""
        await until(lambda: not (scene.container / "7").exists())
        assert (scene.controller / "7/rank-0.0.log").read_text() == "1.0 late\n"


async def test_job_with_unsendable_files_ends_with_the_cause(scene: Scene) -> None:
    (scene.controller / "code/c0de.tar").unlink()
    scene.write(scene.controller / "7/submission", "of another job")
    scene.write(scene.controller / "7.before-first/submission", "in the way")
    scene.start()
    async with scene.running():
        await until((scene.container / "7/sent/.failed").exists)
        assert (scene.container / "7/sent/.failed").read_text().endswith("/7: Directory not empty\n")


async def test_copying_stops_when_the_container_disappears(scene: Scene, caplog: pytest.LogCaptureFixture) -> None:
    scene.cut = True
    scene.start()
    async with scene.running():
        await until(lambda: "trying again" in caplog.text)
        scene.present, scene.queue = set(), ""
        await until(lambda: "job 7: pods1 is gone; files not fetched yet are lost" in caplog.text)


async def test_job_not_submitted_by_shoal_run_is_ignored(scene: Scene) -> None:
    scene.start(comment="mine")
    async with scene.running():
        await until(lambda: scene.asked > 3)
    assert not scene.marks.exists() and not (scene.container / "7/sent").exists()


async def test_slurm_is_not_queried_without_containers(scene: Scene) -> None:
    scene.present = set()
    await scene.copier.scan()
    assert scene.asked == 0


PYTHON = Path(sys.executable).resolve()
"""The Python itself, not that of a virtual environment."""


class Environment:
    """One that every node has for itself, as it was packed on the controller."""

    def __init__(self, place: Path, monkeypatch: pytest.MonkeyPatch, python: Path, version: str) -> None:
        self.local = place / "local"
        monkeypatch.setattr(job_file_copier, "LOCAL_DIRECTORY", str(self.local))
        (place / "e44/bin").mkdir(parents=True)
        (place / "e44" / MARK).touch()
        (place / "e44/bin/python").symlink_to(python)
        (place / "e44/pyvenv.cfg").write_text(f"home = {python.parent}\nversion = {version}\n")
        archives = place / "environments/archives"
        archives.mkdir(parents=True)
        with tarfile.open(archives / "e44.tar", "w") as archive:
            archive.add(place / "e44", "e44")


@cases("mode, copied", (0o755, True), (0o1777, False), ids=["root's directory", "one that others can write"])
async def test_environment_of_a_directory_of_root_is_copied_before_the_job_starts(
    scene: Scene, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, mode: int, copied: bool
) -> None:
    environment = Environment(tmp_path, monkeypatch, PYTHON, platform.python_version())
    (tmp_path / "environments").chmod(mode)
    scene.start(comment="shoal:c0de/11b@e44")
    async with scene.running():
        await until((scene.container / "7/sent/.ready").exists)
    assert (environment.local / "e44/bin/python").exists() is environment.local.exists() is copied


async def test_job_with_an_unusable_environment_ends_with_the_cause(
    scene: Scene, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    Environment(tmp_path, monkeypatch, Path("/opt/gone/bin/python3.1"), "3.1.0")
    scene.start(comment="shoal:c0de/11b@e44")
    async with scene.running():
        await until((scene.container / "7/sent/.failed").exists)
    assert (scene.container / "7/sent/.failed").read_text() == (
        "environment e44 does not run on pods1: its Python is not installed there\n"
    )
    assert not (scene.container / "7/sent/.ready").exists()
