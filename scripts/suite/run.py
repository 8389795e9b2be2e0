"""Runs the tests in parts, repeats files that failed, and ends with a table: scripts/test after the set-up."""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import platform
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path

from scripts.suite import changes, table
from scripts.suite.machine import Sampler, remove_groups
from tests import timing

ROOT = table.ROOT
LIMIT_S = 4200
"""For one part, on a slow machine; on an idle one the longer part takes less than half of it."""
STOP_TIMEOUT_S = 60
"""For a stopped part to take its clusters down."""
MAX_REPEATED = 8
"""Where more files fail, the fault is not their neighbours'."""
UNIT_FILES = ("tests/unit", "tests/contract")
TRAINING_FILES = "tests/unit/train"
"""They load torch, 4 s and half a gigabyte in each process: in processes of their own, the other unit tests do not."""
SANDBOX_FILES = ("tests/e2e",)


@dataclass(frozen=True)
class Part:
    """One run of pytest."""

    name: str
    files: Sequence[str]
    processes: int
    dist: str = "loadfile"

    def command(self) -> list[str]:
        # Files are handed out in the order of tests/conftest.py.
        return [
            *(sys.executable, "-m", "pytest", "-q", "-p", "tests.timing", "-m", "not matrix"),
            *(f"--numprocesses={self.processes}", f"--dist={self.dist}", "--no-loadscope-reorder"),
            *("-o", f"cache_dir={ROOT}/.pytest_cache/{self.name}", "--cache-clear", *self.files),
        ]


def units(files: Sequence[str] = UNIT_FILES) -> list[Part]:
    """The unit tests, those of training apart: the parts run at the same time."""
    others = [file for file in files if not file.startswith(TRAINING_FILES)]
    training = [file for file in files if file.startswith(TRAINING_FILES)]
    if "tests/unit" in files:
        others, training = [f"--ignore={TRAINING_FILES}", *files], [TRAINING_FILES]
    parts = (Part("units", others, 4), Part("training", training, 2))
    return [part for part in parts if part.files]


def sandbox(files: Sequence[str] = SANDBOX_FILES) -> Part:
    # With a fourth process the tests wait for each other's hosts: on a slow machine SSH then takes longer than the 10 s
    # that Shoal allows.
    return Part("sandbox", files, 3, dist="loadgroup")


@dataclass
class Run:
    """One run of scripts/test, and all that it started."""

    records: Path
    begin: float
    """When scripts/test began, by time.monotonic(): the set-up counts."""
    spans: list[table.Span] = field(default_factory=list)
    repeated: list[str] = field(default_factory=list)
    programs: list[subprocess.Popen[bytes]] = field(default_factory=list)

    @contextmanager
    def span(self, name: str) -> Iterator[None]:
        begin = time.monotonic()
        try:
            yield
        finally:
            self.spans.append(table.Span(name, begin, time.monotonic()))

    def prepare(self) -> None:
        remove_leftovers()
        # Otherwise each process of pytest compiles all tests.
        subprocess.run([sys.executable, "-m", "scripts.suite.bytecode"], cwd=ROOT, check=False)

    def start(self, command: Sequence[str | Path], log: Path | None = None, **env: str) -> subprocess.Popen[bytes]:
        """Start a program in a process group of its own: Ctrl-C reaches it once, from stop()."""
        with log.open("wb") if log else contextlib.nullcontext() as out:
            program = subprocess.Popen(
                command,
                stdin=subprocess.DEVNULL,
                stdout=out,
                stderr=subprocess.STDOUT if log else None,
                env={**os.environ, **env},
                cwd=ROOT,
                process_group=0,
            )
        self.programs.append(program)
        return program

    def start_part(self, part: Part, log: Path | None = None) -> subprocess.Popen[bytes]:
        directory = self.records / part.name
        directory.mkdir()
        return self.start(part.command(), log, **{timing.DIRECTORY: str(directory)})

    def finish_part(self, part: Part, program: subprocess.Popen[bytes]) -> int:
        try:
            return program.wait(LIMIT_S)
        except subprocess.TimeoutExpired:
            print(f"{part.name}: stopped after {LIMIT_S} s", file=sys.stderr)
            stop(program)
            return 124

    def finish_parts(self, parts: Sequence[Part], programs: Sequence[subprocess.Popen[bytes]], begin: float) -> int:
        """Wait for the unit tests, show what was said into logs, and repeat failed files; the exit status."""
        statuses = [self.finish_part(part, program) for part, program in zip(parts, programs, strict=True)]
        self.spans.append(table.Span("units", begin, time.monotonic()))
        for part in parts:
            if (log := self.records / f"{part.name}.log").exists():
                print(log.read_text())
        repeated = [self.finish_files(part, status) for part, status in zip(parts, statuses, strict=True)]
        return max(repeated, default=0)

    def finish_files(self, part: Part, status: int) -> int:
        """Run each failed file again, alone and with a cluster of its own, and count that result."""
        failed = failed_files(part) if status == 1 else []
        if not failed or len(failed) > MAX_REPEATED:
            return status
        remove_leftovers()
        alone = Part(f"{part.name}-repeated", failed, 0)
        with self.span(alone.name):
            status = self.finish_part(alone, self.start_part(alone))
        again = set(failed_files(alone)) if status == 1 else set(failed if status else ())
        self.repeated += [
            f"{file}: failed beside others, {'failed again' if file in again else 'passed'} alone" for file in failed
        ]
        return status

    def stop(self) -> None:
        for program in self.programs:
            stop(program)


def stop(program: subprocess.Popen[bytes]) -> None:
    """Stop a program as Ctrl-C does, with time for its clusters to go; then end it and what it started."""
    if program.poll() is not None:
        return
    program.send_signal(signal.SIGINT)
    with contextlib.suppress(subprocess.TimeoutExpired):
        program.wait(STOP_TIMEOUT_S)
    with contextlib.suppress(ProcessLookupError):
        os.killpg(program.pid, signal.SIGKILL)
    program.wait()


def failed_files(part: Part) -> list[str]:
    """What pytest has noted: it also knows of processes that crashed."""
    noted = ROOT / ".pytest_cache" / part.name / "v/cache/lastfailed"
    return sorted({name.partition("::")[0] for name in json.loads(noted.read_text())}) if noted.exists() else []


def remove_leftovers() -> None:
    subprocess.run([sys.executable, "-m", "tests.e2e.leftovers"], cwd=ROOT, check=False)


def run_parts(run: Run, unit_files: Sequence[str], sandbox_files: Sequence[str], *, whole: bool) -> int:
    """Run the parts; the exit status. The whole run has the checks and the build of Shoal's Slurm beside it.

    One after the other: beside the tests on sandbox hosts, the units would take the time that those need, or run into
    their own limits.
    """
    logs = run.records
    with run.span("prepare"):
        run.prepare()
    check = build = None
    if whole:
        # For half of their time the checks use one core or wait for an index.
        check = run.start([ROOT / "scripts/check"], logs / "check")
        # The tests of `slurm: {from: shoal}` use the wheel in the cache. A machine without it builds it here.
        build = run.start(["nice", ROOT / "scripts/build-slurm"], logs / "build")
    unbuilt = ""
    fast, slow = units(unit_files), sandbox(sandbox_files)
    begin = time.monotonic()
    # Only one part shows its output while it runs.
    first = [run.start_part(part, logs / f"{part.name}.log" if part is not fast[0] else None) for part in fast]
    status = run.finish_parts(fast, first, begin)
    if check and report_check(check, logs / "check"):
        return 1  # the longer part can wait
    if build:
        with run.span("wait-for-build"):
            if build.wait():
                unbuilt = "\n".join((logs / "build").read_text().splitlines()[-5:])
    if sandbox_files:
        with run.span(slow.name):
            later = run.finish_part(slow, run.start_part(slow))
        status = run.finish_files(slow, later) or status
    if unbuilt:
        print(f"FAILED: scripts/build-slurm, so tests of `slurm: {{from: shoal}}` were skipped: {unbuilt}")
        status = status or 1
    return status


def report_check(check: subprocess.Popen[bytes], log: Path) -> int:
    """Print what the checks said, once they have ended."""
    status = check.wait()
    print(log.read_text(), end="")
    if status:
        print("FAILED: scripts/check")
    return status


def heading() -> str:
    """What was measured, and where."""
    git = ["git", "-C", str(ROOT)]
    commit = subprocess.run([*git, "rev-parse", "--short", "HEAD"], capture_output=True, text=True).stdout.strip()
    changed = subprocess.run([*git, "status", "--porcelain"], capture_output=True, text=True).stdout.strip()
    cores = len(os.sched_getaffinity(0))
    date = time.strftime("%Y-%m-%d", time.gmtime())
    return f"scripts/test on {date}, commit {commit}{'+' if changed else ''}, {cores} cores ({platform.machine()})"


def parse(arguments: Sequence[str]) -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="scripts/test", add_help=False, allow_abbrev=False)
    what = parser.add_mutually_exclusive_group()
    what.add_argument("--save", action="store_true")
    what.add_argument("--changed", nargs="?", const="main", metavar="COMMIT")
    what.add_argument("--times", nargs="+", metavar="FILE")
    parser.add_argument("--list", action="store_true")
    options = parser.parse_args(arguments)
    if options.list and not options.changed:
        parser.error("--list goes with --changed")
    for file in options.times or ():
        if not Path(ROOT, file).exists():
            parser.error(f"there is no {file}")
    if os.environ.get("SHOAL_TEST_ORDER", "") not in ("reverse", ""):
        parser.error(f"SHOAL_TEST_ORDER={os.environ['SHOAL_TEST_ORDER']}: the value may be `reverse`")
    return options


def main(arguments: Sequence[str]) -> int:
    options = parse(arguments)
    unit_files, sandbox_files, whole = UNIT_FILES, SANDBOX_FILES, True
    if options.times:
        whole = False
        unit_files = [file for file in options.times if not file.startswith("tests/e2e")]
        sandbox_files = [file for file in options.times if file.startswith("tests/e2e")]
    elif options.changed:
        choice = changes.choose_or_exit("scripts/test", options.changed)
        print(choice.text)
        if options.list or not (choice.units or choice.sandbox):
            return 0
        whole, unit_files, sandbox_files = False, choice.units, choice.sandbox
    set_up = time.time() - float(os.environ.get("SHOAL_TEST_BEGUN") or time.time())
    run = Run(Path(tempfile.mkdtemp(prefix="shoal-tests-")), time.monotonic() - set_up)
    run.spans.append(table.Span("set-up", run.begin, time.monotonic()))
    try:
        with Sampler().running() as samples:
            status = run_parts(run, unit_files, sandbox_files, whole=whole)
        records = [row for name in ("units", "training", "sandbox") for row in table.read_records(run.records / name)]
        about = heading()
        saved = table.saved_seconds()
        if saved:
            print(f"\nchange: since the saved table: {table.saved_heading()}")
        print("\n" + table.render(about, run.spans, records, samples, saved, whole=False))
        if options.save and not status:
            table.SAVED.write_text(table.render(about, run.spans, records, samples, {}, whole=True))
        elif options.save:
            print(f"not saved: tests failed; {table.SAVED.relative_to(ROOT)} is as it was")
        for line in run.repeated:
            print(f"REPEATED: {line}")
        return status
    finally:
        for name in (signal.SIGINT, signal.SIGTERM):
            signal.signal(name, signal.SIG_IGN)
        run.stop()
        remove_groups(timing.cpu_groups())
        shutil.rmtree(run.records, ignore_errors=True)
        remove_leftovers()


def end(number: int, frame: object) -> None:
    sys.exit(128 + number)


if __name__ == "__main__":
    for one in (signal.SIGINT, signal.SIGTERM):
        signal.signal(one, end)
    sys.exit(main(sys.argv[1:]))
