"""How each host gets at a share: the way that was asked for, or the next best one that the host is capable of."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from shoal.agent.facts import Facts
from shoal.spec.storage import CONTROLLER, SharedDirectory

WayKind = Literal["local", "nfs", "sshfs", "stage"]
FILESYSTEMS = ("nfs4", "nfsd")
"""What to ask the hosts' kernels about."""
WORDS = {
    "local": "its own directory",
    "nfs": "mounted by NFS",
    "sshfs": "mounted over SSH (sshfs)",
    "stage": "copied before a job and back after it (rsync)",
}


@dataclass(frozen=True)
class Way:
    """How a host has a share, and what kept it from a better way."""

    kind: WayKind
    why: str = ""


def server_of(share: SharedDirectory, controller: str) -> str:
    """The name of the host that keeps the share."""
    return controller if share.host == CONTROLLER else share.host


def way(share: SharedDirectory, server: str, host: str, facts: Facts) -> Way:
    """The best way that the file allows and the host is capable of."""
    if host == server:
        return Way("local")
    reasons: list[str] = []
    if share.kind == "nfs":
        if "nfs4" in facts.filesystems:
            return Way("nfs")
        reasons.append("its kernel has no NFS")
    if share.kind in ("nfs", "sshfs"):
        if facts.fuse:
            return Way("sshfs", "; ".join(reasons))
        reasons.append("it has no FUSE")
    return Way("stage", "; ".join(reasons))


def served_by_kernel(facts: Facts) -> bool:
    """Whether the host's own kernel can serve NFS; else nfs-ganesha does."""
    return "nfsd" in facts.filesystems
