"""The state of shares: space and quotas for `shoal status`, mounts on each host for `shoal check`.

A command on a share whose server is gone blocks. So space is read on the server itself, and every other command has a
timeout.
"""

from __future__ import annotations

import asyncio
import csv
from collections.abc import Mapping
from dataclasses import dataclass, field, replace

from shoal.agent.facts import Facts
from shoal.errors import CommandTimeout, ShoalError
from shoal.hostlist import compress
from shoal.plan.connections import Connections
from shoal.remote import python_command, shell_command
from shoal.roles.shares import RECORD, ServedShare, shares
from shoal.spec.finding import Finding
from shoal.spec.model import Spec
from shoal.storage.nfs import DESCRIPTIONS, choose_access, kernel_serves_nfs

SHARE_TIMEOUT_S = 5.0
"""For a share or its server to answer."""


@dataclass(frozen=True)
class ShareState:
    """A share on its server."""

    where: str
    kind: str
    server: str
    total_mb: int = 0
    free_mb: int = 0
    quotas: Mapping[str, tuple[int, int]] = field(default_factory=dict)
    """By user: MB used, and MB allowed."""
    trouble: str = ""
    """Why its state is unknown."""


# repquota takes a file system, not a directory in one; df prints which that is.
SPACE_SCRIPT = """
room=$(df -Pm -- "$1") || exit
echo "$room"
command -v repquota > /dev/null || exit 0
repquota -u -O csv -- "$(echo "$room" | awk 'END { print $1 }')" 2> /dev/null || true
"""


async def share_states(spec: Spec, fleet: Connections) -> tuple[ShareState, ...]:
    """Ask all servers at once."""
    return tuple(await asyncio.gather(*(_state(share, fleet) for share in shares(spec))))


async def _state(share: ServedShare, fleet: Connections) -> ShareState:
    state = ShareState(share.where, share.share.kind, share.server)
    if share.server not in fleet.targets:
        return replace(state, trouble="its host is not made yet")
    try:
        async with asyncio.timeout(SHARE_TIMEOUT_S):
            host = await fleet.host(share.server)
            result = await host.run(shell_command(SPACE_SCRIPT, share.path), timeout=SHARE_TIMEOUT_S)
    except (TimeoutError, ShoalError):
        return replace(state, trouble=f"{share.server} does not answer")
    space = parse_df(result.text)
    if space is None:
        return replace(state, trouble=f"not on {share.server} yet; run `shoal up`")
    return replace(state, total_mb=space[0], free_mb=space[1], quotas=parse_quotas(result.text))


def parse_df(text: str) -> tuple[int, int] | None:
    """Size and free space in MB from the output of df; None when it is empty."""
    for line in text.splitlines():
        fields = line.split()
        if len(fields) >= 6 and fields[1].isdigit() and fields[3].isdigit() and fields[4].endswith("%"):
            return int(fields[1]), int(fields[3])
    return None


def parse_quotas(text: str) -> dict[str, tuple[int, int]]:
    """The quotas in the output of repquota (CSV, in kB), in MB."""
    lines = text.splitlines()
    start = next((number for number, line in enumerate(lines) if line.startswith("User,")), None)
    if start is None:
        return {}
    quotas = {}
    for row in csv.DictReader(lines[start:]):
        used_kb, soft, hard = (row.get(key) or "" for key in ("BlockUsed", "BlockSoftLimit", "BlockHardLimit"))
        limit_kb = next((int(limit) for limit in (hard, soft) if limit.isdigit() and int(limit)), 0)
        if limit_kb and used_kb.isdigit() and row["User"]:
            quotas[row["User"]] = (int(used_kb) >> 10, limit_kb >> 10)
    return quotas


def share_ways(spec: Spec, facts: Mapping[str, Facts]) -> list[Finding]:
    """How each host mounts each share, and what prevents better access."""
    findings = []
    for share in shares(spec):
        groups: dict[tuple[str, str], list[str]] = {}
        for name, fact in facts.items():
            mount = choose_access(share.share, share.server, name, fact)
            groups.setdefault((DESCRIPTIONS[mount.kind], mount.why), []).append(name)
        for (description, reason), names in groups.items():
            findings.append(Finding("info", f"{share.where} on {compress(names)}: {description}", reason))
    return findings


async def unservable_share_findings(spec: Spec, facts: Mapping[str, Facts], fleet: Connections) -> list[Finding]:
    """Shares that nfs-ganesha silently does not serve, as their file system has no file handles."""

    async def check_server(server: str, served_shares: list[ServedShare]) -> list[Finding]:
        try:
            host = await fleet.host(server)
            command = python_command("probes", "handles", *(share.path for share in served_shares))
            output = (await host.run(command, timeout=SHARE_TIMEOUT_S)).text
        except ShoalError:
            return []  # other checks report the host
        filesystems = dict(row.split(" ", 1) for row in output.splitlines())
        return [
            _make_finding(share, filesystems[share.path], facts) for share in served_shares if share.path in filesystems
        ]

    ganesha_shares: dict[str, list[ServedShare]] = {}
    for share in shares(spec):
        if share.share.kind == "nfs" and share.server in facts and not kernel_serves_nfs(facts[share.server]):
            ganesha_shares.setdefault(share.server, []).append(share)
    findings = await asyncio.gather(
        *(check_server(server, served_shares) for server, served_shares in ganesha_shares.items())
    )
    return [finding for server_findings in findings for finding in server_findings]


def _make_finding(share: ServedShare, filesystem: str, facts: Mapping[str, Facts]) -> Finding:
    access = {name: choose_access(share.share, share.server, name, fact).kind for name, fact in facts.items()}
    unmountable = [name for name, kind in access.items() if kind == "nfs"]
    return Finding(
        "error" if unmountable else "info",
        f"{share.where} is not served by NFS"
        + (f", and {compress(unmountable)} cannot mount it" if unmountable else ""),
        f"{share.path} is on {filesystem or 'a file system'}, which has no file handles for nfs-ganesha",
        "set `path` to a directory on ext4 or XFS, or set `kind: sshfs`" if unmountable else "",
        host=share.server,
    )


async def share_probes(spec: Spec, facts: Mapping[str, Facts], fleet: Connections) -> list[Finding]:
    """Mounted shares that do not answer."""

    async def probe(share: ServedShare, path: str, name: str) -> Finding | None:
        try:
            host = await fleet.host(name)
        except ShoalError:
            return None  # other checks report the host
        try:
            # No `timeout` on the host: no signal ends a process that waits for a server in the kernel.
            result = await host.run(("stat", "-f", path), timeout=SHARE_TIMEOUT_S)
            cause = result.error_text.strip().rpartition(": ")[2] if result.status else ""
        except CommandTimeout:
            cause = f"not within {SHARE_TIMEOUT_S:g} s"
        except ShoalError:
            return None
        if not cause:
            return None
        fix = f"check that {share.server} is up and that {name} reaches it; programs that use the share wait until then"
        return Finding("error", f"{path} does not answer", cause, fix, host=name)

    probes = [
        probe(share, path, name)
        for name, fact in facts.items()
        for path in _mounted_paths(fact)
        for share in shares(spec)
        if path == share.where or path.startswith(f"{share.where}/")
    ]
    return [finding for finding in await asyncio.gather(*probes) if finding is not None]


def _mounted_paths(facts: Facts) -> list[str]:
    """The shares of other hosts that an earlier run mounted."""
    lines = facts.text(RECORD).splitlines()
    return [line.removeprefix("automount ") for line in lines if line.startswith("automount /")]
