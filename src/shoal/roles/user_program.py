"""`shoal` in the PATH of every user on the hosts where users log in: root's tree, the same release that `up` ran.

A host with the operator's release of Python and kind of CPU gets the operator's own packages, and needs no package
index. Another one installs them from an index; without that it goes without `shoal`, and users work from their machine.
"""

from __future__ import annotations

from collections.abc import Mapping

from shoal.agent.document import HEADER, Command, Directory, Document, File, SecretRef
from shoal.agent.facts import Facts
from shoal.remote import program_text, shell_command
from shoal.roles.client import ENTRY_ROLES
from shoal.roles.component import Cluster, Component, FileQuery, Stage
from shoal.roles.elastic import INSTALLED, OLDEST_PYTHON
from shoal.roles.runtime_archive import RUNTIME_ARCHIVE, fits, runtime_mark, runtime_requirements
from shoal.spec.finding import Finding
from shoal.spec.member import Member
from shoal.spec.model import Spec

PROGRAM = "/usr/local/bin/shoal"
TREES = f"{INSTALLED}/users"
FAILED = f"{TREES}/failed"
"""Why Shoal could not be installed for users."""
SECRET = "shoal for users"
INSTALL_TIMEOUT_S = 1800.0


class UserProgramComponent(Component):
    """Shoal for users, where the spec has users."""

    files: Mapping[str, FileQuery] = {PROGRAM: "text", FAILED: "text"}

    def packages(self, spec: Spec, member: Member, facts: Facts | None) -> tuple[str, ...]:
        """pip, for a host that needs other packages than the operator's."""
        has_it = facts is None or not facts.python or not _supports(facts) or fits(facts)
        return () if has_it or not _is_entry(spec, member) else ("python3-venv",)

    def user_secrets(self, spec: Spec) -> Mapping[str, str]:
        return {SECRET: RUNTIME_ARCHIVE} if spec.users else {}

    def documents(self, cluster: Cluster, member: Member) -> Mapping[Stage, Document]:
        facts = cluster.facts_of(member.name)
        if _is_entry(cluster.spec, member) and _supports(facts) and not _is_foreign(facts):
            return {Stage.NODES: _installation(cluster.spec, facts)}
        return {Stage.NODES: self.removal()} if _is_ours(facts) else {}

    def removal(self) -> Document:
        ours = f'! grep -qsF "{HEADER.strip()}" "$1"'
        remove = 'if grep -qsF "$3" "$1"; then rm -f "$1"; fi; rm -rf "$2"'
        done = shell_command(f'{ours} && test ! -e "$2"', PROGRAM, TREES)
        return (Command("remove Shoal for users", shell_command(remove, PROGRAM, TREES, HEADER.strip()), unless=done),)

    def findings(self, cluster: Cluster) -> tuple[Finding, ...]:
        """The hosts on which users have no `shoal`, and why."""
        entries = [member.name for member in cluster.members if _is_entry(cluster.spec, member)]
        return tuple(
            Finding("info", "users have no `shoal` here, and work from their own machine", cause, fix, host=name)
            for name in entries
            if name in cluster.facts
            for cause, fix in _causes(cluster.facts[name])
        )


def _causes(facts: Facts) -> list[tuple[str, str]]:
    if not _supports(facts):
        return [
            (f"Python {facts.python}", "Shoal needs Python 3.11 or newer: Debian 12, Ubuntu 24.04 or newer have it")
        ]
    if _is_foreign(facts):
        return [
            (f"{PROGRAM} is not from `shoal up`", "users use that one; remove it, and `shoal up` installs this one")
        ]
    if reason := facts.text(FAILED).strip():
        fix = f"give the host access to a package index or set `proxy`, remove {FAILED}, then run `shoal up`"
        return [(reason, fix)]
    return []


def _installation(spec: Spec, facts: Facts) -> Document:
    mark = runtime_mark()
    place, packed = f"{TREES}/shoal-{mark}", f"{TREES}/{mark}.tgz"
    kind = "fits" if fits(facts) else "other"
    proxies = spec.proxy.variables if spec.proxy else {}
    environment = ("env", *(f"{key}={value}" for key, value in proxies.items())) if proxies else ()
    arguments = (place, packed, kind, PROGRAM, *runtime_requirements())
    return (
        Directory(INSTALLED),
        Directory(TREES),
        File(packed, SecretRef(SECRET)),
        Command(
            "install Shoal for users",
            (*environment, *shell_command(program_text("user_program.sh"), *arguments)),
            unless=shell_command('test -e "$1" || test -e "$2"', f"{place}/.complete", FAILED),
            timeout=INSTALL_TIMEOUT_S,
            fix=f"solve that, or remove {TREES}, then run `shoal up`",
        ),
        File(PROGRAM, launcher(place), mode=0o755),
    )


def launcher(place: str) -> str:
    """The program. `-I`: neither the current directory nor a user's variables add modules to it."""
    fix = "use your own machine: pip install . in a clone of Shoal, then shoal join USER@HOST"
    missing = f"Shoal is not installed on this host; {fix}"
    return (
        f"#!/bin/sh\n{HEADER}"
        f'[ -e {place}/.complete ] || {{ echo "{missing}" >&2; exit 1; }}\n'
        f'exec /usr/bin/python3 -I {place}/start.py "$@"\n'
    )


def _is_entry(spec: Spec, member: Member) -> bool:
    return bool(spec.users) and bool(ENTRY_ROLES & member.roles)


def _supports(facts: Facts) -> bool:
    numbers = [int(number) for number in facts.python.split(".")[:2] if number.isdigit()]
    return len(numbers) < 2 or tuple(numbers) >= OLDEST_PYTHON


def _is_ours(facts: Facts) -> bool:
    return HEADER.strip() in facts.text(PROGRAM)


def _is_foreign(facts: Facts) -> bool:
    return bool(facts.text(PROGRAM)) and not _is_ours(facts)
