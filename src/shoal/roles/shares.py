"""The shares of a cluster as all roles that have to do with them see them."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING

from shoal.agent.document import Command, File
from shoal.agent.facts import Facts
from shoal.spec.finding import Finding
from shoal.spec.members import members as members_of
from shoal.spec.model import Spec
from shoal.spec.storage import SharedDirectory
from shoal.storage.ways import WayKind, server_of, way

if TYPE_CHECKING:
    from shoal.roles.cluster import Cluster

RECORD = "/etc/shoal/shares"
"""What an earlier run mounted on a host, so that a later one takes away what the file no longer names."""
SERVES_NFS, SERVES_SSH, COPIES = "serves nfs", "serves ssh", "copies"
"""Lines of that record beside the mounts."""
KEEPS = "keeps"
"""Begins a line of it for each share that the host keeps, with where others have it and which directory it is."""
RELOAD_SSHD = "reload sshd"


@dataclass(frozen=True)
class Served:
    """A share with the names worked out."""

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


def shares(spec: Spec) -> tuple[Served, ...]:
    """The shares of a spec, in its order."""
    controller = members_of(spec)[0].name
    return tuple(Served(where, share, server_of(share, controller)) for where, share in spec.storage.items())


def homes_of(spec: Spec) -> Served | None:
    """The share that the users' homes are on, if one is."""
    return next((share for share in shares(spec) if share.homes), None)


def moved(spec: Spec, facts: Mapping[str, Facts]) -> tuple[Finding, ...]:
    """Shares that an earlier file had in another place. What is in them stays there: all would see an empty one."""
    return tuple(
        Finding(
            "error",
            f"{share.where} is kept here, in {kept[share.where]}, and the file says {share.path} of {share.server}",
            fix="what is in it does not move by itself: take the share out of the file and run `shoal up`, carry the "
            "files over, then put it in again",
            host=name,
        )
        for name, fact in facts.items()
        for kept in (_kept(fact),)
        for share in shares(spec)
        if share.where in kept and (name, kept[share.where]) != (share.server, share.path)
    )


def _kept(facts: Facts) -> dict[str, str]:
    """The directories that a host kept for shares, by where others had them."""
    lines = [line.split(" ") for line in text_of(facts, RECORD).splitlines()]
    return {words[1]: words[2] for words in lines if words[0] == KEEPS and len(words) == 3}


def way_of(cluster: Cluster, share: Served, member: str) -> WayKind:
    return way(share.share, share.server, member, cluster.facts[member]).kind


def text_of(facts: Facts | None, path: str) -> str:
    """The text of a file we asked about; "" where there is none."""
    fact = facts.files.get(path) if facts else None
    return (fact.text if fact else None) or ""


def bracketed(address: str) -> str:
    return f"[{address}]" if ":" in address else address


def sshd_file(path: str, text: str | None) -> File:
    """A file of sshd's settings, which sshd has read before it is put in place."""
    trial = ("/usr/sbin/sshd", "-t", "-f", "/dev/stdin") if text else ()
    return File(path, text, reloads=(f"command {RELOAD_SSHD}",), accepted_by=trial)


def reload_sshd() -> Command:
    """sshd reads its settings again, also where no systemd started it."""
    reload = "if [ -d /run/systemd/system ]; then systemctl try-reload-or-restart ssh; else pkill -HUP -o -x sshd; fi"
    return Command(RELOAD_SSHD, ("sh", "-c", reload), on_change=True)
