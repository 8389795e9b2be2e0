"""The shares of a cluster, and what their server and their clients have in common."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace

from shoal.agent.document import Command, File, Group, Item, User
from shoal.agent.facts import Facts
from shoal.roles.cluster import AccountIds, Cluster, choose_account_ids
from shoal.spec.finding import Finding
from shoal.spec.members import members as members_of
from shoal.spec.model import Spec
from shoal.spec.storage import SharedDirectory
from shoal.storage import sshfs, stage
from shoal.storage.nfs import AccessKind, choose_access

RECORD = "/etc/shoal/shares"
"""What an earlier run mounted on a host, so that a later run removes what the spec no longer names."""
SERVES_NFS, SERVES_SSH, COPIES = "serves nfs", "serves ssh", "copies"
"""Lines of the record beside the mounts."""
SERVED_RECORD = "keeps"
"""Begins a line of the record for each share that the host serves, with its mount point and its directory."""
RELOAD_SSHD = "reload sshd"
ACCOUNT_FIRST_CHOICE = 979


@dataclass(frozen=True)
class ServedShare:
    """A share with its mount point and its server."""

    where: str
    share: SharedDirectory
    server: str

    @property
    def path(self) -> str:
        """The directory on the server."""
        return self.share.path or self.where

    @property
    def homes(self) -> bool:
        return self.where == "/home" or self.share.homes


def shares(spec: Spec) -> tuple[ServedShare, ...]:
    """The shares of a spec, in its order."""
    controller = members_of(spec)[0].name
    return tuple(ServedShare(where, share, share.server(controller)) for where, share in spec.storage.items())


def homes_of(spec: Spec) -> ServedShare | None:
    """The share with the users' homes, if any."""
    return next((share for share in shares(spec) if share.homes), None)


def moved_share_findings(spec: Spec, facts: Mapping[str, Facts]) -> tuple[Finding, ...]:
    """Shares that an earlier spec had in another place. Their files stay there: the new share would be empty."""
    return tuple(
        Finding(
            "error",
            f"{share.where} is in {kept[share.where]} here, and the file has {share.path} of {share.server}",
            fix="its files do not move by themselves: delete the share from the file and run `shoal up`, copy the "
            "files, then add it again",
            host=name,
        )
        for name, fact in facts.items()
        for kept in (_recorded_directories(fact),)
        for share in shares(spec)
        if share.where in kept and (name, kept[share.where]) != (share.server, share.path)
    )


def _recorded_directories(facts: Facts) -> dict[str, str]:
    """The directories of the shares that a host served, by mount point."""
    lines = [line.split(" ") for line in facts.text(RECORD).splitlines()]
    return {words[1]: words[2] for words in lines if words[0] == SERVED_RECORD and len(words) == 3}


def access_kind(cluster: Cluster, share: ServedShare, member: str) -> AccessKind:
    return choose_access(share.share, share.server, member, cluster.facts[member]).kind


def bracketed(address: str) -> str:
    return f"[{address}]" if ":" in address else address


def sshd_file(path: str, text: str | None) -> File:
    """A file of sshd's settings, which sshd tests before it is installed."""
    trial = ("/usr/sbin/sshd", "-t", "-f", "/dev/stdin") if text else ()
    return File(path, text, reloads=(f"command {RELOAD_SSHD}",), accepted_by=trial)


def reload_sshd() -> Command:
    """sshd reads its settings again, with or without systemd."""
    reload = "if [ -d /run/systemd/system ]; then systemctl try-reload-or-restart ssh; else pkill -HUP -o -x sshd; fi"
    return Command(RELOAD_SSHD, ("sh", "-c", reload), on_change=True)


def shares_account(cluster: Cluster) -> list[Item]:
    ids = shares_ids(cluster)
    return [Group(sshfs.ACCOUNT, ids.gid), User(sshfs.ACCOUNT, ids.uid, group=sshfs.ACCOUNT, home="/")]


def shares_ids(cluster: Cluster) -> AccountIds:
    return choose_account_ids(
        sshfs.ACCOUNT, ACCOUNT_FIRST_CHOICE, cluster.controller.name, _without_copy_account(cluster.facts)
    )


def _without_copy_account(facts: Mapping[str, Facts]) -> dict[str, Facts]:
    """The facts without the second name of the user: it has the same id."""
    return {
        host: replace(fact, users={name: user for name, user in fact.users.items() if name != stage.ACCOUNT})
        for host, fact in facts.items()
    }
