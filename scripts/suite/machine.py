"""Samples the machine while tests run: idle cores, and the CPU time of sandbox hosts."""

from __future__ import annotations

import contextlib
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path

from tests.timing import GROUP, PROCESS, cpu_groups, group_seconds

EVERY_S = 1.0
HOSTS = "shoal-??????-*"
"""Names of hosts' cgroups (src/shoal/sandbox/layout.py)."""


@dataclass
class Samples:
    """What was seen, by the clock of time.monotonic()."""

    cores: list[tuple[float, float, float]] = field(default_factory=list)
    """Moment, core seconds idle and in all since the machine booted."""
    hosts: list[tuple[float, str, float]] = field(default_factory=list)
    """Moment, process of the tests that started the host, CPU seconds since the moment before."""
    clusters: set[tuple[str, str]] = field(default_factory=set)
    """Those that had hosts, and the process of the tests that started them. Benches have some, too."""
    counted: bool = False
    """Whether this machine says what a group has used."""

    def idle(self, begin: float, end: float) -> tuple[float, float]:
        """Core seconds idle and busy between two moments."""
        inside = [row for row in self.cores if begin - EVERY_S <= row[0] <= end + EVERY_S]
        if len(inside) < 2:
            return 0.0, 0.0
        idle, total = inside[-1][1] - inside[0][1], inside[-1][2] - inside[0][2]
        return idle, total - idle


class Sampler:
    """Looks at the machine once a second. What a host uses in its last second is lost."""

    def __init__(self) -> None:
        self.samples = Samples()
        self._root = cpu_groups()
        self._used: dict[str, float] = {}
        self._owners: dict[str, str] = {}
        self._stop = threading.Event()

    @contextmanager
    def running(self) -> Iterator[Samples]:
        thread = threading.Thread(target=self._run, daemon=True)
        thread.start()
        try:
            yield self.samples
        finally:
            self._stop.set()
            thread.join()
            self.look()

    def _run(self) -> None:
        while not self._stop.is_set():
            self.look()
            self._stop.wait(EVERY_S)

    def look(self) -> None:
        now = time.monotonic()
        self.samples.cores.append((now, *core_seconds()))
        used = {}
        for group in self._root.glob(HOSTS) if self._root else ():
            with contextlib.suppress(OSError, ValueError, IndexError):
                used[group.name] = group_seconds(group)
                self.samples.counted = True
                before = self._used.get(group.name, 0.0)
                # A host that was made anew has a new group, which begins at 0.
                delta = used[group.name] - (before if before <= used[group.name] else 0.0)
                if not (owner := self._owners.get(group.name, "")):
                    self._owners[group.name] = owner = find_owner(group)
                if owner:
                    self.samples.clusters.add((group.name[: len(HOSTS) - 1], owner))
                    self.samples.hosts.append((now, owner, delta))
        self._used = used
        self._owners = {name: owner for name, owner in self._owners.items() if name in used}


def core_seconds(text: str | None = None) -> tuple[float, float]:
    """Idle core seconds and all of them since the machine booted."""
    fields = (text or Path("/proc/stat").read_text()).split("\n", 1)[0].split()[1:9]
    ticks = [int(number) / 100 for number in fields]
    return ticks[3] + ticks[4], sum(ticks)


def find_owner(group: Path) -> str:
    """The process of the tests that started a host: what launched it has that in its environment."""
    tag = f"{PROCESS}=".encode()
    for file in (group / "cgroup.procs", group / "launcher/cgroup.procs"):
        with contextlib.suppress(OSError):
            for pid in file.read_text().split():
                with contextlib.suppress(OSError):
                    for variable in Path(f"/proc/{pid}/environ").read_bytes().split(b"\0"):
                        if variable.startswith(tag):
                            return variable.removeprefix(tag).decode()
    return ""


def remove_groups(root: Path | None) -> None:
    """Remove the groups of processes that have ended, those of killed runs too."""
    for group in root.glob(f"{GROUP}*") if root else ():
        with contextlib.suppress(OSError):
            group.rmdir()
