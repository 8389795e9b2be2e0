"""What all benches share: options, a description of this machine, environments for the peers. Standard library only."""

from __future__ import annotations

import argparse
import fcntl
import hashlib
import os
import platform
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
RESULTS = ROOT / "bench/results"
SAMPLE_S = 3.0
"""How long the load of this machine is sampled before a bench."""


class BenchError(Exception):
    """The bench cannot continue: a program failed, or did not do the work that is measured."""


def bench_parser(name: str, description: str, result: str = "") -> argparse.ArgumentParser:
    """The options that every bench has; `result` is the table's name, where it is not that of the bench."""
    parser = argparse.ArgumentParser(
        prog=f"bench/{name}", description=description, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    size = parser.add_mutually_exclusive_group()
    size.add_argument("--small", action="store_true", help="smallest size: check that it works, ignore the times")
    size.add_argument("--save", action="store_true", help=f"write the table to bench/results/{result or name}.txt")
    return parser


def report(name: str, options: argparse.Namespace, text: str) -> None:
    """Print the table, and save it if asked to."""
    print(text, end="", flush=True)
    if options.save:
        (RESULTS / f"{name}.txt").write_text(text)


def run_bench(name: str, main: Callable[[], int | None]) -> None:
    """Run `main` and exit. SIGTERM ends it as Ctrl-C does, so that hosts are removed."""
    signal.signal(signal.SIGTERM, _interrupt)
    try:
        sys.exit(main())
    except BenchError as error:
        sys.exit(f"bench/{name}: {error}")
    except KeyboardInterrupt:
        print(f"bench/{name}: interrupted", file=sys.stderr)
        sys.exit(130)


def show_progress(text: str) -> None:
    print(text, file=sys.stderr, flush=True)


def describe_machine(options: argparse.Namespace, *versions: str) -> str:
    """The first line of a table: date, machine, versions, and the load before the run."""
    memory = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") >> 30
    parts = (platform.machine(), f"{os.cpu_count()} CPUs", f"{memory} GiB", f"Python {platform.python_version()}")
    load = cpu_load(0.1 if options.small else SAMPLE_S)
    return f"{time.strftime('%Y-%m-%d')}: {', '.join((*parts, *versions))}; {load:.0%} busy before the run"


def cpu_load(seconds: float) -> float:
    """The part of all CPUs that is in use. Times from a busy machine mean little."""
    before = _cpu_times()
    time.sleep(seconds)
    total, idle = (after - earlier for after, earlier in zip(_cpu_times(), before, strict=True))
    return 1 - idle / total if total else 0.0


def peer_environment(name: str, *requirements: str) -> Path:
    """The `bin` directory of a virtual environment with these packages, created once and kept in the user's cache.

    Peers are kept apart from Shoal, so that neither can change the other's dependencies.
    """
    place = _peer_directory(name, requirements)
    with place.with_suffix(".lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        if not (place / "complete").exists():
            show_progress(f"installing {' '.join(requirements)} into {place}")
            run_command(sys.executable, "-m", "venv", "--clear", place)
            run_command(
                place / "bin/python", "-m", "pip", "install", "-q", "--disable-pip-version-check", *requirements
            )
            run_command(place / "bin/python", "-m", "compileall", "-qq", "-j0", place / "lib", check=False)
            (place / "complete").touch()
    return place / "bin"


def _peer_directory(name: str, requirements: tuple[str, ...]) -> Path:
    cache = os.environ.get("SHOAL_CACHE") or Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache", "shoal")
    key = hashlib.sha256("\n".join([sys.version, platform.machine(), *requirements]).encode()).hexdigest()[:12]
    place = Path(cache).absolute() / "peers" / f"{name}-{key}"
    place.parent.mkdir(parents=True, exist_ok=True)
    return place


def run_command(*command: str | Path, check: bool = True) -> None:
    done = subprocess.run([str(word) for word in command], stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)
    if check and done.returncode != 0:
        raise BenchError(f"{' '.join(map(str, command))} failed:\n{done.stdout[-4000:]}")


def _cpu_times() -> tuple[int, int]:
    fields = [int(word) for word in Path("/proc/stat").read_text().split("\n", 1)[0].split()[1:]]
    return sum(fields[:8]), fields[3] + fields[4]


def _interrupt(signum: int, frame: object) -> None:
    raise KeyboardInterrupt
