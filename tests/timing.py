"""Records what tests and clusters take, for the table at the end of scripts/test.

A pytest plugin (`-p tests.timing`). It records only where SHOAL_TEST_TIMES names a directory: one file for each process
that runs tests, one line of JSON for each test and phase.
"""

import contextlib
import json
import os
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

from shoal.sandbox.cgroups import hierarchies
from shoal.sandbox.layout import Layout

DIRECTORY = "SHOAL_TEST_TIMES"
PROCESS = "SHOAL_TEST_PROCESS"
"""In the environment of all that a process of the run starts, hosts included: who has started it."""
PHASES = ("up", "down")
"""Verbs whose time is recorded."""
GROUP = "tests-of-shoal-"
_BEGUN = time.monotonic()


def cpu_groups() -> Path | None:
    """The cgroup hierarchy that counts CPU time."""
    mounted = hierarchies()
    return mounted.get("cpuacct") or mounted.get("unified")


def group_seconds(group: Path) -> float:
    """What all processes of a group have used so far, those that ended included."""
    if (usage := group / "cpuacct.usage").exists():
        return int(usage.read_text()) / 1e9
    return int((group / "cpu.stat").read_text().split()[1]) / 1e6


@contextmanager
def phase(name: str, cluster: Layout) -> Iterator[None]:
    """Record how long the block takes, if `name` is one of PHASES."""
    if name not in PHASES or _recorder is None:
        yield
        return
    begin = time.time()
    with _recorder.recorded(name, cluster.cluster) as more:
        try:
            yield
        finally:
            more["boot"] = boot_seconds(cluster.dir, begin)


def boot_seconds(cluster: Path, since: float) -> float:
    """From the start of the first host that has booted since then, until the last one was ready."""
    hosts = [(host / "launch", host / "ready") for host in cluster.glob("hosts/*")]
    booted = [(launch, ready) for launch, ready in hosts if launch.exists() and ready.exists()]
    times = [(launch.stat().st_mtime, ready.stat().st_mtime) for launch, ready in booted]
    times = [(start, ready) for start, ready in times if start >= since]
    return max(ready for _, ready in times) - min(start for start, _ in times) if times else 0.0


class Recorder:
    """The record of one process."""

    def __init__(self, directory: Path) -> None:
        self.process = f"{os.environ.get('PYTEST_XDIST_WORKER', 'main')}-{os.getpid()}"
        os.environ[PROCESS] = self.process
        self._file = (directory / f"{self.process}.jsonl").open("a", buffering=1)
        self._before = sum(os.times()[:4])
        self._group = self._enter_group()
        self._outcome, self._reason = "passed", ""

    def _enter_group(self) -> Path | None:
        """Have a group of our own: it also counts children that nobody waits for."""
        root = cpu_groups()
        with contextlib.suppress(OSError, ValueError, IndexError):
            if root is not None:
                group = root / f"{GROUP}{self.process}"
                group.mkdir()
                group_seconds(group)
                (group / "cgroup.procs").write_text(str(os.getpid()))
                return group
        return None

    def _cpu(self) -> float:
        return group_seconds(self._group) if self._group else sum(os.times()[:4])

    @contextmanager
    def recorded(self, kind: str, name: str) -> Iterator[dict[str, Any]]:
        begin, cpu, more = time.monotonic(), self._cpu(), dict[str, Any]()
        try:
            yield more
        finally:
            self._write(kind, name, begin, self._cpu() - cpu, **more)

    def _write(self, kind: str, name: str, begin: float, cpu: float, **more: Any) -> None:
        file = os.environ.get("PYTEST_CURRENT_TEST", name).partition("::")[0]
        row = {"kind": kind, "name": name, "file": file, "process": self.process, **more}
        self._file.write(json.dumps({**row, "begin": begin, "end": time.monotonic(), "cpu": cpu}) + "\n")

    def pytest_collection_finish(self) -> None:
        self._write("collection", "", _BEGUN, self._before + self._cpu())

    @pytest.hookimpl(wrapper=True)
    def pytest_runtest_protocol(self, item: pytest.Item) -> Iterator[None]:
        self._outcome, self._reason = "passed", ""
        with self.recorded("test", item.nodeid) as more:
            result = yield
            more.update(outcome=self._outcome, reason=self._reason)
        return result

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        if report.failed:
            self._outcome = "failed"
        elif report.skipped and self._outcome == "passed":
            self._outcome = "skipped"
            self._reason = report.longrepr[2] if isinstance(report.longrepr, tuple) else str(report.longrepr)


_recorder: Recorder | None = None


def pytest_configure(config: pytest.Config) -> None:
    global _recorder
    runs_tests = hasattr(config, "workerinput") or config.getoption("dist", "no") == "no"
    if runs_tests and (directory := os.environ.get(DIRECTORY)):
        _recorder = Recorder(Path(directory))
        config.pluginmanager.register(_recorder)
