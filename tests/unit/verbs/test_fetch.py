"""`shoal fetch`: the real program that sends files, on hosts that are directories of this machine."""

import asyncio
import os
import stat
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path

import pytest
from tests.support.cases import cases
from tests.support.specs import TWO_NODES

from shoal.errors import CommandFailed, UsageError
from shoal.hosts.api import Host, Result, Target
from shoal.hosts.local import LocalHost
from shoal.hosts.process import LineProcess
from shoal.plan.progress import NoProgress
from shoal.remote.log_reader import SENT_TIME
from shoal.spec.loader import load_text
from shoal.verbs import fetch as module
from shoal.verbs.context import Context
from shoal.verbs.fetch import FetchResult, fetch, unsafe_name

SPEC = TWO_NODES
RECORD = "JobId=17 JobName=train UserId=(0) JobState={} NodeList={} BatchHost=n1 NumNodes=2 WorkDir={}\n"


class DirectoryHost(LocalHost):
    """A host whose files are below a directory here."""

    def __init__(self, name: str, cluster: "Reef") -> None:
        super().__init__(Target(name), through_sudo=False)
        self.cluster = cluster

    async def run(
        self, argv: Sequence[str], *, stdin: bytes = b"", timeout: float | None = None, root: bool = True
    ) -> Result:
        if argv[0] == "scontrol":
            return Result(0, self.cluster.record.encode())
        return Result(0, b"LoadState=loaded\nActiveState=active\n")

    async def start(self, argv: Sequence[str], *, root: bool = True) -> LineProcess:
        place = str(self.cluster.place(self.name))
        return await super().start([word.replace("/jobs", place, 1) for word in argv], root=False)


class Reef:
    """A cluster with a job whose files are on each node, or on a share."""

    def __init__(self, place: Path, *, shared: bool = False) -> None:
        self.root, self.shared = place, shared
        self.record = RECORD.format("COMPLETED", "n[1-2]", "/jobs")
        for name in ("c1", "n1", "n2"):
            self.place(name).mkdir(exist_ok=True)
            (self.place(name) / ".id").write_text(self.place(name).name)
        self.context = Context(load_text(SPEC, "shoal.yaml"), connector=self)

    def place(self, name: str) -> Path:
        return self.root / ("share" if self.shared else name)

    async def connect(self, target: Target) -> Host:
        return DirectoryHost(target.name, self)

    def write(self, node: str, name: str, data: bytes, time: int | None = None) -> Path:
        path = self.place(node) / "17" / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(data)
        if time is not None:
            os.utime(path, (time, time))
        return path

    async def fetch(self, path: str = "", to: str = "to") -> FetchResult:
        return await fetch(self.context, "17", path, self.root / to)

    def got(self, to: str = "to") -> dict[str, bytes]:
        place = self.root / to
        return {path.relative_to(place).as_posix(): path.read_bytes() for path in place.rglob("*") if path.is_file()}


@pytest.fixture
def reef(tmp_path: Path) -> Reef:
    return Reef(tmp_path, shared=True)


async def test_what_the_job_has_made_is_copied_without_its_code(reef: Reef) -> None:
    large = os.urandom(300_000)
    reef.write("n1", "checkpoints/step-1/model", large, 1000).chmod(0o755)
    reef.write("n1", "tree/out/loss.txt", b"1\n")
    reef.write("n1", "tree/train.py", b"code", SENT_TIME)
    reef.write("n1", "tree/old.py", b"code as an earlier Shoal sent it", 0)
    for name in ("tree.lock", "pids.n1/12", "submission"):
        reef.write("n1", name, b"")
    result = await reef.fetch()
    assert reef.got() == {"checkpoints/step-1/model": large, "tree/out/loss.txt": b"1\n"}
    assert (result.files, result.bytes, result.unchanged, result.skipped) == (2, 300_002, 0, ())
    status = (reef.root / "to/checkpoints/step-1/model").stat()
    assert (status.st_mtime, stat.S_IMODE(status.st_mode)) == (1000, 0o755)


class RecordedPhase(NoProgress):
    """The texts that a phase was given."""

    def __init__(self) -> None:
        self.texts: list[str] = []

    def set_fraction(self, fraction: float, text: str = "") -> None:
        self.texts.append(text)

    @contextmanager
    def phase(self, title: str, total: int) -> Iterator["RecordedPhase"]:
        yield self


async def test_progress_is_reported_within_a_file(reef: Reef) -> None:
    reef.write("n1", "a", bytes(200_000))
    progress = RecordedPhase()
    await fetch(replace(reef.context, progress=progress), "17", "", reef.root / "to")
    assert {"0.0 of 0.2 MB", "0.1 of 0.2 MB", "0.2 of 0.2 MB"} <= set(progress.texts)


async def test_second_run_copies_only_what_has_changed(reef: Reef) -> None:
    reef.write("n1", "a", b"old", 1000)
    reef.write("n1", "b", b"same", 1000)
    await reef.fetch()
    reef.write("n1", "a", b"new", 2000)
    result = await reef.fetch()
    assert (result.files, result.unchanged) == (1, 1) and reef.got() == {"a": b"new", "b": b"same"}


@cases(
    "path, names",
    ("out/loss.txt", {"loss.txt"}),
    ("out", {"out/loss.txt", "out/more"}),
    ("tree/out/", {"out/loss.txt", "out/more"}),
    ("/jobs/17/tree/out/more", {"more"}),
    ("train.py", {"train.py"}),
)
async def test_path_is_below_the_jobs_directory_or_its_working_tree(reef: Reef, path: str, names: set[str]) -> None:
    for name in ("out/loss.txt", "out/more", "train.py"):
        reef.write("n1", f"tree/{name}", b"x", 0)
    await reef.fetch(path)
    assert set(reef.got()) == names


async def test_nodes_without_a_share_have_a_directory_each(tmp_path: Path) -> None:
    reef = Reef(tmp_path)
    for node in ("n1", "n2"):
        reef.write(node, "tree/result", node.encode())
    result = await reef.fetch()
    assert reef.got() == {"n1/tree/result": b"n1", "n2/tree/result": b"n2"} and result.files == 2
    reef.write("n1", "only", b"1")
    await reef.fetch("only", "other")
    assert reef.got("other") == {"only": b"1"}


async def test_links_out_of_the_job_are_named_and_not_followed(reef: Reef) -> None:
    reef.write("n1", "checkpoints/step-2", b"x")
    place = reef.place("n1") / "17"
    (place / "checkpoints/last").symlink_to("step-2")
    (place / "passwd").symlink_to("/etc/passwd")
    (place / "up").symlink_to("../../secret")
    (place / "etc").symlink_to("/etc")
    os.mkfifo(place / "pipe")
    result = await reef.fetch()
    assert reef.got() == {"checkpoints/step-2": b"x", "checkpoints/last": b"x"}
    assert (reef.root / "to/checkpoints/last").is_symlink()
    leaves = "a link that leaves the job's files"
    assert {(skipped.name, skipped.why) for skipped in result.skipped} == {
        *((name, leaves) for name in ("passwd", "up", "etc")),
        ("pipe", "not a regular file"),
    }
    for path in ("etc/passwd", "../secret", "/etc/passwd"):
        with pytest.raises(UsageError):
            await reef.fetch(path, "none")
    assert not (reef.root / "none").exists()


async def test_odd_names_are_copied_or_named(reef: Reef) -> None:
    reef.write("n1", "two words é", b"1")
    reef.write("n1", "bell\x07", b"2")
    reef.write("n1", "x" * 250, b"3")
    result = await reef.fetch()
    assert reef.got() == {"two words é": b"1"}
    assert {skipped.name for skipped in result.skipped} == {"bell\x07", "x" * 250}


@cases("name", "../x", "/etc/x", "a//b", ".", "a/../../b", "", "a\nb", "link/x", "file/x", "dir")
def test_names_that_leave_the_directory_or_replace_others_are_unsafe(tmp_path: Path, name: str) -> None:
    (tmp_path / "link").symlink_to("/tmp")
    (tmp_path / "file").touch()
    (tmp_path / "dir").mkdir()
    assert unsafe_name(tmp_path, name)
    assert not unsafe_name(tmp_path, "new/file") and not unsafe_name(tmp_path, "file")


BEGINS = (
    "import sys, json, time; print(json.dumps({'storage': 's', 'found': True}), flush=True); sys.stdin.readline();"
    "print(json.dumps({'bytes': 9}), json.dumps({'name': 'a', 'size': 9, 'mode': 420, 'time': 5}), '+bmV3', sep='\\n',"
    "flush=True);"
)
"""A program that sends a part of a file."""


async def test_broken_connection_leaves_the_old_file_and_no_part(
    reef: Reef, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    reef.write("n1", "a", b"new", 2000)
    (tmp_path / "to").mkdir()
    (tmp_path / "to/a").write_text("old")
    monkeypatch.setattr(module, "python_command", lambda *words: ("python3", "-c", BEGINS + "sys.exit(1)"))
    result = await reef.fetch()
    assert isinstance(next(iter(result.failures.values())), CommandFailed)
    assert [path.name for path in (tmp_path / "to").iterdir()] == ["a"]
    assert (tmp_path / "to/a").read_text() == "old" and result.files == 0


async def test_interrupt_leaves_no_part(reef: Reef, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "python_command", lambda *words: ("python3", "-c", BEGINS + "time.sleep(600)"))
    task = asyncio.create_task(reef.fetch())
    part = tmp_path / f"to/.a{module.PART}"
    while not part.exists():  # noqa: ASYNC110 - a file has no event
        await asyncio.sleep(0.01)
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task
    assert list((tmp_path / "to").iterdir()) == []


async def test_jobs_without_files_are_explained(reef: Reef, tmp_path: Path) -> None:
    with pytest.raises(UsageError, match="nothing is left of job 17 in /jobs/17"):
        await reef.fetch()
    reef.write("n1", "a", b"")
    with pytest.raises(UsageError, match="job 17 has no out in /jobs/17"):
        await reef.fetch("out")
    (tmp_path / "file").touch()
    with pytest.raises(UsageError, match="is no directory"):
        await reef.fetch(to="file")
    reef.record = RECORD.format("PENDING", "(null)", "/none")
    with pytest.raises(UsageError, match="has not started"):
        await reef.fetch()
