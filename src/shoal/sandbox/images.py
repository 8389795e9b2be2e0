"""Images: the root file systems that hosts are made of. Built once from Debian's packages, then kept in the cache.

An image also holds Slurm's packages, downloaded and not installed, so that installing them on a host needs no network.
"""

# Files here are small and local: reading one takes less time than a thread would.
# ruff: noqa: ASYNC240
from __future__ import annotations

import asyncio
import contextlib
import hashlib
import json
import os
import re
import shutil
import time
from pathlib import Path

from shoal.errors import ProviderError
from shoal.hosts.provider import Progress
from shoal.local_files import locked
from shoal.sandbox.programs import call, call_logged, last_lines

SUITES = {"debian11": "bullseye", "debian12": "bookworm", "debian13": "trixie", "sid": "sid"}
PACKAGES = (
    *("systemd", "systemd-sysv", "dbus", "udev", "kmod", "procps", "iproute2", "iputils-ping"),
    *("openssh-server", "sudo", "python3", "ca-certificates", "less"),
)
DOWNLOADED_PACKAGES = ("munge", "slurmd", "slurmctld", "slurm-client", "slurm-wlm-basic-plugins", "nftables")
PACKAGES_OF_IMAGES = {"debian11": ("nftables",), "debian12": (*DOWNLOADED_PACKAGES, "libpmix2")}
"""Other ones for an image: Debian 11's Slurm is too old, and that of Debian 12 does not depend on PMIx."""
USER, USER_HOME = "shoal", "/var/lib/shoal-user"
"""An ordinary user with sudo, beside root. Not below /home, which may become a share: kernel NFS mounts it as a whole,
and `up` refuses to hide what is there."""
USERADD = ("useradd", "--create-home", "--home-dir", USER_HOME, "--shell", "/bin/bash", "--uid", "1000", USER)

DPKG = """\
force-unsafe-io
path-exclude=/usr/share/doc/*
path-exclude=/usr/share/man/*
path-exclude=/usr/share/locale/*
"""
APT = """\
APT::Periodic::Enable "0";
APT::Install-Recommends "false";
Acquire::Languages "none";
Acquire::Retries "3";
Binary::apt::APT::Keep-Downloaded-Packages "true";
APT::Keep-Downloaded-Packages "true";
"""
SSHD = """\
HostKey /etc/ssh/ssh_host_ed25519_key
AuthorizedKeysFile /etc/ssh/authorized_keys .ssh/authorized_keys
PermitRootLogin prohibit-password
PasswordAuthentication no
MaxStartups 100
"""
JOURNAL = "[Journal]\nStorage=volatile\nRuntimeMaxUse=16M\n"
BOOT_UNIT = """\
[Unit]
Description=What this sandbox host was given: memory and cgroups
DefaultDependencies=no
Before=sysinit.target
After=local-fs.target
ConditionPathExistsGlob=/etc/shoal-sandbox.d/*

[Service]
Type=oneshot
RemainAfterExit=yes
ExecStart=/usr/local/lib/shoal-sandbox-boot

[Install]
WantedBy=sysinit.target
"""
BOOT_PROGRAM = """\
#!/bin/sh
# The memory this host was given, as free(1) and Slurm read it.
given=/etc/shoal-sandbox.d
[ ! -e $given/meminfo ] || mount --bind -o ro $given/meminfo /proc/meminfo
# cgroup v1: nspawn mounts the controllers read-only; Slurm's cgroup plugins make groups in these. Only this mount is
# made writable ("bind"): the kernel refuses to remount a hierarchy as such once it has groups.
if [ -e $given/cgroups ]; then
    for controller in freezer devices cpuset pids memory; do
        mount -o remount,bind,rw "/sys/fs/cgroup/$controller" || true
    done
fi
exit 0
"""
FILES = {
    "etc/dpkg/dpkg.cfg.d/shoal": (DPKG, 0o644),
    "etc/apt/apt.conf.d/90shoal": (APT, 0o644),
    "etc/ssh/sshd_config.d/shoal.conf": (SSHD, 0o644),
    "etc/systemd/journald.conf.d/shoal.conf": (JOURNAL, 0o644),
    "etc/systemd/system/shoal-sandbox.service": (BOOT_UNIT, 0o644),
    "usr/local/lib/shoal-sandbox-boot": (BOOT_PROGRAM, 0o755),
    "etc/sudoers.d/shoal": (f"{USER} ALL=(ALL) NOPASSWD: ALL\n", 0o440),
}
# What a throw-away host can do without: boots are faster, and nothing of them fails.
MASKED = (
    *("apt-daily.timer", "apt-daily-upgrade.timer", "dpkg-db-backup.timer", "e2scrub_all.timer"),
    *("e2scrub_reap.service", "systemd-tmpfiles-clean.timer", "fstrim.timer", "motd-news.timer"),
    *("console-getty.service", "getty@tty1.service", "systemd-logind.service", "systemd-networkd.service"),
    *("systemd-networkd.socket", "systemd-resolved.service", "systemd-timesyncd.service", "systemd-udevd.service"),
    *("systemd-udev-trigger.service", "systemd-modules-load.service", "sys-kernel-debug.mount"),
    *("sys-kernel-tracing.mount", "dev-hugepages.mount", "ssh.socket", "sshd-keygen.service"),
    *("systemd-pcrlock-make-policy.service", "systemd-update-utmp.service", "ldconfig.service"),
    *("systemd-journal-catalog-update.service", "systemd-hwdb-update.service", "systemd-update-done.service"),
    "systemd-update-utmp-runlevel.service",
)
STAGES = 14
"""About how many `I:` lines mmdebstrap prints; for the progress bar only."""


def require(image: str) -> None:
    """Raise ProviderError for an unknown image."""
    if image not in SUITES:
        raise ProviderError(f"the sandbox has no image {image!r}", hint=f"use one of: {', '.join(SUITES)}")


async def ensure(cache: Path, image: str, progress: Progress) -> Path:
    """The image's directory, built first if it is not in the cache. Two processes at once build it once."""
    require(image)
    settings = await apt_settings()
    room = cache / "images" / image
    place = room / _recipe_hash(image, settings)
    if place.is_dir():
        return place
    room.mkdir(parents=True, exist_ok=True)
    lock = room / ".lock"
    lock.touch()
    async with locked(lock):
        if not place.is_dir():
            await _build(cache, image, place, settings, progress)
    return place


def exists(cache: Path, image: str) -> bool:
    """Whether some build of the image is in the cache."""
    return any(path.is_dir() and not path.name.startswith(".") for path in (cache / "images" / image).glob("*"))


async def _build(cache: Path, image: str, place: Path, settings: str, progress: Progress) -> None:
    room = place.parent
    for left in room.glob(".building-*"):
        await remove_tree(left)
    building = room / f".building-{os.getpid()}"
    log = room / "build.log"
    log.write_bytes(b"")
    what = f"building image {image}"
    progress(what, 0.0)
    watching = asyncio.create_task(_watch(log, what, progress))
    mask = os.umask(0o022)  # the operator's may be stricter; the image's directories are for all of its users
    try:
        await _bootstrap(image, building, log)
        await _finish(image, building, settings, log)
    finally:
        os.umask(mask)
        watching.cancel()
        with contextlib.suppress(asyncio.CancelledError):
            await watching
    building.rename(place)
    await _prune(cache, place)
    progress(what, 1.0)


async def _bootstrap(image: str, root: Path, log: Path) -> None:
    """Unpack and configure the base system. No mirror is named: the tool's own default serves."""
    suite, packages = SUITES[image], ",".join(PACKAGES)
    # It dies with us, and its mounts and processes die with it: a kill in the middle leaves only files.
    alone = ["setpriv", "--pdeathsig", "KILL"]
    alone += ["unshare", "--mount", "--propagation", "private", "--pid", "--fork", "--kill-child", "--mount-proc"]
    if shutil.which("mmdebstrap"):
        options = [f"--dpkgopt={line}" for line in DPKG.splitlines()]
        options += [f"--aptopt={line}" for line in APT.splitlines()]
        options += ['--aptopt=Acquire::Check-Valid-Until "false"', "--skip=cleanup/apt"]
        tool = ["mmdebstrap", "--mode=root", *options]
    else:
        tool = ["debootstrap"]
    command = [*tool, "--variant=minbase", f"--include={packages}", suite, str(root)]
    await _step([*alone, *command], log, f"building image {image}")


async def _finish(image: str, root: Path, settings: str, log: Path) -> None:
    """Everything after the base system: our settings, the user, Slurm's packages in apt's cache."""
    for name, (text, mode) in {**FILES, "etc/apt/apt.conf.d/91machine": (settings, 0o644)}.items():
        path = root / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
        path.chmod(mode)
    for unit in MASKED:
        link = root / "etc/systemd/system" / unit
        link.unlink(missing_ok=True)
        link.symlink_to("/dev/null")
    certificates = Path("/usr/local/share/ca-certificates")
    if certificates.is_dir():
        shutil.copytree(certificates, root / "usr/local/share/ca-certificates", dirs_exist_ok=True)
    shutil.copyfile("/etc/resolv.conf", root / "etc/resolv.conf")
    chroot = ["chroot", str(root)]
    what = f"finishing image in {root}"
    await _step([*chroot, "update-ca-certificates"], log, what)
    await _step([*chroot, *USERADD], log, what)
    await _step([*chroot, "systemctl", "enable", "ssh.service", "shoal-sandbox.service"], log, what)
    await _step([*chroot, "apt-get", "clean"], log, what)
    if not any((root / "var/lib/apt/lists").glob("*Packages*")):
        await _step([*chroot, "apt-get", "update"], log, what)
    download = ["apt-get", "install", "--yes", "--download-only", "--no-install-recommends"]
    await _step([*chroot, *download, *PACKAGES_OF_IMAGES.get(image, DOWNLOADED_PACKAGES)], log, what)
    for key in (root / "etc/ssh").glob("ssh_host_*"):
        key.unlink()
    for name in ("etc/hostname", "etc/machine-id", "var/lib/dbus/machine-id", "etc/resolv.conf"):
        (root / name).unlink(missing_ok=True)


async def _step(argv: list[str], log: Path, what: str) -> None:
    path = "/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin"
    status = await call_logged(*argv, log=log, env={"PATH": path})
    if status != 0:
        output = last_lines(log.read_text(errors="replace"))
        hint = f"the whole log is {log}; see that this machine reaches its package mirror, then try again"
        raise ProviderError(f"{what} failed, `{argv[0]}` ended with status {status}: {output}", hint=hint)


async def _watch(log: Path, what: str, progress: Progress) -> None:
    """Turn the lines of the build's log into progress."""
    while True:
        await asyncio.sleep(0.5)
        stages = log.read_text(errors="replace").count("\nI: ")
        progress(what, min(0.95, stages / STAGES))


async def apt_settings() -> str:
    """The machine's proxy settings for apt, so that a host's apt reaches what the machine's reaches."""
    dump = await call("apt-config", "dump", check=False) if shutil.which("apt-config") else ""
    setting = re.compile(r"Acquire::(https?::([^:]+::)?Proxy|Check-Valid-Until)\b", re.IGNORECASE)
    lines = [line for line in dump.splitlines() if setting.match(line) and '""' not in line]
    for kind in ("http", "https"):
        if (proxy := os.environ.get(f"{kind}_proxy")) and not any(f"::{kind}::" in line for line in lines):
            lines.append(f'Acquire::{kind}::Proxy "{proxy}";')
    return "".join(f"{line}\n" for line in [*lines, 'Acquire::Check-Valid-Until "false";'])


def _recipe_hash(image: str, settings: str) -> str:
    kept = PACKAGES_OF_IMAGES.get(image, DOWNLOADED_PACKAGES)
    recipe = [os.uname().machine, SUITES[image], PACKAGES, kept, FILES, MASKED, USERADD, settings]
    return hashlib.sha256(json.dumps(recipe).encode()).hexdigest()[:12]


async def _prune(cache: Path, place: Path) -> None:
    """Remove older builds of an image that no host stands on."""
    in_use = ""
    for record in cache.glob("sandbox/*/hosts/*/host.json"):
        with contextlib.suppress(FileNotFoundError):  # the host is just being removed
            in_use += record.read_text()
    for other in place.parent.iterdir():
        # A young one may be about to be used by a process that has not yet written its record.
        young = time.time() - other.stat().st_mtime < 3600
        if other.is_dir() and other != place and not young and f'"{other}"' not in in_use:
            await remove_tree(other)


async def remove_tree(path: Path) -> None:
    """Remove a tree quickly, and never what is mounted in it."""
    if path.exists():
        await call("rm", "-rf", "--one-file-system", path)
