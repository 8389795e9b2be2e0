"""Packages: which are there, which could be, and installing those that are missing.

apt-get is driven patiently: a busy lock, a failing download and an interrupted dpkg are all met sooner or later. dnf
waits and retries by itself.
"""

from __future__ import annotations

import fcntl
import os
import struct
import time

from shoal.remote.agent.context import OPERATOR_LEFT, ConvergeContext, Item, ItemChange
from shoal.remote.agent.file_io import read_bytes, read_text, remove, write_atomic
from shoal.remote.agent.running import Failure, last_lines, run, space_left, which

POLICY = "/usr/sbin/policy-rc.d"
POLICY_TEXT = (
    b"#!/bin/sh\n# Made by shoal: daemons start after they are configured, not while packages install.\nexit 101\n"
)
APT = ["apt-get", "-q", "-y", "-o", "DPkg::Lock::Timeout=120", "-o", "Dpkg::Use-Pty=0", "-o", "APT::Status-Fd=3"]
KEEP_FILES = ["-o", "Dpkg::Options::=--force-confdef", "-o", "Dpkg::Options::=--force-confold"]
APT_LOCKS = ("/var/lib/dpkg/lock-frontend", "/var/lib/dpkg/lock", "/var/lib/apt/lists/lock")
APT_TRIES = 3
APT_PAUSES = (2.0, 8.0)
APT_LOCK_TIMEOUT_S = 900.0
FETCH_TROUBLE = ("Failed to fetch", "Unable to fetch", "Temporary failure", "Could not connect", "Hash Sum mismatch")
NOT_FOUND = ("Unable to locate package", "has no installation candidate")
DNF_NAMES = {
    "fonts-dejavu-core": "dejavu-sans-fonts",
    "netbase": "setup",
    "nfs-common": "nfs-utils",
    "openssh-client": "openssh-clients",
    "python3-venv": "python3",
    "sshfs": "fuse-sshfs",
}
"""The names of packages on hosts with dnf, where they differ from Debian's."""
EXPIRED = ("Release file", "is expired", "is not valid yet")


def check_packages(item: Item, context: ConvergeContext) -> ItemChange | None:
    manager = package_manager()
    if manager not in ("apt", "dnf"):
        raise Failure(
            f"this host's package manager is {manager}; Shoal installs packages with apt (Debian, Ubuntu) or dnf (RHEL)"
            f". Install {' '.join(item['names'])} by hand, or use a host that has apt"
        )
    missing = missing_packages(item)
    return ItemChange(f"install {' '.join(missing)}") if missing else None


def make_packages(item: Item, context: ConvergeContext) -> str:
    if package_manager() == "dnf":
        install_rpms(missing_packages(item), context)
        context.known_units = {}
        return ""
    policy_written = hold_daemons()
    try:
        install(missing_packages(item), context)
    finally:
        if policy_written:
            remove(POLICY)
    context.known_units = {}
    return ""


def missing_packages(item: Item) -> list[str]:
    installed = installed_packages(item["names"])
    return [name for name in item["names"] if name not in installed]


def hold_daemons() -> bool:
    """Keep packages from starting their daemons half-configured. False when another policy is in place."""
    if os.path.exists(POLICY) and read_bytes(POLICY) != POLICY_TEXT:
        return False
    write_atomic(POLICY, POLICY_TEXT, 0o755, 0, 0)
    return True


def release_daemons(context: ConvergeContext) -> None:
    """Remove a policy of ours that a killed run left behind, once its dpkg is no longer at work."""
    if read_text(POLICY).encode() != POLICY_TEXT:
        return
    try:
        wait_for_apt(context)
    except Failure:
        return  # it never ends, or the operator disconnected: then the next run does it
    remove(POLICY)


def package_manager() -> str:
    programs = ("apt-get", "dnf", "yum", "zypper", "apk", "pacman")
    return next((program for program in programs if which(program)), "none").replace("apt-get", "apt")


def package_facts(names: list[str], context: ConvergeContext) -> Item:
    if not names or package_manager() != "apt":
        return {}
    installed = installed_packages(names)
    missing = [name for name in names if name not in installed]
    if missing and not have_package_lists():
        context.report("apt: fetching package lists")
        try:
            update_lists([], context)
        except Failure as failure:
            context.report(str(failure))
    policy = run(["apt-cache", "policy", *missing], timeout=120.0)[1] if missing else ""
    candidates = parse_apt_policy(policy)
    return {name: {"installed": installed.get(name), "candidate": candidates.get(name)} for name in names}


def installed_facts(names: list[str]) -> Item:
    """The packages of which only an installed version matters: no list is read, and none fetched."""
    versions = installed_packages(names) if names and package_manager() in ("apt", "dnf") else {}
    return {name: {"installed": version, "candidate": None} for name, version in versions.items()}


def installed_packages(names: list[str]) -> dict[str, str]:
    """The versions of those of `names` that are fully installed; dpkg's own file is read without a process."""
    if package_manager() == "dnf":
        rpms = {name: DNF_NAMES.get(name, name) for name in names}
        query = ["rpm", "-q", "--qf", "%{NAME} %{VERSION}-%{RELEASE}\\n", *sorted({*rpms.values()})]
        return parse_rpm_query(run(query, timeout=120.0)[1], rpms) if names else {}
    try:
        return parse_dpkg_status(read_bytes("/var/lib/dpkg/status"), names)
    except OSError:
        return {}


def parse_rpm_query(text: str, rpms: dict[str, str]) -> dict[str, str]:
    """The versions by Debian's names. A line about a package that is not installed has more words."""
    versions = dict(line.split(" ") for line in text.splitlines() if line.count(" ") == 1)
    return {name: versions[rpm] for name, rpm in rpms.items() if rpm in versions}


def parse_dpkg_status(data: bytes, names: list[str]) -> dict[str, str]:
    data = b"\n" + data
    packages = {}
    for name in names:
        head = b"\nPackage: " + name.encode() + b"\n"
        start = data.find(head)
        while start >= 0:  # more than once where there is more than one architecture
            stanza = data[start : data.find(b"\n\n", start)]
            if b"\nStatus: install ok installed\n" in stanza or b"\nStatus: hold ok installed\n" in stanza:
                packages[name] = stanza.split(b"\nVersion: ")[1].split(b"\n")[0].decode()
                break
            start = data.find(head, start + 1)
    return packages


def parse_apt_policy(text: str) -> dict[str, str]:
    versions, name = {}, ""
    for line in text.splitlines():
        if line and not line.startswith(" "):
            name = line.rstrip(":")
        elif line.strip().startswith("Candidate:") and "(none)" not in line:
            versions[name] = line.split()[1]
    return versions


def install_rpms(names: list[str], context: ConvergeContext) -> None:
    rpms = sorted({DNF_NAMES.get(name, name) for name in names})
    context.report(f"dnf: installing {' '.join(rpms)}")
    status, text = run(["dnf", "-y", "-q", "--setopt=install_weak_deps=False", "install", *rpms], timeout=3600.0)
    if status:
        raise_if_full(text)
        raise Failure(f"dnf install {' '.join(rpms)} failed\n{last_lines(text)}")


def install(names: list[str], context: ConvergeContext) -> None:
    """apt-get install, patiently: waits for a lock, repairs an interrupted dpkg, tries a failing download again."""
    extra: list[str] = []
    if not have_package_lists():
        update_lists(extra, context)
    for attempt in range(1, APT_TRIES + 1):
        wait_for_apt(context)
        finish_interrupted_dpkg(context)
        status, text = apt([*extra, *KEEP_FILES, "--no-install-recommends", "install", *names], context)
        if status == 0:
            return
        raise_if_full(text)
        if attempt == APT_TRIES:
            break
        if any(sign in text for sign in NOT_FOUND):
            if attempt > 1:
                break
            context.report(f"apt: {first_error(text)}; fetching package lists")
        elif any(sign in text for sign in FETCH_TROUBLE):
            retry_later(text, attempt, context)
        elif "fix-broken" in text or "needs to be reinstalled" in text:
            context.report("apt: repairing broken packages")
            apt([*extra, *KEEP_FILES, "--fix-broken", "install"], context)
            continue
        elif "Could not get lock" not in text and "dpkg was interrupted" not in text:
            break
        update_lists(extra, context)
    raise Failure(f"apt-get install {' '.join(names)} failed\n{last_lines(text)}")


def update_lists(extra: list[str], context: ConvergeContext) -> None:
    """apt-get update. Lists past their date are accepted, on another try, only when that is what stood in the way."""
    for attempt in range(1, APT_TRIES + 1):
        wait_for_apt(context)
        _, text = apt([*extra, "update"], context)
        raise_if_full(text)
        if EXPIRED[0] in text and any(sign in text for sign in EXPIRED[1:]) and not extra:
            context.report("apt: the package lists are past their date; accepting them")
            extra += ["-o", "Acquire::Check-Valid-Until=false", "-o", "Acquire::Check-Date=false"]
        elif any(sign in text for sign in FETCH_TROUBLE) and attempt < APT_TRIES:
            retry_later(text, attempt, context)
        else:
            break
    if not have_package_lists():
        raise Failure(
            f"apt-get update failed: {first_error(text)}\n"
            "There are no package lists on this host; look at its network and at /etc/apt/sources.list*"
        )


def retry_later(text: str, attempt: int, context: ConvergeContext) -> None:
    pause = APT_PAUSES[attempt - 1]
    context.report(f"apt: {first_error(text)}; trying again in {pause:.0f} s ({attempt + 1} of {APT_TRIES})")
    time.sleep(pause)


def apt(arguments: list[str], context: ConvergeContext) -> tuple[int, str]:
    """One apt-get, its status lines condensed to `download 40%` and `install 75% (slurmd)`."""
    last = [""]

    def watch(line: str) -> None:
        part = line.split(":", 3)
        if len(part) < 4 or part[0] not in ("dlstatus", "pmstatus"):
            return
        percent = int(float(part[2])) // 5 * 5
        text = f"download {percent}%" if part[0] == "dlstatus" else f"install {percent}%"
        if text != last[0]:
            last[0] = text
            context.report(text if part[0] == "dlstatus" else f"{text} ({part[1].split(':')[0]})")

    return run([*APT, *arguments], timeout=3600.0, watch=watch)


def wait_for_apt(context: ConvergeContext) -> None:
    """Wait until apt's locks are free, and report their holder."""
    start, reported = time.monotonic(), ""
    while True:
        holders = [holder for holder in map(lock_holder, APT_LOCKS) if holder]
        if not holders:
            return
        if time.monotonic() - start > APT_LOCK_TIMEOUT_S:
            raise Failure(f"apt has been locked by {holders[0]} for {APT_LOCK_TIMEOUT_S:.0f} s; end it and run again")
        if not context.connection.is_open():
            raise Failure(OPERATOR_LEFT)
        if holders[0] != reported:
            reported = holders[0]
            context.report(f"apt: waiting for {reported} to release the lock")
        time.sleep(0.5)


def lock_holder(path: str) -> str:
    """The process that holds a POSIX lock on the file; "" for none."""
    try:
        fd = os.open(path, os.O_RDWR)
    except OSError:
        return ""
    try:
        query = struct.pack("hhqqi4x", fcntl.F_WRLCK, os.SEEK_SET, 0, 0, 0)
        kind, _, _, _, pid = struct.unpack("hhqqi4x", fcntl.fcntl(fd, fcntl.F_GETLK, query))
    finally:
        os.close(fd)
    if kind == fcntl.F_UNLCK:
        return ""
    return f"{read_text(f'/proc/{pid}/comm').strip() or 'another process'} (pid {pid})"


def finish_interrupted_dpkg(context: ConvergeContext) -> None:
    status = read_text("/var/lib/dpkg/status")
    half = (" half-installed\n", " unpacked\n", " half-configured\n", " triggers-pending\n")
    journal = os.path.isdir("/var/lib/dpkg/updates") and os.listdir("/var/lib/dpkg/updates")
    if journal or any("\nStatus: install ok" + sign in status for sign in half):
        context.report("dpkg: finishing an interrupted installation")
        code, text = run(["dpkg", "--configure", "-a", "--force-confdef", "--force-confold"], timeout=1800.0)
        if code:
            raise_if_full(text)
            context.report(f"dpkg: {first_error(text)}")


def have_package_lists() -> bool:
    try:
        return any("_Packages" in name for name in os.listdir("/var/lib/apt/lists"))
    except OSError:
        return False


def first_error(text: str) -> str:
    lines = [line.strip() for line in text.splitlines()]
    errors = [line[3:] for line in lines if line.startswith("E: ") or line.startswith("W: Failed to fetch")]
    return errors[0] if errors else lines[-1] if lines else "no output"


def raise_if_full(text: str) -> None:
    if "No space left on device" in text or "You don't have enough free space" in text:
        raise Failure("No space left on device while installing packages: " + space_left("/var/cache/apt/archives"))
