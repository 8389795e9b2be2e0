"""The cgroups of one host: they count, limit, freeze and kill its processes together.

On a machine with cgroup v1 a host has a group in every hierarchy; on one with v2 there is a single one.
"""

from __future__ import annotations

import asyncio
import contextlib
import errno
import os
import signal
from dataclasses import dataclass
from pathlib import Path

from shoal.errors import ProviderError

KILL_TIMEOUT_S = 60.0
FOR_SLURM = ("cpuset", "cpu", "memory", "pids")
"""Controllers of cgroup v2 that Slurm's plugins use. Devices need none there."""


def hierarchies(mounts: str | None = None) -> dict[str, Path]:
    """Where the machine's cgroup hierarchies are: controller (v1) or "unified" (v2) -> mount point."""
    mounted: dict[str, Path] = {}
    for line in (mounts if mounts is not None else Path("/proc/self/mounts").read_text()).splitlines():
        _, where, kind, options, *_ = line.split()
        if kind == "cgroup2":
            mounted["unified"] = Path(where)
        elif kind == "cgroup":
            mounted[Path(where).name if "name=" in options else options.split(",")[-1]] = Path(where)
    return mounted


def is_v2_only(mounted: dict[str, Path]) -> bool:
    return set(mounted) == {"unified"}


@dataclass(frozen=True)
class HostCgroups:
    """One host's group in every hierarchy."""

    name: str
    roots: dict[str, Path]

    @property
    def paths(self) -> list[Path]:
        return [root / self.name for root in self.roots.values()]

    def make(self, cpus: list[int], memory_mb: int | None, *, controllers: bool = False) -> None:
        """Make the groups and set their limits. A limit that this machine's hierarchy does not know is left out.

        With `controllers` the host may make groups of its own under the unified hierarchy's controllers.
        """
        for controller, root in self.roots.items():
            group = root / self.name
            group.mkdir(exist_ok=True)
            if controller == "cpuset":
                (group / "cpuset.mems").write_text((root / "cpuset.mems").read_text())
                (group / "cpuset.cpus").write_text(",".join(str(cpu) for cpu in cpus))
            if controller == "memory":
                (group / "memory.limit_in_bytes").write_text(str(memory_mb << 20) if memory_mb else "-1")
            if controller == "unified":
                for name in FOR_SLURM if controllers else ("memory",) if memory_mb else ():
                    with contextlib.suppress(OSError):
                        (root / "cgroup.subtree_control").write_text(f"+{name}")
                with contextlib.suppress(OSError):
                    (group / "memory.max").write_text(str(memory_mb << 20) if memory_mb else "max")

    def pids(self) -> list[int]:
        """Every process of the host, as this machine numbers them."""
        return sorted(set().union(*(_pids_below(path) for path in self.paths)))

    @property
    def alive(self) -> bool:
        """Whether the host has a process. Looks at one hierarchy only, so it may be asked often."""
        return bool(_pids_below(self.freezer()[0].parent))

    def leader(self) -> int | None:
        """The host's PID 1."""
        for pid in sorted(_pids_below(self.freezer()[0].parent)):
            with contextlib.suppress(OSError):
                status = Path(f"/proc/{pid}/status").read_text()
                numbers = next(line for line in status.splitlines() if line.startswith("NSpid:")).split()[1:]
                if len(numbers) > 1 and numbers[-1] == "1":
                    return pid
        return None

    @property
    def frozen(self) -> bool:
        with contextlib.suppress(OSError):
            return self.freezer()[0].read_text().strip() in ("FROZEN", "FREEZING", "1")
        return False

    def thaw(self) -> None:
        path, (thawed, _) = self.freezer()
        path.write_text(thawed)

    async def kill(self) -> None:
        """End every process of the host at once, frozen or not."""
        for _ in range(int(KILL_TIMEOUT_S / 0.05)):
            pids = self.pids()
            if not pids:
                return
            for pid in pids:
                with contextlib.suppress(ProcessLookupError):
                    os.kill(pid, signal.SIGKILL)
            if self.frozen:  # a frozen process takes no signal, not even this one
                with contextlib.suppress(OSError):
                    self.thaw()
            await asyncio.sleep(0.05)
        raise ProviderError(f"processes of {self.name} do not end: {self.pids()}", hint="look at them with `ps -l`")

    def remove(self) -> bool:
        """Remove the groups. Returns False while a process is in them."""
        for path in self.paths:
            for below, _, _ in os.walk(path, topdown=False):
                try:
                    Path(below).rmdir()
                except FileNotFoundError:
                    continue
                except OSError as error:
                    if error.errno != errno.EBUSY:
                        raise
                    return False
        return True

    def freezer(self) -> tuple[Path, tuple[str, str]]:
        """The file that freezes and thaws, and what to write into it: thawed, frozen."""
        if "freezer" in self.roots:
            return self.roots["freezer"] / self.name / "freezer.state", ("THAWED", "FROZEN")
        return self.roots["unified"] / self.name / "cgroup.freeze", ("0", "1")


def groups_named(prefix: str, roots: dict[str, Path]) -> list[HostCgroups]:
    """Every host group whose name has this prefix."""
    names = {path.name for root in roots.values() for path in root.glob(f"{prefix}*") if path.is_dir()}
    return [HostCgroups(name, roots) for name in sorted(names)]


def _pids_below(group: Path) -> set[int]:
    """The processes in a group and those below it. Groups may vanish; 0 is a process outside our namespace."""
    pids: set[int] = set()
    for below, _, _ in os.walk(group):
        with contextlib.suppress(OSError):
            pids.update(int(pid) for pid in Path(below, "cgroup.procs").read_text().split())
    return pids - {0}
