"""How each host accesses a share: as the spec asks, or in the next best way that the host supports."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from shoal.agent.facts import Facts
from shoal.spec.storage import CONTROLLER, SharedDirectory

AccessKind = Literal["local", "nfs", "sshfs", "stage"]
FILESYSTEMS = ("nfs4", "nfsd")
"""What the facts report of the hosts' kernels."""
DESCRIPTIONS = {
    "local": "its own directory",
    "nfs": "mounted by NFS",
    "sshfs": "mounted over SSH (sshfs)",
    "stage": "copied before a job and back after it (rsync)",
}


@dataclass(frozen=True)
class ShareAccess:
    """How a host accesses a share, and why not in a better way."""

    kind: AccessKind
    why: str = ""


def server_of(share: SharedDirectory, controller: str) -> str:
    """The name of the host that keeps the share."""
    return controller if share.host == CONTROLLER else share.host


def choose_access(share: SharedDirectory, server: str, host: str, facts: Facts) -> ShareAccess:
    """The best access that the spec allows and the host supports."""
    if host == server:
        return ShareAccess("local")
    reasons: list[str] = []
    if share.kind == "nfs":
        if "nfs4" in facts.filesystems:
            return ShareAccess("nfs")
        reasons.append("its kernel has no NFS")
    if share.kind in ("nfs", "sshfs"):
        if facts.fuse:
            return ShareAccess("sshfs", "; ".join(reasons))
        reasons.append("it has no FUSE")
    return ShareAccess("stage", "; ".join(reasons))


def kernel_serves_nfs(facts: Facts) -> bool:
    """Whether the host's kernel can serve NFS; otherwise nfs-ganesha does."""
    return "nfsd" in facts.filesystems
