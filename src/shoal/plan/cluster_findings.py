"""What makes a change of the running cluster fail, or destroys something: functions from facts to findings. Pure."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from itertools import groupby

from shoal.agent.client import Report
from shoal.agent.facts import Facts
from shoal.agent.loader import STATE
from shoal.errors import ShoalError
from shoal.hostlist import compress
from shoal.plan.nodes import LEAVING_REASON, NOT_READY
from shoal.roles.accounting import has_database, slurmdbd_skew
from shoal.roles.auth import auth_skew
from shoal.roles.rented_images import offer_findings
from shoal.roles.shares import shares
from shoal.roles.slurm_tree import find_trees, uses_tree
from shoal.roles.tracking import server_host
from shoal.slurm.conf import STATE_DIRECTORY
from shoal.slurm.state import NodeState
from shoal.slurm.versions import Version, packaged_version, version_findings
from shoal.spec.finding import Finding
from shoal.spec.members import members
from shoal.spec.model import Spec

CLOCK_LIMIT_S = 60.0
"""Clock skew that is worth a warning; munge rejects a credential at 300 s."""
MIN_FREE_MB = 1024
SYSTEM_MOUNTS = ("/", "/var")


def clock_findings(facts: Mapping[str, Facts]) -> list[Finding]:
    """Hosts whose clock is so far off that munge rejects their messages, or soon will."""
    return [
        Finding(
            level="error" if abs(fact.clock_offset) > 4 * CLOCK_LIMIT_S else "warning",
            what="the clock is off",
            found=f"{fact.clock_offset:+.0f} s against this machine",
            fix="run `timedatectl set-ntp true` on it; munge rejects messages from 300 s on",
            host=name,
        )
        for name, fact in facts.items()
        if abs(fact.clock_offset) > CLOCK_LIMIT_S
    ]


def space_findings(facts: Mapping[str, Facts]) -> list[Finding]:
    """File systems of the system, and of Slurm's state, spool and logs, that are almost full or cannot be written."""
    findings = []
    for name, fact in facts.items():
        free_mb = {disk.mount: disk.free_mb for disk in fact.disks if disk.mount in SYSTEM_MOUNTS}
        free_mb |= {space.mount: space.free_mb for space in fact.spaces.values()}
        for mount, megabytes in free_mb.items():
            if megabytes < MIN_FREE_MB:
                what = f"little space on {mount}"
                findings.append(Finding("error", what, f"{megabytes} MB", "free at least 1 GB", host=name))
        for path, space in fact.spaces.items():
            if space.problem and free_mb[space.mount] >= MIN_FREE_MB:
                findings.append(_unwritable(name, path, space.problem))
    return findings


def state_finding(controller: str, facts: Facts) -> Finding | None:
    """Why slurmctld cannot write its state: after a restart it would have lost jobs."""
    space = facts.spaces.get(STATE_DIRECTORY)
    return _unwritable(controller, STATE_DIRECTORY, space.problem) if space and space.problem else None


def _unwritable(host: str, path: str, problem: str) -> Finding:
    return Finding("error", f"Slurm cannot write {path}", problem, "make room, or make it writable", host=host)


def drained_findings(nodes: Iterable[NodeState]) -> list[Finding]:
    """Nodes that somebody or Slurm took out of service, those with the same reason together."""
    drained = [
        node
        for node in nodes
        if "DRAIN" in node.state and not NOT_READY & set(node.state) and LEAVING_REASON not in node.reason
    ]
    groups = groupby(sorted(drained, key=_reason), key=_reason)
    findings = []
    for reason, group in groups:
        names = compress(node.name for node in group)
        fix = f"when that is solved, run `shoal node resume {names}`"
        findings.append(Finding("warning", "is drained and takes no jobs", reason, fix, host=names))
    return findings


def _reason(node: NodeState) -> str:
    by = " ".join(filter(None, (f"by {node.reason_by}" if node.reason_by else "", node.reason_time)))
    return f"{node.reason or 'no reason'}{f' ({by})' if by else ''}"


def edited_findings(reports: Mapping[str, Report]) -> list[Finding]:
    """Files of Shoal's that somebody has edited, and that `up` replaces."""
    return [
        Finding(
            "warning",
            f"{item.key.removeprefix('file ')} was edited by hand; `shoal up` replaces it, and keeps a copy below "
            f"{STATE}/edited",
            fix="move the edit into the cluster's file, as `slurm.options` for slurm.conf, or let `shoal up` remove it",
            host=name,
        )
        for name, report in reports.items()
        for item in report.items
        if item.edited
    ]


def dnf_findings(spec: Spec, facts: Mapping[str, Facts]) -> list[Finding]:
    """Hosts with dnf, which are not run by us, and servers that Shoal sets up on hosts with apt only."""
    servers = {share.server: f"storage.{share.where}" for share in shares(spec)} | {server_host(spec): "tracking"}
    servers |= {member.name: "accounting" for member in members(spec) if has_database(spec, member)}
    findings = []
    for name, fact in facts.items():
        if fact.package_manager != "dnf":
            continue
        system = f"{fact.os_id} {fact.os_version}"
        fix = "run a job on it before you rely on it, and report what does not work"
        findings.append(Finding("warning", "hosts with dnf are not run by us", system, fix, host=name))
        if name in servers:
            what = f"Shoal sets up the server of `{servers[name]}` on a host with apt only"
            fix = "name a Debian or Ubuntu host there: `host: NAME`"
            findings.append(Finding("error", what, system, fix, host=name, path=servers[name]))
    return findings


def member_version_findings(spec: Spec, versions: Mapping[str, Version]) -> list[Finding]:
    """Members whose Slurm cannot talk to the controller's; none while the version of the controller is unknown."""
    controller = members(spec)[0].name
    if controller not in versions:
        return []
    others = {name: version for name, version in versions.items() if name != controller}
    return [
        *version_findings((controller, versions[controller]), others),
        *slurmdbd_skew(spec, versions),
        *auth_skew(spec, versions),
        *offer_findings(spec, versions[controller], tuple(find_trees()) if uses_tree(spec) else ()),
    ]


def image_version(image: str) -> Version | None:
    """The Slurm of an image that a provider makes hosts from: `debian12`, `sid`."""
    name = image.removeprefix("debian")
    return packaged_version("debian", name)


def reject_record_loss(findings: Iterable[Finding], allowed: bool) -> None:
    """Raise where the new Slurm cannot read what the old one wrote."""
    for finding in () if allowed else findings:
        if finding.path == "slurm.from" and finding.level == "warning":
            raise ShoalError(
                f"{finding.host}: {finding.what}; nothing was changed", hint=f"run `shoal up` {finding.fix}"
            )
