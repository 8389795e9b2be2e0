"""How the shares are: their room and quotas for `shoal status`, how each host has them for `shoal check`.

A share whose server is gone holds up whoever looks at it. So room is asked of the server, where the directory is the
server's own, and whoever looks elsewhere has a limit.
"""

from __future__ import annotations

import asyncio
import csv
from collections.abc import Mapping
from dataclasses import dataclass, field, replace

from shoal.agent.facts import Facts
from shoal.errors import ShoalError, TimedOut
from shoal.hostlist import compress
from shoal.plan.connections import Connections
from shoal.roles.shares import RECORD, Served, shares, text_of
from shoal.spec.finding import Finding
from shoal.spec.model import Spec
from shoal.storage.ways import WORDS, served_by_kernel, way

PATIENCE = 5.0
"""Seconds for a share or its server to answer."""


@dataclass(frozen=True)
class ShareState:
    """A share as its server has it."""

    where: str
    kind: str
    server: str
    total_mb: int = 0
    free_mb: int = 0
    quotas: Mapping[str, tuple[int, int]] = field(default_factory=dict)
    """Of users that have one: MB used, and MB allowed."""
    trouble: str = ""
    """Why nothing is known of it."""


# repquota wants a file system, not a directory in one: df says which that is.
LOOK = """
room=$(df -Pm -- "$1") || exit
echo "$room"
command -v repquota > /dev/null || exit 0
repquota -u -O csv -- "$(echo "$room" | awk 'END { print $1 }')" 2> /dev/null || true
"""


async def share_states(spec: Spec, fleet: Connections) -> tuple[ShareState, ...]:
    """Ask all servers at once."""
    return tuple(await asyncio.gather(*(_state(share, fleet) for share in shares(spec))))


async def _state(share: Served, fleet: Connections) -> ShareState:
    known = ShareState(share.where, share.share.kind, share.server)
    if share.server not in fleet.targets:
        return replace(known, trouble="its host is not made yet")
    try:
        async with asyncio.timeout(PATIENCE):
            host = await fleet.host(share.server)
            said = await host.run(("sh", "-c", LOOK, "sh", share.path), timeout=PATIENCE)
    except (TimeoutError, ShoalError):
        return replace(known, trouble=f"{share.server} does not answer")
    room = parse_room(said.text)
    if room is None:
        return replace(known, trouble=f"not on {share.server} yet; run `shoal up`")
    total, free = room
    return replace(known, total_mb=total, free_mb=free, quotas=parse_quotas(said.text))


def parse_room(text: str) -> tuple[int, int] | None:
    """Size and free space in MB from what df says; None when it says nothing."""
    for line in text.splitlines():
        words = line.split()
        if len(words) >= 6 and words[1].isdigit() and words[3].isdigit() and words[4].endswith("%"):
            return int(words[1]), int(words[3])
    return None


def parse_quotas(text: str) -> dict[str, tuple[int, int]]:
    """Who may use how much, from what repquota says (in kB, as a table with commas)."""
    lines = text.splitlines()
    start = next((number for number, line in enumerate(lines) if line.startswith("User,")), None)
    if start is None:
        return {}
    found = {}
    for row in csv.DictReader(lines[start:]):
        used, soft, hard = (row.get(key) or "" for key in ("BlockUsed", "BlockSoftLimit", "BlockHardLimit"))
        allowed = next((int(limit) for limit in (hard, soft) if limit.isdigit() and int(limit)), 0)
        if allowed and used.isdigit() and row["User"]:
            found[row["User"]] = (int(used) >> 10, allowed >> 10)
    return found


def share_ways(spec: Spec, facts: Mapping[str, Facts]) -> list[Finding]:
    """How each host has each share, and what keeps it from a better way."""
    findings = []
    for share in shares(spec):
        groups: dict[tuple[str, str], list[str]] = {}
        for name, fact in facts.items():
            found = way(share.share, share.server, name, fact)
            groups.setdefault((WORDS[found.kind], found.why), []).append(name)
        for (words, why), names in groups.items():
            findings.append(Finding("info", f"{share.where} on {compress(names)}: {words}", why))
    return findings


HANDLES = """
import ctypes, errno, os, subprocess, sys
class Handle(ctypes.Structure):
    _fields_ = [("size", ctypes.c_uint), ("type", ctypes.c_int), ("bytes", ctypes.c_char * 128)]
libc = ctypes.CDLL(None, use_errno=True)
for path in sys.argv[1:]:
    handle, mount = Handle(128), ctypes.c_int()
    asked = libc.name_to_handle_at(-100, os.fsencode(path), ctypes.byref(handle), ctypes.byref(mount), 0)
    if asked and ctypes.get_errno() == errno.EOPNOTSUPP:
        print(path, subprocess.run(["stat", "-f", "-c", "%T", path], stdout=subprocess.PIPE).stdout.decode().strip())
"""
"""Prints those of the directories whose file system gives no handles, and what that is."""


async def unservable(spec: Spec, facts: Mapping[str, Facts], fleet: Connections) -> list[Finding]:
    """Shares that nfs-ganesha does not serve and says nothing of it: it knows files by handles, as NFS does."""

    async def one(server: str, mine: list[Served]) -> list[Finding]:
        try:
            host = await fleet.host(server)
            line = ("python3", "-c", HANDLES, *(share.path for share in mine))
            said = dict(found.split(" ", 1) for found in (await host.run(line, timeout=PATIENCE)).text.splitlines())
        except ShoalError:
            return []  # what is wrong with the host is said elsewhere
        return [_unservable(share, said[share.path], facts) for share in mine if share.path in said]

    by_ganesha: dict[str, list[Served]] = {}
    for share in shares(spec):
        if share.share.kind == "nfs" and share.server in facts and not served_by_kernel(facts[share.server]):
            by_ganesha.setdefault(share.server, []).append(share)
    found = await asyncio.gather(*(one(server, mine) for server, mine in by_ganesha.items()))
    return [finding for some in found for finding in some]


def _unservable(share: Served, filesystem: str, facts: Mapping[str, Facts]) -> Finding:
    without = [name for name, fact in facts.items() if way(share.share, share.server, name, fact).kind == "nfs"]
    return Finding(
        "error" if without else "info",
        f"{share.where} is not served by NFS" + (f", and {compress(without)} cannot mount it" if without else ""),
        f"{share.path} is on {filesystem or 'a file system'}, which gives nfs-ganesha no handles of files",
        "keep it on ext4 or XFS (`path` says where), or write `kind: sshfs`" if without else "",
        host=share.server,
    )


async def share_probes(spec: Spec, facts: Mapping[str, Facts], fleet: Connections) -> list[Finding]:
    """Shares that do not answer on hosts that have them mounted."""

    async def one(share: Served, where: str, name: str) -> Finding | None:
        try:
            host = await fleet.host(name)
        except ShoalError:
            return None  # what is wrong with the host is said elsewhere
        try:
            # No limit of the host's own: who waits for a server in the kernel, no signal ends.
            said = await host.run(("stat", "-f", where), timeout=PATIENCE)
            why = said.error_text.strip().rpartition(": ")[2] if said.status else ""
        except TimedOut:
            why = f"not within {PATIENCE:g} s"
        except ShoalError:
            return None
        if not why:
            return None
        fix = f"see that {share.server} is up and that {name} reaches it; whoever uses the share waits until then"
        return Finding("error", f"{where} does not answer", why, fix, host=name)

    looks = [
        one(share, where, name)
        for name, fact in facts.items()
        for where in _mounted(fact)
        for share in shares(spec)
        if where == share.where or where.startswith(f"{share.where}/")
    ]
    return [finding for finding in await asyncio.gather(*looks) if finding is not None]


def _mounted(facts: Facts) -> list[str]:
    """What an earlier run mounted of other hosts."""
    lines = text_of(facts, RECORD).splitlines()
    return [line.removeprefix("automount ") for line in lines if line.startswith("automount /")]
