"""Checks whether this machine can run sandbox hosts, and what to install."""

from __future__ import annotations

import os
import shutil
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from shoal.hosts.provider import Request
from shoal.sandbox import images
from shoal.sandbox.cgroups import hierarchies, is_v2_only
from shoal.sandbox.layout import NAME, NAME_RULE
from shoal.spec.finding import Finding

PROGRAMS = {
    "systemd-nspawn": "systemd-container",
    "ip": "iproute2",
    "nft": "nftables",
    "unshare": "util-linux",
    "setsid": "util-linux",
    "taskset": "util-linux",
    "setpriv": "util-linux",
    "mkfs.ext4": "e2fsprogs",
}
"""Program -> its Debian package."""
HOST_MB = 60
"""Memory of one idle host."""
IMAGE_MB = 1500
HOST_DISK_MB = 150


@dataclass(frozen=True)
class MachineFacts:
    """Properties of this machine that the checks need."""

    root: bool
    programs: frozenset[str]
    cpus: int
    memory_mb: int
    available_mb: int
    disk_free_mb: int
    overlay: bool
    loop: bool
    cgroups: bool
    cgroup_v2: bool
    images: frozenset[str] = frozenset()

    @classmethod
    def observe(cls, cache: Path) -> MachineFacts:
        memory = _meminfo()
        there = next(path for path in (cache, *cache.parents) if path.exists())
        return cls(
            root=os.geteuid() == 0,
            programs=frozenset(name for name in (*PROGRAMS, "mmdebstrap", "debootstrap") if _find(name)),
            cpus=len(os.sched_getaffinity(0)),
            memory_mb=memory.get("MemTotal", 0) // 1024,
            available_mb=memory.get("MemAvailable", 0) // 1024,
            disk_free_mb=shutil.disk_usage(there).free >> 20,
            overlay="overlay" in Path("/proc/filesystems").read_text() or _module("overlay"),
            loop=Path("/dev/loop-control").exists() or _module("loop"),
            cgroups=bool({"freezer", "unified"} & set(hierarchies())),
            cgroup_v2=is_v2_only(hierarchies()),
            images=frozenset(image for image in images.SUITES if images.exists(cache, image)),
        )


def find_problems(cache: Path, requests: Sequence[Request], machine: MachineFacts) -> list[Finding]:
    """Every error and warning about these hosts on this machine."""
    return [
        *_tools(machine),
        *_cache(cache),
        *(finding for request in requests for finding in _host(request, machine)),
        *_together(requests, machine),
    ]


def _tools(machine: MachineFacts) -> list[Finding]:
    findings: list[Finding] = []
    if not machine.root:
        findings.append(Finding("error", "the sandbox needs root", fix="run the command with sudo"))
    packages = [package for name, package in PROGRAMS.items() if name not in machine.programs]
    missing = [name for name in PROGRAMS if name not in machine.programs]
    if not machine.programs & {"mmdebstrap", "debootstrap"}:
        missing.append("mmdebstrap")
        packages.append("mmdebstrap")
    if missing:
        install = f"apt-get install {' '.join(dict.fromkeys(packages))}"
        what = f"the sandbox needs these programs: {', '.join(missing)}"
        findings.append(Finding("error", what, fix=f"run `{install}`"))
    if not machine.overlay:
        what = "the sandbox needs overlayfs, and this kernel has none"
        findings.append(Finding("error", what, fix="run `modprobe overlay`"))
    if not machine.cgroups:
        what = "the sandbox needs cgroups, and no cgroup file system is mounted"
        findings.append(Finding("error", what, fix="mount cgroup2 on /sys/fs/cgroup"))
    return findings


def _cache(cache: Path) -> list[Finding]:
    if any(letter in str(cache) for letter in ':,\\"\n'):
        fix = "set SHOAL_CACHE to a directory without colons, commas, quotes and backslashes"
        return [Finding("error", "overlayfs cannot take this cache directory", str(cache), fix)]
    return []


def _host(request: Request, machine: MachineFacts) -> list[Finding]:
    shape = request.shape
    findings: list[Finding] = []

    def bad(what: str, there: str, fix: str) -> None:
        findings.append(Finding("error", what, there, fix, host=request.name))

    if not NAME.fullmatch(request.name):
        bad("not a host name", repr(request.name), NAME_RULE)
    if not NAME.fullmatch(shape.site):
        bad("not a site name", repr(shape.site), NAME_RULE)
    if shape.image not in images.SUITES:
        bad("unknown image", repr(shape.image), f"use one of: {', '.join(images.SUITES)}")
    if shape.cpus is not None and not 1 <= shape.cpus <= machine.cpus:
        bad("`cpus` out of range", str(shape.cpus), f"ask for 1 to {machine.cpus}: this machine has {machine.cpus}")
    if shape.memory_mb is not None and not HOST_MB <= shape.memory_mb <= machine.memory_mb:
        fix = f"ask for {HOST_MB}M to {machine.memory_mb}M: this machine has {machine.memory_mb}M"
        bad("`memory` out of range", f"{shape.memory_mb}M", fix)
    if shape.disk_mb is not None and shape.disk_mb < 16:
        bad("`disk` too small for a host", f"{shape.disk_mb}M", "ask for at least 16M")
    if shape.disk_mb is not None and not machine.loop:
        bad("`disk` needs loop devices", "no /dev/loop-control", "run `modprobe loop`, or leave `disk` out")
    if not 0 <= shape.gpus <= 64:
        bad("`gpus` out of range", str(shape.gpus), "ask for 0 to 64")
    if shape.cgroups and shape.image != "debian12" and not machine.cgroup_v2:
        fix = "use `image: debian12`, or leave `cgroups` out"
        bad("`cgroups` on a machine with cgroup v1", f"image {shape.image}", fix)
    return findings


def _together(requests: Sequence[Request], machine: MachineFacts) -> list[Finding]:
    findings: list[Finding] = []
    need = len(requests) * HOST_MB
    if need > machine.available_mb:
        fix = "ask for fewer hosts, or free memory"
        findings.append(
            Finding("error", f"{len(requests)} hosts need {need} MB of memory", f"{machine.available_mb} MB free", fix)
        )
    asked = sum(request.shape.memory_mb or 0 for request in requests)
    if len(requests) > 1 and asked > machine.memory_mb:
        fix = "fine while the hosts do not use it all"
        findings.append(Finding("warning", f"`memory` of all hosts is {asked} MB", f"{machine.memory_mb} MB here", fix))
    missing = {request.shape.image for request in requests} & set(images.SUITES) - machine.images
    disk = len(missing) * IMAGE_MB + len(requests) * HOST_DISK_MB
    if disk > machine.disk_free_mb:
        fix = "free some, or set SHOAL_CACHE to a directory on a larger disk"
        findings.append(Finding("error", f"the cache needs {disk} MB of disk", f"{machine.disk_free_mb} MB free", fix))
    return findings


def _meminfo() -> dict[str, int]:
    lines = (line.split() for line in Path("/proc/meminfo").read_text().splitlines())
    return {words[0].rstrip(":"): int(words[1]) for words in lines if len(words) > 1}


def _find(program: str) -> str | None:
    """The PATH of an ordinary user often lacks the sbin directories."""
    path = os.pathsep.join([os.environ.get("PATH", ""), "/usr/local/sbin", "/usr/sbin", "/sbin"])
    return shutil.which(program, path=path)


def _module(name: str) -> bool:
    """Whether the kernel could load the module."""
    release = os.uname().release
    return any(Path("/lib/modules", release).glob(f"kernel/**/{name}.ko*"))
