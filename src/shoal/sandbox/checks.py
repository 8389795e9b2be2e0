"""Checks whether this machine can run sandbox hosts, and what to install."""

from __future__ import annotations

import os
import shutil
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

from shoal.hosts.provider import Request
from shoal.sandbox import images, qemu, vm
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
VM_DISK_MB = 500
"""What a virtual machine's disk grows by until Slurm runs on it."""


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
    architecture: str = "x86_64"
    virtiofsd: bool = True
    tun: bool = True
    kvm: bool = True
    """Whether KVM may work: until a guest has started with it, nobody knows."""

    @classmethod
    def observe(cls, cache: Path) -> MachineFacts:
        memory = _meminfo()
        existing = next(path for path in (cache, *cache.parents) if path.exists())
        return cls(
            root=os.geteuid() == 0,
            programs=frozenset(
                name for name in (*PROGRAMS, *qemu.PACKAGES, "mmdebstrap", "debootstrap") if _find(name)
            ),
            cpus=len(os.sched_getaffinity(0)),
            memory_mb=memory.get("MemTotal", 0) // 1024,
            available_mb=memory.get("MemAvailable", 0) // 1024,
            disk_free_mb=shutil.disk_usage(existing).free >> 20,
            overlay="overlay" in Path("/proc/filesystems").read_text() or _module("overlay"),
            loop=Path("/dev/loop-control").exists() or _module("loop"),
            cgroups=bool({"freezer", "unified"} & set(hierarchies())),
            cgroup_v2=is_v2_only(hierarchies()),
            images=frozenset(image for image in images.SUITES if images.exists(cache, image)),
            architecture=os.uname().machine,
            virtiofsd=qemu.find_virtiofsd() is not None,
            tun=Path("/dev/net/tun").exists(),
            kvm=Path("/dev/kvm").exists() and qemu.recorded_accelerator(cache) != "tcg",
        )


def find_problems(cache: Path, requests: Sequence[Request], machine: MachineFacts) -> list[Finding]:
    """Every error and warning about these hosts on this machine."""
    return [
        *_machine_problems(cache, machine),
        *(_vm_problems(machine) if any(request.shape.vm for request in requests) else ()),
        *(finding for request in requests for finding in _host_problems(request, machine)),
        *_size_problems(requests, machine),
    ]


def _machine_problems(cache: Path, machine: MachineFacts) -> list[Finding]:
    missing = {name: package for name, package in PROGRAMS.items() if name not in machine.programs}
    if not machine.programs & {"mmdebstrap", "debootstrap"}:
        missing["mmdebstrap"] = "mmdebstrap"
    install = f"apt-get install {' '.join(dict.fromkeys(missing.values()))}"
    bad_cache = any(letter in str(cache) for letter in ':,\\"\n')
    cache_fix = "set SHOAL_CACHE to a directory without colons, commas, quotes and backslashes"
    no_overlay = "the sandbox needs overlayfs, and this kernel has none"
    no_cgroups = "the sandbox needs cgroups, and no cgroup file system is mounted"
    rows = (
        (not machine.root, "the sandbox needs root", "", "run the command with sudo, or install podman"),
        (bool(missing), f"the sandbox needs these programs: {', '.join(missing)}", "", f"run `{install}`"),
        (not machine.overlay, no_overlay, "", "run `modprobe overlay`"),
        (not machine.cgroups, no_cgroups, "", "mount cgroup2 on /sys/fs/cgroup"),
        (bad_cache, "overlayfs cannot take this cache directory", str(cache), cache_fix),
    )
    return [Finding("error", what, found, fix) for wrong, what, found, fix in rows if wrong]


def _vm_problems(machine: MachineFacts) -> list[Finding]:
    """What virtual machines need beside what containers do."""
    missing = {
        name: qemu.PACKAGES[name] for name in qemu.programs(machine.architecture) if name not in machine.programs
    }
    if not machine.virtiofsd:
        missing["virtiofsd"] = "virtiofsd"
    install = f"run `apt-get install {' '.join(dict.fromkeys(missing.values()))}`"
    if not machine.virtiofsd:
        install += "; Debian 12 has virtiofsd in qemu-system-common"
    unknown = machine.architecture not in qemu.SYSTEMS
    kinds = f"use `kind: container`: virtual machines run on {' and '.join(qemu.SYSTEMS)}"
    tun_fix = "run `modprobe tun`"
    rows = (
        (unknown, "no virtual machines on this CPU architecture", machine.architecture, kinds),
        (bool(missing), f"virtual machines need these programs: {', '.join(missing)}", "", install),
        (not machine.tun, "virtual machines need tap devices", "no /dev/net/tun", tun_fix),
    )
    findings = [Finding("error", what, found, fix) for wrong, what, found, fix in rows if wrong]
    if not machine.kvm:
        slow = "KVM is not usable: virtual machines are emulated, and boot in minutes"
        findings.append(Finding("info", slow, fix="use a machine with KVM, or `kind: container`"))
    return findings


def _host_problems(request: Request, machine: MachineFacts) -> list[Finding]:
    shape, cpus, memory, disk = request.shape, request.shape.cpus, request.shape.memory_mb, request.shape.disk_mb
    bad_cpus = cpus is not None and not 1 <= cpus <= machine.cpus
    cpus_fix = f"ask for 1 to {machine.cpus}: this machine has {machine.cpus}"
    bad_memory = memory is not None and not HOST_MB <= memory <= machine.memory_mb
    memory_fix = f"ask for {HOST_MB}M to {machine.memory_mb}M: this machine has {machine.memory_mb}M"
    no_loop = disk is not None and not machine.loop and not shape.vm
    loop_fix = "run `modprobe loop`, or leave `disk` out"
    no_cgroups = shape.cgroups and not shape.vm and shape.image != "debian12" and not machine.cgroup_v2
    cgroups_fix = "use `image: debian12`, or leave `cgroups` out"
    images_fix = f"use one of: {', '.join(images.SUITES)}"
    rows = (
        (not NAME.fullmatch(request.name), "not a host name", repr(request.name), NAME_RULE),
        (not NAME.fullmatch(shape.site), "not a site name", repr(shape.site), NAME_RULE),
        (shape.image not in images.SUITES, "unknown image", repr(shape.image), images_fix),
        (bad_cpus, "`cpus` out of range", str(cpus), cpus_fix),
        (bad_memory, "`memory` out of range", f"{memory}M", memory_fix),
        (disk is not None and disk < 16, "`disk` too small for a host", f"{disk}M", "ask for at least 16M"),
        (no_loop, "`disk` needs loop devices", "no /dev/loop-control", loop_fix),
        (not 0 <= shape.gpus <= 64, "`gpus` out of range", str(shape.gpus), "ask for 0 to 64"),
        (no_cgroups, "`cgroups` on a machine with cgroup v1", f"image {shape.image}", cgroups_fix),
    )
    return [Finding("error", what, found, fix, host=request.name) for wrong, what, found, fix in rows if wrong]


def _size_problems(requests: Sequence[Request], machine: MachineFacts) -> Iterator[Finding]:
    """All hosts together fit on the machine."""
    need = sum(vm.memory_mb(request.shape) if request.shape.vm else HOST_MB for request in requests)
    if need > machine.available_mb:
        what, free = f"{len(requests)} hosts need {need} MB of memory", f"{machine.available_mb} MB free"
        yield Finding("error", what, free, "ask for fewer hosts, or free memory")
    memory = sum(request.shape.memory_mb or 0 for request in requests)
    if len(requests) > 1 and memory > machine.memory_mb:
        fix = "fine while the hosts do not use it all"
        yield Finding("warning", f"`memory` of all hosts is {memory} MB", f"{machine.memory_mb} MB here", fix)
    missing = {request.shape.image for request in requests} & set(images.SUITES) - machine.images
    machines = [request.shape for request in requests if request.shape.vm]
    disk = len(missing) * IMAGE_MB + len(requests) * HOST_DISK_MB
    disk += len({shape.image for shape in machines}) * IMAGE_MB + len(machines) * VM_DISK_MB
    if disk > machine.disk_free_mb:
        fix = "free some, or set SHOAL_CACHE to a directory on a larger disk"
        yield Finding("error", f"the cache needs {disk} MB of disk", f"{machine.disk_free_mb} MB free", fix)


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
