"""Driving apt-get, patiently: a busy lock, a failing download and an interrupted dpkg are all met sooner or later."""

from __future__ import annotations

import fcntl
import os
import struct
import time

from shoal.agent.program.disk import read_text
from shoal.agent.program.failure import Failure, space_left
from shoal.agent.program.running import last_lines, run
from shoal.agent.program.wire import GONE
from shoal.agent.program.world import World

APT = ["apt-get", "-q", "-y", "-o", "DPkg::Lock::Timeout=120", "-o", "Dpkg::Use-Pty=0", "-o", "APT::Status-Fd=3"]
KEEP_FILES = ["-o", "Dpkg::Options::=--force-confdef", "-o", "Dpkg::Options::=--force-confold"]
APT_LOCKS = ("/var/lib/dpkg/lock-frontend", "/var/lib/dpkg/lock", "/var/lib/apt/lists/lock")
APT_TRIES = 3
APT_PAUSES = (2.0, 8.0)
APT_LOCK_WAIT = 900.0
FETCH_TROUBLE = ("Failed to fetch", "Unable to fetch", "Temporary failure", "Could not connect", "Hash Sum mismatch")
NOT_FOUND = ("Unable to locate package", "has no installation candidate")
EXPIRED = ("Release file", "is expired", "is not valid yet")


def install(names: list[str], world: World) -> None:
    """apt-get install, patiently: waits for a lock, repairs an interrupted dpkg, tries a failing download again."""
    extra: list[str] = []
    if not have_package_lists():
        update_lists(extra, world)
    for attempt in range(1, APT_TRIES + 1):
        wait_for_apt(world)
        mend_dpkg(world)
        status, text = apt([*extra, *KEEP_FILES, "--no-install-recommends", "install", *names], world)
        if status == 0:
            return
        raise_if_full(text)
        if attempt == APT_TRIES:
            break
        if any(sign in text for sign in NOT_FOUND):
            if attempt > 1:
                break
            world.tell(f"apt: {first_error(text)}; fetching package lists")
        elif any(sign in text for sign in FETCH_TROUBLE):
            retry_later(text, attempt, world)
        elif "fix-broken" in text or "needs to be reinstalled" in text:
            world.tell("apt: repairing broken packages")
            apt([*extra, *KEEP_FILES, "--fix-broken", "install"], world)
            continue
        elif "Could not get lock" not in text and "dpkg was interrupted" not in text:
            break
        update_lists(extra, world)
    raise Failure(f"apt-get install {' '.join(names)} failed\n{last_lines(text)}")


def update_lists(extra: list[str], world: World) -> None:
    """apt-get update. Lists past their date are accepted, on another try, only when that is what stood in the way."""
    for attempt in range(1, APT_TRIES + 1):
        wait_for_apt(world)
        _, text = apt([*extra, "update"], world)
        raise_if_full(text)
        if EXPIRED[0] in text and any(sign in text for sign in EXPIRED[1:]) and not extra:
            world.tell("apt: the package lists are past their date; accepting them")
            extra += ["-o", "Acquire::Check-Valid-Until=false", "-o", "Acquire::Check-Date=false"]
        elif any(sign in text for sign in FETCH_TROUBLE) and attempt < APT_TRIES:
            retry_later(text, attempt, world)
        else:
            break
    if not have_package_lists():
        raise Failure(
            f"apt-get update failed: {first_error(text)}\n"
            "There are no package lists on this host; look at its network and at /etc/apt/sources.list*"
        )


def retry_later(text: str, attempt: int, world: World) -> None:
    pause = APT_PAUSES[attempt - 1]
    world.tell(f"apt: {first_error(text)}; trying again in {pause:.0f} s ({attempt + 1} of {APT_TRIES})")
    time.sleep(pause)


def apt(arguments: list[str], world: World) -> tuple[int, str]:
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
            world.tell(text if part[0] == "dlstatus" else f"{text} ({part[1].split(':')[0]})")

    return run([*APT, *arguments], timeout=3600.0, watch=watch)


def wait_for_apt(world: World) -> None:
    """Wait until nobody holds apt's locks, saying who does."""
    start, told = time.monotonic(), ""
    while True:
        holders = [holder for holder in map(lock_holder, APT_LOCKS) if holder]
        if not holders:
            return
        if time.monotonic() - start > APT_LOCK_WAIT:
            raise Failure(f"apt has been locked by {holders[0]} for {APT_LOCK_WAIT:.0f} s; end it and run again")
        if not world.wire.still_there():
            raise Failure(GONE)
        if holders[0] != told:
            told = holders[0]
            world.tell(f"apt: waiting for {told} to release the lock")
        time.sleep(0.5)


def lock_holder(path: str) -> str:
    """Who holds a POSIX lock on the file; "" when nobody does."""
    try:
        fd = os.open(path, os.O_RDWR)
    except OSError:
        return ""
    try:
        asked = struct.pack("hhqqi4x", fcntl.F_WRLCK, os.SEEK_SET, 0, 0, 0)
        kind, _, _, _, pid = struct.unpack("hhqqi4x", fcntl.fcntl(fd, fcntl.F_GETLK, asked))
    finally:
        os.close(fd)
    if kind == fcntl.F_UNLCK:
        return ""
    return f"{read_text(f'/proc/{pid}/comm').strip() or 'another process'} (pid {pid})"


def mend_dpkg(world: World) -> None:
    status = read_text("/var/lib/dpkg/status")
    half = (" half-installed\n", " unpacked\n", " half-configured\n", " triggers-pending\n")
    journal = os.path.isdir("/var/lib/dpkg/updates") and os.listdir("/var/lib/dpkg/updates")
    if journal or any("\nStatus: install ok" + sign in status for sign in half):
        world.tell("dpkg: finishing an interrupted installation")
        code, text = run(["dpkg", "--configure", "-a", "--force-confdef", "--force-confold"], timeout=1800.0)
        if code:
            raise_if_full(text)
            world.tell(f"dpkg: {first_error(text)}")


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
