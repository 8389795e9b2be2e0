"""The Slurm that a host has, and what of it the one that the spec asks for can read.

`shoal down` keeps the state of slurmctld and the records of slurmdbd. The next Slurm, from packages or from Shoal, goes
on with them where it reads what the release before it wrote.
"""

from __future__ import annotations

import contextlib
import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass

from shoal.agent.document import HEADER, Command, Directory, Document, File
from shoal.agent.facts import Facts
from shoal.remote import program_text, shell_command
from shoal.roles.component import PACKAGES_PREFIX, Cluster, FileQuery
from shoal.roles.host_record import HOST_RECORD, STATE_OWNER
from shoal.roles.slurm_tree import (
    DAEMONS,
    PACKAGED_DAEMONS,
    TREES,
    UNIT_FILES,
    links_command,
    uses_tree,
)
from shoal.slurm.accounting import DATABASE
from shoal.slurm.versions import Version, is_compatible
from shoal.spec.finding import Finding
from shoal.spec.member import Member
from shoal.spec.model import Spec

MASKED = "/var/lib/shoal/masked-slurm"
"""The daemons of the distribution that Shoal masked."""
RELEASES = {name: f"/var/lib/shoal/{name}.release" for name in ("slurmctld", "slurmdbd")}
"""The Slurm that wrote the state or the records of a host, where it is not that of its packages. `down` keeps it."""
TABLES = f"/var/lib/mysql/{DATABASE}"
"""The records of slurmdbd, which `down` keeps as well."""
SOURCE_FILES: Mapping[str, FileQuery] = {
    **dict.fromkeys(RELEASES.values(), "text"),
    TABLES: "there",
}
VERSIONED_PACKAGES = ("slurmctld", "slurmd", "slurm-client")
_TREE = re.compile(rf"{TREES}/slurm-([0-9.]+)-[0-9]+/")


@dataclass(frozen=True)
class InstalledSlurm:
    """The Slurm of a host."""

    ours: bool
    """Its daemons run from a tree of Shoal's; else from packages, or from somewhere else."""
    version: Version | None
    daemons: tuple[str, ...]
    """Those that are installed, or run, beside Shoal's tree."""


def installed_slurm(facts: Facts) -> InstalledSlurm:
    units = [facts.text(path) for path in UNIT_FILES if facts.text(path).startswith(HEADER)]
    # In a container, which has no units, a daemon that is active was started by Shoal.
    running = [name for name in DAEMONS if facts.is_active(name) and facts.init == "systemd" and not units]
    packaged = [path.rpartition("/")[2] for path in PACKAGED_DAEMONS if facts.has_file(path)]
    daemons = tuple(dict.fromkeys((*packaged, *running)))
    if units:
        trees = [match[1] for text in units if (match := _TREE.search(text))]
        return InstalledSlurm(True, Version.parse(trees[0]) if trees else None, daemons)
    return InstalledSlurm(False, packaged_slurm(facts), daemons)


def packaged_slurm(facts: Facts) -> Version | None:
    """The version of the installed packages."""
    for name in VERSIONED_PACKAGES:
        package = facts.packages.get(name)
        with contextlib.suppress(ValueError):  # a package of that name that is not Slurm's
            if package and package.installed:
                return Version.parse(package.installed)
    return None


def other_slurm(spec: Spec, facts: Mapping[str, Facts]) -> dict[str, tuple[str, str]]:
    """The hosts with a Slurm that runs and is not from Shoal: what they have, and the fix."""
    answers = {}
    for name, fact in facts.items():
        installed = installed_slurm(fact)
        running = [daemon for daemon in installed.daemons if fact.is_active(daemon)]
        if not uses_tree(spec) or installed.ours or not running or fact.text(HOST_RECORD):
            continue
        fix = (
            f"end its jobs, then run `systemctl disable --now {' '.join(running)}` on it: `shoal up` masks the "
            "packages and leaves them there; or delete `from: shoal` to use them. Its records of jobs stay in its "
            "own database"
        )
        answers[name] = (f"has another Slurm that runs ({', '.join(running)})", fix)
    return answers


# ---- state and records that the new Slurm cannot read


def unreadable(cluster: Cluster, host: str, daemon: str) -> Version | None:
    """The Slurm that wrote what this daemon would read on a host, where the new one cannot read it."""
    facts, new = cluster.facts_of(host), cluster.versions.get(host)
    old = None
    with contextlib.suppress(ValueError):
        old = Version.parse(facts.text(RELEASES[daemon]))
    if old is None and (facts.text(STATE_OWNER) if daemon == "slurmctld" else facts.has_file(TABLES)):
        installed = installed_slurm(facts)
        old = installed.version if installed.ours else packaged_slurm(facts)
    return old if old and new and not is_compatible(new, old) else None


def release_mark(cluster: Cluster, host: str, daemon: str) -> Document:
    """What tells a later run which Slurm wrote the state."""
    path = RELEASES[daemon]
    if cluster.slurm_prefix != PACKAGES_PREFIX:
        return (Directory("/var/lib/shoal"), File(path, f"{cluster.versions[host]}\n"))
    return (File(path),) if cluster.facts_of(host).text(path) else ()


def records_finding(cluster: Cluster, database: str | None) -> Finding | None:
    """A warning where Slurm begins anew because the releases are too far apart."""
    controller = cluster.controller.name
    places = [(controller, "slurmctld"), *([(database, "slurmdbd")] if database else [])]
    for host, daemon in places:
        if old := unreadable(cluster, host, daemon):
            new = cluster.versions[host]
            what = f"Slurm {new} cannot read what Slurm {old} wrote: jobs in the queue and their records stay behind"
            fix = (
                "with --leave-records, once the queue is empty: the state of slurmctld and the accounting database are "
                "kept beside the new ones"
            )
            back = "" if uses_tree(cluster.spec) else "; or write `slurm: {from: shoal}` again"
            return Finding("warning", what, fix=f"{fix}{back}", host=host, path="slurm.from")
    return None


# ---- what a host gets


def source_items(cluster: Cluster, member: Member) -> Document:
    """First, with Shoal's Slurm: keeps daemons of the distribution that have no task here from running."""
    facts = cluster.facts[member.name]
    used = set(_daemons(cluster, member))
    idle = [name for name in installed_slurm(facts).daemons if name not in used]
    if facts.init != "systemd" or not idle:
        return ()
    program = program_text("slurm_mask.sh")
    return (
        Command(
            f"mask the distribution's {' '.join(idle)}",
            shell_command(program, "mask", MASKED, *idle),
            unless=shell_command(program, "masked", MASKED, *idle),
        ),
    )


def _daemons(cluster: Cluster, member: Member) -> Iterator[str]:
    accounting = cluster.spec.accounting
    if "controller" in member.roles:
        yield "slurmctld"
    if accounting is not None and member.name == (accounting.host or cluster.controller.name):
        yield "slurmdbd"
    if "compute" in member.roles:
        yield "slurmd"
    if "login" in member.roles:
        yield "sackd"


def last_items(cluster: Cluster) -> Document:
    """Last: the commands of the newest tree for everybody, and the end of trees that nothing runs from any more."""
    if cluster.slurm_prefix == PACKAGES_PREFIX:
        return ()
    program, arguments = program_text("slurm_programs.sh"), (f"{TREES}/slurm-", cluster.slurm_prefix)
    tidy = Command(
        "remove a former Slurm of Shoal",
        shell_command(program, "tidy", *arguments),
        unless=shell_command(program, "tidied", *arguments),
    )
    return (links_command(cluster.slurm_prefix, "link", "check"), tidy)


def mask_removal() -> Document:
    unmask = shell_command(program_text("slurm_mask.sh"), "unmask", MASKED)
    return (Command("unmask the distribution's Slurm", unmask, unless=("test", "!", "-e", MASKED)),)
