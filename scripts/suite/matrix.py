"""Runs matrix files one by one and keeps a table of when each last passed: scripts/matrix after the set-up."""

from __future__ import annotations

import argparse
import os
import re
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path

from scripts.suite import changes, table
from scripts.suite.run import ROOT, Run, end, remove_groups, remove_leftovers, timing

from shoal.local_files import cache_dir

TABLE = ROOT / "bench/results/matrix.txt"
TITLE = "Files with the mark `matrix`: when each last passed, on which commit, in how many seconds. By scripts/matrix."
COLUMNS = ("file", "passed", "commit", "seconds", "last run")
NEVER = "-"
SECONDS = {"s": 1, "m": 60, "h": 3600}


@dataclass(frozen=True)
class Needs:
    """What a file needs besides this machine."""

    env: Mapping[str, str] = field(default_factory=dict)
    """Set for it."""
    given: str = ""
    """A variable that a person sets, because nothing here knows its value."""
    programs: tuple[str, ...] = ()
    note: str = ""


VM = Needs({"SHOAL_TEST_KIND": "vm"}, programs=("qemu-img",), note="an hour or more under emulation")
TAILNET = Needs(programs=("tailscale", "headscale"), note="SHOAL_TEST_TOOLS has the programs")
INTERNET = Needs(note="installs packages from an index")
NEEDS = {
    "tests/e2e/test_vm_acceptance.py": VM,
    "tests/e2e/test_image_vm.py": VM,
    "tests/e2e/test_slurm_tree_vm.py": VM,
    "tests/e2e/test_vm.py": Needs(programs=("qemu-img",), note="an hour or more under emulation"),
    "tests/e2e/test_vm_hosts.py": Needs(programs=("qemu-img",)),
    "tests/e2e/test_tailscale.py": TAILNET,
    "tests/e2e/test_rented_tailnet.py": TAILNET,
    "tests/e2e/test_engine_hosts.py": Needs(programs=("podman",), note="one test needs podman-compose"),
    "tests/e2e/test_host_firewalls.py": INTERNET,
    "tests/e2e/test_mlflow.py": INTERNET,
    "tests/matrix/test_frameworks.py": INTERNET,
}
"""By file. Others need what scripts/test needs."""
VARIANTS = (
    ("tests/e2e/test_pyxis.py", Needs(given="SHOAL_TEST_PYXIS", note="a directory with enroot.deb and spank_pyxis.so")),
    ("tests/e2e/test_cluster.py", Needs({"SHOAL_TEST_KIND": "podman"}, programs=("podman",))),
    ("tests/matrix/test_doctor_faults.py", Needs({"SHOAL_TEST_IMAGE": "debian13"})),
    ("tests/matrix/test_doctor_faults.py", Needs({"SHOAL_TEST_IMAGE": "sid"})),
)
"""Files that run again in another environment, each with a row of its own."""


@dataclass(frozen=True)
class Entry:
    """A matrix file in one environment, and what the table says of it."""

    file: str
    needs: Needs = Needs()
    passed: str = NEVER
    commit: str = NEVER
    seconds: str = NEVER
    last_run: str = NEVER

    @property
    def name(self) -> str:
        more = [f"{name}={value}" for name, value in self.needs.env.items()]
        return " ".join([self.file, *more, *([self.needs.given] if self.needs.given else [])])

    @property
    def row(self) -> tuple[str, ...]:
        return (self.name, self.passed, self.commit, self.seconds, self.last_run)

    def missing(self) -> str:
        """Why it cannot run here; empty if it can."""
        if self.needs.given and not os.environ.get(self.needs.given):
            return f"set {self.needs.given}: {self.needs.note}"
        absent = [program for program in self.needs.programs if not shutil.which(program)]
        return f"not installed: {', '.join(absent)}" if absent else ""


def entries(root: Path = ROOT, kept: Path = TABLE) -> list[Entry]:
    """All matrix files; those that have not run for longest come first."""
    found = sorted(
        str(file.relative_to(root))
        for file in (root / "tests").rglob("test_*.py")
        if re.search(r"mark\.matrix\b|VM_BY_HAND\b", file.read_text())
    )
    known = [Entry(file, NEEDS.get(file, Needs())) for file in found]
    known += [Entry(file, needs) for file, needs in VARIANTS if (root / file).exists()]
    rows = read_table(kept)
    filled = [
        replace(entry, **dict(zip(("passed", "commit", "seconds", "last_run"), rows[entry.name], strict=True)))
        if entry.name in rows
        else entry
        for entry in known
    ]
    return sorted(filled, key=lambda entry: entry.last_run if entry.last_run != NEVER else "")


def read_table(kept: Path) -> dict[str, list[str]]:
    lines = kept.read_text().splitlines()[2:] if kept.exists() else []
    rows = [re.split(r" {2,}", line.strip()) for line in lines]
    return {row[0]: row[1:] for row in rows if len(row) == len(COLUMNS)}


def write_table(entry: Entry, kept: Path = TABLE) -> None:
    """Put in what a run has shown. The file is complete at any moment."""
    rows = {**{name: (name, *row) for name, row in read_table(kept).items()}, entry.name: entry.row}
    lines = [TITLE, *align([COLUMNS, *(rows[name] for name in sorted(rows))])]
    fresh = kept.with_suffix(".new")
    fresh.write_text("\n".join(lines) + "\n")
    fresh.replace(kept)


def align(rows: Sequence[Sequence[str]]) -> list[str]:
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    return ["  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip() for row in rows]


def after(entry: Entry, outcome: str, seconds: float, commit: str, now: str) -> Entry:
    """What the table says of a file after a run. One that failed keeps its last pass."""
    entry = replace(entry, last_run=f"{now} {outcome}")
    return replace(entry, passed=now, commit=commit, seconds=f"{seconds:.0f}") if outcome == "passed" else entry


def outcome_of(status: int, outcomes: Iterable[str]) -> str:
    """A file whose tests were all skipped has not passed. 5 is pytest's status where no test was chosen."""
    if status not in (0, 5):
        return "failed"
    return "passed" if "passed" in outcomes else "skipped"


def parse_duration(text: str) -> float:
    match = re.fullmatch(r"(\d+)([smh])", text)
    if not match:
        raise argparse.ArgumentTypeError(f"{text}: write 90s, 60m or 2h")
    return float(match[1]) * SECONDS[match[2]]


def parse(arguments: Sequence[str]) -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="scripts/matrix", add_help=False, allow_abbrev=False)
    parser.add_argument("files", nargs="*", metavar="FILE")
    parser.add_argument("--for", dest="limit_s", type=parse_duration, metavar="TIME")
    parser.add_argument("--changed", nargs="?", const="main", metavar="COMMIT")
    parser.add_argument("--list", action="store_true")
    options = parser.parse_args(arguments)
    known = {entry.file for entry in entries()}
    for file in options.files:
        if file not in known:
            parser.error(f"{file} is no matrix file; see scripts/matrix --list")
    return options


def main(arguments: Sequence[str]) -> int:
    options = parse(arguments)
    chosen = [entry for entry in entries() if not options.files or entry.file in options.files]
    if options.changed:
        choice = changes.choose_or_exit("scripts/matrix", options.changed)
        print(f"{len(choice.changed)} files differ from {choice.base}")
        chosen = [entry for entry in chosen if entry.file in choice.reasons]
        for entry in chosen:
            print(f"  {entry.name}: {choice.reasons[entry.file]}")
    if options.list:
        here = [f"skipped: {why}" if (why := entry.missing()) else entry.needs.note for entry in chosen]
        rows = [(*entry.row, text) for entry, text in zip(chosen, here, strict=True)]
        print("\n".join(align([(*COLUMNS, "here"), *rows])))
        return 0
    return run_all(chosen, options.limit_s)


def run_all(chosen: Sequence[Entry], limit_s: float | None) -> int:
    """Run the files that fit into the time, one after the other."""
    begin, failed = time.monotonic(), 0
    logs = cache_dir() / "matrix"
    logs.mkdir(parents=True, exist_ok=True)
    remove_leftovers()
    for entry in chosen:
        if why := entry.missing():
            print(f"skipped  {entry.name}: {why}")
            continue
        left = limit_s - (time.monotonic() - begin) if limit_s else None
        if left is not None and left < (1 if entry.seconds == NEVER else float(entry.seconds)):
            print(f"no time  {entry.name}: it takes {entry.seconds} s, and {max(left, 0):.0f} s are left")
            continue
        failed += run_one(entry, logs) == "failed"
    return 1 if failed else 0


def run_one(entry: Entry, logs: Path) -> str:
    print(f"running  {entry.name}", flush=True)
    log = logs / (re.sub(r"\W+", "-", entry.name.removeprefix("tests/")) + ".log")
    begin = time.monotonic()
    run = Run(Path(tempfile.mkdtemp(prefix="shoal-matrix-")), begin)
    line = [sys.executable, "-m", "pytest", "-v", "-n0", "-p", "tests.timing", "-p", "no:cacheprovider", entry.file]
    try:
        program = run.start([*line, "-m", "matrix"], log, **{timing.DIRECTORY: str(run.records)}, **entry.needs.env)
        status = program.wait()
        tests = [row for row in table.read_records(run.records) if row["kind"] == "test"]
    finally:
        run.stop()
        remove_groups(timing.cpu_groups())
        shutil.rmtree(run.records, ignore_errors=True)
        remove_leftovers()
    seconds = time.monotonic() - begin
    outcome = outcome_of(status, [row["outcome"] for row in tests])
    now = time.strftime("%Y-%m-%d %H:%M", time.gmtime())
    write_table(after(entry, outcome, seconds, commit(), now))
    skipped = sorted({row["reason"].removeprefix("Skipped: ") for row in tests if row["outcome"] == "skipped"})
    because = f"; skipped in it: {'; '.join(skipped)}" if skipped else ""
    print(f"{outcome:<8} {entry.name}: {seconds:.0f} s{f', log: {log}' if outcome == 'failed' else ''}{because}")
    return outcome


def commit() -> str:
    """The commit, with a + where files differ from it; the table does not count."""
    git = ["git", "-C", str(ROOT)]
    name = subprocess.run([*git, "rev-parse", "--short", "HEAD"], capture_output=True, text=True).stdout.strip()
    others = [*git, "status", "--porcelain", "--", ".", f":!{TABLE.relative_to(ROOT)}"]
    return name + ("+" if subprocess.run(others, capture_output=True, text=True).stdout.strip() else "")


if __name__ == "__main__":
    for one in (signal.SIGINT, signal.SIGTERM):
        signal.signal(one, end)
    try:
        sys.exit(main(sys.argv[1:]))
    except SystemExit as ended:
        if ended.code in (130, 143):
            print("stopped; run the same command again to continue", file=sys.stderr)
        raise
