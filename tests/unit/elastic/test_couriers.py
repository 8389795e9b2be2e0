"""Jobs of `shoal run` in rented containers, with a directory in place of a container: their files go and come back."""

from __future__ import annotations

import asyncio
import os
import platform
import sys
import tarfile
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager, suppress
from pathlib import Path

import pytest

from shoal.elastic import couriers
from shoal.elastic.couriers import Couriers, Turn, note_of, turns
from shoal.environments.builder import MARK
from shoal.hosts.api import Result, Target
from shoal.hosts.fake import Call, FakeHost
from shoal.jobs import staging
from shoal.jobs.model import Note

pytestmark = pytest.mark.skipif(os.geteuid() != 0, reason="only root acts as a job's user")

LIMIT = 60.0
SHELL = "import os, sys; os.execvp('sh', ['sh', '-c', sys.argv[3].replace(sys.argv[1], sys.argv[2])])"
ROOT = "/var/lib/shoal/jobs/reef"


def line(number: str = "7", *, id: str = "", state: str = "RUNNING", start: str = "t0", node: str = "pods1") -> str:
    return f"{number} {id or number} {state} {os.getuid()} {os.getgid()} {start} {node}\n"


def test_jobs_in_containers_are_found_and_tasks_of_an_array_each_for_itself() -> None:
    text = line() + line("9", id="8_3", state="COMPLETING") + line("10", node="gpu1") + line("11", node="pods[1-2]")
    who = (os.getuid(), os.getgid(), "t0", "pods1")
    assert turns(text, {"pods1", "pods2"}) == [Turn("7", "7", "RUNNING", *who), Turn("9", "8_3", "COMPLETING", *who)]


@pytest.mark.parametrize(
    ("said", "note"),
    [
        (f"{ROOT}\x1fshoal:c0de/11b@e44\n", Note("c0de", "11b", "", "e44")),
        (f"{ROOT}\x1fmine\n", None),
        (f"{ROOT}\x1f(null)\n", None),
        ("/etc\x1fshoal:c0de/11b\n", None),
        (2 * f"{ROOT}\x1fshoal:c0de/11b\n", Note("c0de", "11b")),
        ("", None),
    ],
)
def test_only_jobs_of_shoal_run_in_their_usual_place_are_carried(said: str, note: Note | None) -> None:
    assert note_of(said, ROOT) == note


def test_a_container_is_reached_with_the_key_that_rented_it_and_no_secret_is_an_argument() -> None:
    assert couriers.ssh("pods1")[:5] == [
        "ssh",
        "-F",
        "/etc/shoal/tunnels/pods1.conf",
        "-i",
        "/etc/shoal/elastic/id_ed25519",
    ]


class World:
    """A controller and a container, which are two directories; and a Slurm that says what it is told to say."""

    def __init__(self, place: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        self.controller, self.container, self.marks = place / "controller", place / "container", place / "marks"
        self.queue, self.comment, self.asked, self.cut = "", "", 0, False
        self.present = {"pods1"}
        monkeypatch.setattr(staging, "MARKS", str(self.marks))
        monkeypatch.setattr(couriers, "LOOK_SECONDS", 0.05)
        monkeypatch.setattr(couriers, "AGAIN_SECONDS", 0.2)
        for path in ("code/c0de.tar", "lib/11b/start.py"):
            self.write(self.controller / path, path)
        self.container.mkdir()
        self.slurm = FakeHost(Target("controller"), {("squeue",): self._squeue})
        self.couriers = Couriers(
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
        task = asyncio.create_task(self.couriers.run())
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
def world(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> World:
    return World(tmp_path, monkeypatch)


async def test_a_job_gets_its_code_and_all_it_wrote_is_here_before_its_end_is_known(world: World) -> None:
    world.start()
    async with world.running():
        await until((world.container / "7/sent/.ready").exists)
        assert (world.container / "7/sent/code/c0de.tar").read_text() == "code/c0de.tar"
        world.write(world.container / "7/rank-0.0.log", "1.0 hello\n")
        here = world.controller / "7/rank-0.0.log"
        await until(lambda: here.exists() and here.read_text() == "1.0 hello\n")
        assert (world.marks / "7").exists()
        world.write(world.container / "7/rank-0.0.end", "{}")
        (world.marks / "7.over").touch()  # the Epilog
        await until(lambda: not (world.marks / "7").exists())
        assert (world.controller / "7/rank-0.0.end").read_text() == "{}"
        assert not (world.container / "7").exists()
        asked = world.asked
        await until(lambda: world.asked > asked + 2)  # Slurm still shows it: nobody starts again
        assert not (world.marks / "7").exists()


async def test_the_next_turn_of_a_job_begins_with_what_the_last_one_left(world: World) -> None:
    world.start()
    async with world.running():
        await until((world.container / "7/sent/.ready").exists)
        world.write(world.container / "7/checkpoints/step-1/x", "1")
        (world.marks / "7.over").touch()
        await until(lambda: not (world.marks / "7").exists())
        world.start(start="t1")
        await until((world.container / "7/sent/.ready").exists)
        assert (world.container / "7/checkpoints/step-1/x").read_text() == "1"


async def test_a_connection_that_breaks_is_made_again_and_nothing_is_lost(
    world: World, caplog: pytest.LogCaptureFixture
) -> None:
    world.cut = True
    world.start()
    async with world.running():
        await until(lambda: "its files are not carried: cut off; trying again" in caplog.text)
        world.cut = False
        await until((world.container / "7/sent/.ready").exists)


async def test_a_job_that_slurm_no_longer_has_is_fetched_though_its_end_said_nothing(world: World) -> None:
    world.start()
    async with world.running():
        await until((world.container / "7/sent/.ready").exists)
        world.write(world.container / "7/rank-0.0.log", "1.0 late\n")
        world.queue = ""
        await until(lambda: not (world.container / "7").exists())
        assert (world.controller / "7/rank-0.0.log").read_text() == "1.0 late\n"


async def test_what_cannot_be_sent_ends_the_job_with_the_reason(world: World) -> None:
    (world.controller / "code/c0de.tar").unlink()
    world.write(world.controller / "7/submission", "of another job")
    world.write(world.controller / "7.before-first/submission", "in the way")
    world.start()
    async with world.running():
        await until((world.container / "7/sent/.failed").exists)
        assert (world.container / "7/sent/.failed").read_text().endswith("/7: Directory not empty\n")


async def test_a_container_that_is_gone_is_not_called_for_ever(world: World, caplog: pytest.LogCaptureFixture) -> None:
    world.cut = True
    world.start()
    async with world.running():
        await until(lambda: "trying again" in caplog.text)
        world.present, world.queue = set(), ""
        await until(lambda: "job 7: pods1 is gone; what it had not sent yet is lost" in caplog.text)


async def test_a_job_that_came_by_another_way_is_left_alone(world: World) -> None:
    world.start(comment="mine")
    async with world.running():
        await until(lambda: world.asked > 3)
    assert not world.marks.exists() and not (world.container / "7/sent").exists()


async def test_slurm_is_not_asked_while_there_is_no_container(world: World) -> None:
    world.present = set()
    await world.couriers.look()
    assert world.asked == 0


PYTHON = Path(sys.executable).resolve()
"""The Python itself, not that of a virtual environment."""


class Environment:
    """One that every node has for itself, as it was packed on the controller."""

    def __init__(self, place: Path, monkeypatch: pytest.MonkeyPatch, python: Path, version: str) -> None:
        self.local = place / "local"
        monkeypatch.setattr(couriers, "LOCAL", str(self.local))
        (place / "e44/bin").mkdir(parents=True)
        (place / "e44" / MARK).touch()
        (place / "e44/bin/python").symlink_to(python)
        (place / "e44/pyvenv.cfg").write_text(f"home = {python.parent}\nversion = {version}\n")
        archives = place / "environments/archives"
        archives.mkdir(parents=True)
        with tarfile.open(archives / "e44.tar", "w") as archive:
            archive.add(place / "e44", "e44")


async def test_an_environment_is_in_the_container_before_the_job_starts(
    world: World, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    environment = Environment(tmp_path, monkeypatch, PYTHON, platform.python_version())
    world.start(comment="shoal:c0de/11b@e44")
    async with world.running():
        await until((world.container / "7/sent/.ready").exists)
    assert (environment.local / "e44/bin/python").exists()


async def test_an_environment_that_somebody_else_may_have_put_there_is_not_unpacked(
    world: World, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    environment = Environment(tmp_path, monkeypatch, PYTHON, platform.python_version())
    (tmp_path / "environments").chmod(0o1777)
    world.start(comment="shoal:c0de/11b@e44")
    async with world.running():
        await until((world.container / "7/sent/.ready").exists)
    assert not environment.local.exists()


async def test_an_environment_that_cannot_run_there_ends_the_job_with_the_reason(
    world: World, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    Environment(tmp_path, monkeypatch, Path("/opt/gone/bin/python3.1"), "3.1.0")
    world.start(comment="shoal:c0de/11b@e44")
    async with world.running():
        await until((world.container / "7/sent/.failed").exists)
    assert (world.container / "7/sent/.failed").read_text() == (
        "environment e44 does not run on pods1: the Python it was made with is not there\n"
    )
    assert not (world.container / "7/sent/.ready").exists()
