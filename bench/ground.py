"""What the benches on sandbox hosts stand on: this machine, how busy it is, and plain ssh to the hosts."""

from __future__ import annotations

import os
import platform
import time
from collections.abc import Iterable
from pathlib import Path

from shoal.hosts.api import Target


class BenchFailed(Exception):
    """The bench cannot go on: one of those it compares failed, or did not do what it is measured for."""


def machine(*versions: str) -> str:
    """The first line of a table: when and where it was measured, with what, and how much else went on there."""
    memory = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") >> 30
    known = (f"{os.cpu_count()} CPUs", f"{memory} GiB", f"Python {platform.python_version()}", *versions)
    return f"{time.strftime('%Y-%m-%d')}: {', '.join(known)}; {_busy():.0%} busy before the run"


def write_ssh_config(directory: Path, targets: Iterable[Target]) -> None:
    """`ssh -F directory/ssh_config NAME` reaches the sandbox hosts, as a person's own ssh would."""
    known_hosts = directory / "known_hosts"
    hosts = list(targets)
    known_hosts.write_text("".join(f"{target.address} {target.host_key}\n" for target in hosts))
    own = "".join(f"Host {target.name}\n  HostName {target.address}\n" for target in hosts)
    (directory / "ssh_config").write_text(
        f"{own}Host *\n  User root\n  StrictHostKeyChecking yes\n  IdentitiesOnly yes\n  IdentityAgent none\n"
        f"  UserKnownHostsFile {known_hosts}\n  IdentityFile {hosts[0].identity}\n"
    )


def _busy(seconds: float = 3.0) -> float:
    """The part of all CPUs that others use just now. Figures from a busy machine say little."""
    before = _cpu_times()
    time.sleep(seconds)
    total, idle = (after - earlier for after, earlier in zip(_cpu_times(), before, strict=True))
    return 1 - idle / total


def _cpu_times() -> tuple[int, int]:
    fields = [int(word) for word in Path("/proc/stat").read_text().split("\n", 1)[0].split()[1:]]
    return sum(fields[:8]), fields[3] + fields[4]
