"""What jobs leave behind, with real processes; and GPUs that a job holds and does not use, with a simulated NVML."""

import contextlib
import os
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from tests import nvml
from tests.support.cases import cases

from shoal.remote.node_health import gpu_checks, leftovers
from shoal.remote.node_health.node import Baseline, Node, Process, read_text

JOB = "4711"
ORPHAN = "import os, sys, time; os.fork() and os._exit(0); os.setsid(); print(os.getpid(), flush=True); time.sleep(60)"


@pytest.fixture
def orphan() -> Iterator[int]:
    """A process that has outlived its parent, with the environment of a job."""
    env = {"SLURM_JOB_ID": JOB, "PATH": os.environ["PATH"]}
    start = subprocess.Popen([sys.executable, "-S", "-c", ORPHAN], env=env, stdout=subprocess.PIPE, text=True)
    assert start.stdout is not None
    pid = int(start.stdout.readline())
    start.wait(timeout=30)
    try:
        yield pid
    finally:
        with contextlib.suppress(ProcessLookupError):
            os.kill(pid, 9)
        start.stdout.close()


def look(memory: dict[str, Any], check: Any, config: dict[str, Any] | None = None) -> tuple[Node, list[str]]:
    node = Node(Baseline(memory.setdefault("baseline", {})), memory, config or {}, memory.get("now", time.time()))
    return node, list(check(node))


def adopt(pid: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Where this test's own reaper is not process 1, have the process look as if it were its child."""
    read = Process.read.__func__  # type: ignore[attr-defined]

    def read_adopted(number: int) -> Process | None:
        process = read(Process, number)
        if process is not None and number == pid:
            process.parent = 1
        return process

    monkeypatch.setattr(Process, "read", read_adopted)


@cases(
    "lowest_user, config, killed",
    (0, {}, False),
    (0, {"leftovers": "kill"}, True),
    (10**9, {"leftovers": "kill"}, False),
    ids=["the file says nothing", "the file says so", "a process of the system"],
)
def test_process_that_outlives_its_job_is_found_in_the_second_run(
    orphan: int, monkeypatch: pytest.MonkeyPatch, lowest_user: int, config: dict[str, Any], killed: bool
) -> None:
    adopt(orphan, monkeypatch)
    monkeypatch.setattr(leftovers, "LOWEST_USER", lowest_user)
    memory: dict[str, Any] = {}
    user = Process.read(orphan).user  # type: ignore[union-attr]
    first, second = (look(memory, leftovers.check_surviving_steps, config)[1] for _ in range(2))
    assert not [text for text in first if f"(pid {orphan}, " in text]
    [text] = [text for text in second if f"(pid {orphan}, " in text]
    assert text.endswith(f"of job {JOB}{', killed' if killed else ''}") and f"user {user}" in text
    deadline = time.monotonic() + 30
    while killed and (left := Process.read(orphan)) is not None and left.state != "Z":
        assert time.monotonic() < deadline
        time.sleep(0.02)
    assert killed or Process.read(orphan) is not None


def test_process_of_a_running_job_is_left_alone(orphan: int, monkeypatch: pytest.MonkeyPatch) -> None:
    adopt(orphan, monkeypatch)
    monkeypatch.setattr(leftovers, "running_jobs", lambda node: {JOB})
    memory: dict[str, Any] = {}
    for _ in range(2):
        assert not [text for text in look(memory, leftovers.check_surviving_steps)[1] if f"(pid {orphan}, " in text]


def test_memory_held_on_an_idle_node_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    memory: dict[str, Any] = {}
    used, expected = iter([100, 100, 250, 350, 350]), iter([0, 0, 0, 2, 0])
    sizes = {"MemAvailable": 0}
    monkeypatch.setattr(
        leftovers,
        "read_text",
        lambda path: (
            f"MemTotal: 1024000 kB\nMemAvailable: {sizes['MemAvailable']} kB\n"
            if "meminfo" in path
            else read_text(path)
        ),
    )
    for number, (mb, count) in enumerate(zip(used, expected, strict=True)):
        sizes["MemAvailable"] = 1024000 - mb * 1024
        monkeypatch.setattr(Node, "is_idle", number < 4)
        _, found = look(memory, leftovers.check_held_memory)
        assert len(found) == count, (number, found)
        if found:
            assert found[0] == "350 MB in use without a job, at best 100 MB" and "/dev/shm" in found[1]


# ---- GPUs


class Job:
    """A node with a job that has a GPU, and the answers of the simulated driver."""

    def __init__(self, library: Path, folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        self.file, self.memory = folder / "gpus", {"now": 10_000.0}
        monkeypatch.setattr(gpu_checks, "LIBRARY", str(library))
        monkeypatch.setenv("SHOAL_FAKE_NVML", str(self.file))
        monkeypatch.setattr(leftovers, "_jobs_with_gpus", lambda node: {JOB: ("alice", {0})})

    def run(
        self, after_s: float = 300.0, *, mode: str = "warn", hung_after_s: float = 1800.0, **gpu: object
    ) -> tuple[list[str], list[str]]:
        self.memory["now"] += after_s
        self.file.write_text(nvml.answers(gpu, {"pid": os.getpid(), "power": 600000}))
        config = {"idle_after_s": 600, "idle_gpus": mode, "hung_after_s": hung_after_s}
        node, found = look(self.memory, leftovers.check_idle_gpus, config)
        return found, node.orders


@pytest.fixture
def job(library: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Job:
    return Job(library, tmp_path, monkeypatch)


def test_job_without_a_process_on_its_gpu_is_found_and_told_once(job: Job) -> None:
    assert job.run() == job.run() == ([], [])
    found, orders = job.run()
    [text] = found
    assert text.startswith(f"the GPUs of job {JOB} have been idle since ") and text.endswith("(user alice)")
    assert orders == [f"notify {JOB} shoal: {text.partition(' (')[0]}"]
    assert job.run() == (found, [])


def test_gpu_is_idle_by_power_though_a_process_holds_it(job: Job) -> None:
    job.run(power=70000)
    for _ in range(3):
        found, _ = job.run(pid=os.getpid(), power=126000)
    assert len(found) == 1


def test_gpu_that_is_used_at_idle_power_shows_a_training_that_hangs(job: Job) -> None:
    """Its kernels wait for those of other ranks. That is shown sooner; a job is cancelled no sooner than others."""
    job.run(power=70000, mode="cancel")
    hung = {"pid": os.getpid(), "power": 126000, "utilization": 100, "hung_after_s": 200, "mode": "cancel"}
    [text], orders = job.run(**hung)  # type: ignore[arg-type]
    assert text.endswith(", by power: their kernels wait, as in a training that hangs (user alice)")
    assert orders == [f"notify {JOB} shoal: {text.partition(' (')[0]}"]
    [text], orders = job.run(**hung)  # type: ignore[arg-type]
    assert text.endswith("(user alice, cancelled)") and orders[1:] == [f"cancel {JOB}"]


@cases("watts", (300, 300, 300, 300), (300, 126, 300, 126, 126), ids=["it computes", "a pause between two bursts"])
def test_gpu_that_works_is_not_idle(job: Job, watts: tuple[int, ...]) -> None:
    job.run(power=70000)
    for each in watts:
        assert job.run(pid=os.getpid(), power=each * 1000) == ([], [])


def test_job_is_cancelled_only_if_the_file_says_so(job: Job) -> None:
    job.run()
    job.run()
    [text], orders = job.run(mode="cancel")
    assert text.endswith("(user alice, cancelled)") and orders[1] == f"cancel {JOB}"
    assert orders[0].endswith(", so it is cancelled")


def test_process_on_a_gpu_without_a_job_is_found(job: Job, monkeypatch: pytest.MonkeyPatch) -> None:
    job.file.write_text(nvml.answers({}, {"pid": os.getpid()}))
    memory: dict[str, Any] = {}
    assert look(memory, leftovers.check_gpu_processes)[1] == []
    [text] = look(memory, leftovers.check_gpu_processes)[1]
    assert text.startswith("GPU 1 (0000:42:00): ") and f"(pid {os.getpid()}, user " in text
    monkeypatch.setattr(leftovers, "job_of", lambda node, process: JOB)
    monkeypatch.setattr(leftovers, "running_jobs", lambda node: {JOB})
    assert look(memory, leftovers.check_gpu_processes)[1] == []
