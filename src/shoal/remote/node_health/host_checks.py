"""Checks of disks, shares, memory, processes, network links and clocks. Each yields its evidence, or nothing."""

from __future__ import annotations

import glob
import os
import signal
import time
from typing import Callable, Iterator

from .node import Node, read_number, read_text

DIRECTORIES = ("/tmp", "/var/tmp", "/var/lib/slurm/slurmd", "/var/log/slurm")  # nosec B108 - only checked
MIN_FREE_PERCENT = 2
SHARE_KINDS = ("nfs", "nfs4", "fuse.sshfs", "fuse", "cifs", "lustre", "ceph", "fuse.ceph", "beegfs")
SHARE_TIMEOUT_S = 5.0
RECENT_S = 900
"""Messages of the kernel about disks count so long."""
DISK_ERRORS = ("I/O error, dev ", "EXT4-fs error", "Remounting filesystem read-only", "XFS (", "critical medium error")
MAX_CORRECTED_ERRORS = 9
"""Corrected errors of memory since the boot: more of them announce a module that fails."""
IGNORED_LINKS = ("lo", "docker", "veth", "br-", "virbr", "shoal", "wg", "tailscale", "host")


def check_full_disks(node: Node) -> Iterator[str]:
    for mount, room in _file_systems().items():
        if room.f_blocks and room.f_bavail * 100 < MIN_FREE_PERCENT * room.f_blocks:
            free, total = room.f_bavail * room.f_frsize >> 20, room.f_blocks * room.f_frsize >> 20
            yield f"{mount}: {free} of {total} MB free"


def check_inodes(node: Node) -> Iterator[str]:
    for mount, room in _file_systems().items():
        if room.f_files and room.f_favail * 100 < MIN_FREE_PERCENT * room.f_files:
            yield f"{mount}: {room.f_favail} of {room.f_files} inodes free"


def check_writes(node: Node) -> Iterator[str]:
    """A real write: a disk with errors may still be mounted for writing."""
    full = {*check_full_disks(node), *check_inodes(node)}
    for path in DIRECTORIES:
        if os.path.isdir(path) and not any(text.startswith(f"{_mount_of(path)}:") for text in full):
            name = f"{path}/.shoal-health-{os.getpid()}"
            try:
                file = os.open(name, os.O_CREAT | os.O_EXCL | os.O_WRONLY, 0o600)
                try:
                    os.write(file, b"\0")
                finally:
                    os.close(file)
                    os.unlink(name)
            except OSError as error:
                yield f"{path}: {error.strerror}"


def check_shares(node: Node) -> Iterator[str]:
    """Shares that do not answer. Each is asked by a process of its own, which a dead server may hold for ever."""
    waiting = {}
    pending = node.memory.get("hanging_shares") or {}
    hanging = {}
    for mount, kind in shares(read_text("/proc/self/mounts")):
        pid, start = pending.get(mount, (0, ""))
        process = node.processes.get(pid)
        if process is not None and process.start == start:  # that of an earlier run still waits
            hanging[mount] = [pid, start]
            yield f"{mount} ({kind}) does not answer"
            continue
        pid = os.fork()
        if not pid:
            _ask_share(mount)
        waiting[mount] = pid, kind
    end = time.monotonic() + SHARE_TIMEOUT_S
    for mount, (pid, kind) in waiting.items():
        status = _wait(pid, end)
        if status is None:
            stat = read_text(f"/proc/{pid}/stat").rpartition(")")[2].split()
            hanging[mount] = [pid, stat[19] if len(stat) > 19 else ""]
            os.kill(pid, signal.SIGKILL)
            yield f"{mount} ({kind}) does not answer within {SHARE_TIMEOUT_S:.0f} s"
        elif status:
            yield f"{mount} ({kind}): {os.strerror(status)}"
    node.memory["hanging_shares"] = hanging


def shares(mounts: str) -> Iterator[tuple[str, str]]:
    """The shares of the node, each with its kind. What a user has mounted is none: it may never answer."""
    for line in mounts.splitlines():
        _, mount, kind, options = line.split()[:4]
        owners = [option for option in options.split(",") if option.startswith("user_id=")]
        if kind in SHARE_KINDS and owners in ([], ["user_id=0"]):
            yield mount.replace("\\040", " "), kind


def _ask_share(mount: str) -> None:
    """In the child: end with 0, or with the number of the error."""
    status = 0
    try:
        os.statvfs(mount)
    except OSError as error:
        status = error.errno or 1
    finally:
        os._exit(min(status, 255))


def _wait(pid: int, end: float) -> int | None:
    while True:
        done, status = os.waitpid(pid, os.WNOHANG)
        if done:
            return status >> 8
        if time.monotonic() >= end:
            return None
        time.sleep(0.01)


def check_stuck_processes(node: Node) -> Iterator[str]:
    """Processes that wait in the kernel, and did so when the last run looked."""
    waiting = {str(pid): process.start for pid, process in node.processes.items() if process.state == "D"}
    last = node.remember("waiting", waiting) or {}
    for pid, start in waiting.items():
        if last.get(pid) == start:
            where = read_text(f"/proc/{pid}/wchan").strip("0")
            yield f"{node.processes[int(pid)]}{' in ' + where if where else ''}"


def check_disk_errors(node: Node) -> Iterator[str]:
    for text in node.kernel_log(RECENT_S):
        if any(word in text for word in DISK_ERRORS) and ("XFS (" not in text or "orruption" in text):
            yield text
    for path in glob.glob("/sys/block/md*/md/degraded"):
        if read_number(path):
            yield f"{path.split('/')[3]} has lost {read_number(path)} of its disks"


def check_memory_errors(node: Node) -> Iterator[str]:
    for folder in glob.glob("/sys/devices/system/edac/mc/mc[0-9]*"):
        lost, corrected = read_number(f"{folder}/ue_count"), read_number(f"{folder}/ce_count")
        if lost:
            yield f"{os.path.basename(folder)}: {lost} errors that could not be corrected"
        elif corrected and corrected > MAX_CORRECTED_ERRORS:
            yield f"{os.path.basename(folder)}: {corrected} corrected errors"


def check_links(node: Node) -> Iterator[str]:
    """Network links of hardware that are slower than they were, or down."""
    for folder in sorted(glob.glob("/sys/class/net/*")):
        name = os.path.basename(folder)
        if name.startswith(IGNORED_LINKS) or not os.path.exists(f"{folder}/device"):
            continue
        speed = max(0, read_number(f"{folder}/speed") or 0)
        best = node.baseline.best(f"link {name}", speed)
        if speed < best:
            yield f"{name}: {f'{speed} Mbit/s' if speed else 'down'}, before {best:.0f} Mbit/s"
    for port in sorted(glob.glob("/sys/class/infiniband/*/ports/*")):
        name = "/".join((port.split("/")[4], port.split("/")[6]))
        rate = int((read_text(f"{port}/rate").split() or ["0"])[0].partition(".")[0])
        rate = rate if "ACTIVE" in read_text(f"{port}/state") else 0
        best = node.baseline.best(f"InfiniBand {name}", rate)
        if rate < best:
            yield f"{name}: {f'{rate} Gbit/s' if rate else 'not active'}, before {best:.0f} Gbit/s"


def check_clock_source(node: Node) -> Iterator[str]:
    """The kernel gives up a time stamp counter that drifts; each look at the clock then takes longer."""
    now = read_text("/sys/devices/system/clocksource/clocksource0/current_clocksource").strip()
    first = node.baseline.first("clock source", now) if now else ""
    if first and now != first:
        yield f"{now}, before {first}"


def check_governor(node: Node) -> Iterator[str]:
    now = read_text("/sys/devices/system/cpu/cpu0/cpufreq/scaling_governor").strip()
    first = node.baseline.first("governor", now) if now else ""
    if first and now != first:
        yield f"{now}, before {first}"


def check_sensors(node: Node) -> Iterator[str]:
    """Alarms of fans, power and heat that the node did not have when it was first seen: some boards always do."""
    alarms = []
    for path in sorted(glob.glob("/sys/class/hwmon/hwmon*/*_alarm")):
        if read_number(path) and os.path.basename(path).startswith(("fan", "power", "temp")):
            chip = read_text(f"{os.path.dirname(path)}/name").strip()
            alarms.append(f"{chip} {os.path.basename(path)[: -len('_alarm')]}")
    known = node.baseline.values.setdefault("alarms", alarms)
    for alarm in alarms:
        if alarm not in known:
            yield f"alarm: {alarm}"


HOST_CHECKS: dict[str, Callable[[Node], Iterator[str]]] = {
    "disk-full": check_full_disks,
    "inodes-full": check_inodes,
    "read-only": check_writes,
    "share-hangs": check_shares,
    "processes-stuck": check_stuck_processes,
    "disk-errors": check_disk_errors,
    "memory-errors": check_memory_errors,
    "link-slow": check_links,
    "clock-source": check_clock_source,
    "cpu-governor": check_governor,
    "sensors": check_sensors,
}


def _mount_of(path: str) -> str:
    while not os.path.ismount(path):
        path = os.path.dirname(path)
    return path


def _file_systems() -> dict[str, os.statvfs_result]:
    """The file systems below Slurm's and the jobs' directories. None is a share: those may hang."""
    mounts = {_mount_of(path) for path in DIRECTORIES if os.path.isdir(path)}
    return {mount: os.statvfs(mount) for mount in sorted(mounts)}
