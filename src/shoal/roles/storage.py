"""Shares: the host that keeps one serves it to the members and nobody else; the others have it as they can."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import TYPE_CHECKING

from shoal.agent.document import Command, Directory, Document, File, Item, Mount
from shoal.agent.facts import Facts
from shoal.roles.part import How, Part
from shoal.roles.share_client import away, no_copies, using
from shoal.roles.share_server import (
    FOREIGN_EXPORTS,
    NOT_FOR_US,
    RPCBIND,
    foreign_exports,
    no_nfs_server,
    no_ssh_server,
    serving,
)
from shoal.roles.shares import COPIES, KEEPS, RECORD, SERVES_NFS, SERVES_SSH, moved, shares, text_of
from shoal.roles.stage import Stage
from shoal.spec.finding import Finding
from shoal.spec.member import Member
from shoal.spec.model import Spec
from shoal.storage import nfs, sshfs, stage
from shoal.storage.ways import FILESYSTEMS, served_by_kernel, way

if TYPE_CHECKING:
    from shoal.roles.cluster import Cluster

SSHD_CONFIG = "/etc/ssh/sshd_config"


class Storage(Part):
    """What hosts have to be for the shares."""

    in_containers = True
    by_members = True
    files: Mapping[str, How] = {RECORD: "text"}
    services = (nfs.GANESHA_SERVICE, "nfs-server", *NOT_FOR_US, *RPCBIND)

    def packages(self, spec: Spec, member: Member, facts: Facts | None) -> tuple[str, ...]:
        if facts is None:
            return ()
        names: list[str] = []
        for share in shares(spec):
            kind = way(share.share, share.server, member.name, facts).kind
            if kind == "local" and share.share.kind == "nfs":
                names += ["nfs-kernel-server"] if served_by_kernel(facts) else ["nfs-ganesha", "nfs-ganesha-vfs"]
            names += {"nfs": ["nfs-common"], "sshfs": ["sshfs"], "stage": ["rsync", "sudo"]}.get(kind, [])
            if kind == "local":
                names.append("rsync")  # for hosts that can do no better
        return tuple(names)

    def filesystems(self, spec: Spec) -> tuple[str, ...]:
        return FILESYSTEMS if spec.storage else ()

    def facts_files(self, spec: Spec) -> Mapping[str, How]:
        if not spec.storage:
            return {}
        keys = (sshfs.PUBLIC_KEY, sshfs.HOST_KEY, sshfs.KNOWN_HOSTS, f"{sshfs.KEYS}/{sshfs.ACCOUNT}")
        return dict.fromkeys((*keys, nfs.GANESHA_CONF, FOREIGN_EXPORTS, SSHD_CONFIG), "text")

    def ports(self, spec: Spec, member: Member) -> tuple[str, ...]:
        serves = any(share.server == member.name and share.share.kind == "nfs" for share in shares(spec))
        return (nfs.PORT,) if serves else ()

    def prepare(self, spec: Spec, member: Member, facts: Facts) -> Document:
        """A key that the servers must know. It is made on the host and stays there."""
        over_ssh = any(
            way(share.share, share.server, member.name, facts).kind in ("sshfs", "stage") for share in shares(spec)
        )
        if not over_ssh or sshfs.plain_key(text_of(facts, sshfs.PUBLIC_KEY)):
            return ()
        make = 'rm -f "$1" "$1.pub" && exec ssh-keygen -q -t ed25519 -N "" -C "shoal $2" -f "$1"'
        return (
            Directory("/etc/shoal"),
            Directory(sshfs.DIRECTORY, mode=0o700),
            Command(
                "make a key for shares",
                ("sh", "-c", make, "sh", sshfs.KEY, member.name),
                unless=("test", "-s", sshfs.PUBLIC_KEY),
            ),
        )

    def documents(self, cluster: Cluster, member: Member) -> Mapping[Stage, Document]:
        served, used = tuple(serving(cluster, member)), tuple(using(cluster, member))
        keeps = [share for share in shares(cluster.spec) if share.server == member.name]
        lines = [f"{KEEPS} {share.where} {share.path}" for share in keeps]
        silent = [share.where for share in away(cluster, member)]
        clearing = tuple(_clearing(cluster.facts[member.name], (*served, *used), lines, silent))
        return {Stage.SERVICES: (*clearing, *served), Stage.NODES: used}

    def farewell(self) -> Document:
        """Nothing of a share stays mounted or served; what is in it stays on the host that keeps it."""
        return (
            Command("take the shares away", ("sh", "-c", _FAREWELL, "sh", RECORD), unless=("test", "!", "-e", RECORD)),
            *no_nfs_server(),
            *no_ssh_server(),
            *no_copies(),
            File(sshfs.KEY),
            File(sshfs.PUBLIC_KEY),
            File(sshfs.KNOWN_HOSTS),
            File(sshfs.TRANSPORT),
            File(RECORD),
        )

    def findings(self, cluster: Cluster) -> tuple[Finding, ...]:
        return (*moved(cluster.spec, cluster.facts), *dict.fromkeys(_findings(cluster)))


_SIGNS = {SERVES_NFS: (nfs.EXPORTS, nfs.GANESHA_CONF), SERVES_SSH: (sshfs.SSHD_CONF,), COPIES: (stage.LIST,)}
"""Files by which a host serves or copies."""


def _clearing(facts: Facts, items: Document, keeps: Sequence[str], away: Sequence[str]) -> Iterator[Item]:
    """What an earlier file had asked for and this one does not, taken away; then the record of what is to be there.

    What was mounted of shares that are `away` stays.
    """
    lines = text_of(facts, RECORD).splitlines()
    before = [tuple(line.split(" ", 1)) for line in lines if line.startswith(("automount /", "mount /"))]
    wanted = [("automount" if mount.automount else "mount", mount.where) for mount in items if isinstance(mount, Mount)]
    wanted += [(kind, where) for kind, where in before if any(f"{where}/".startswith(f"{share}/") for share in away)]
    files = {item.path for item in items if isinstance(item, File)}
    kept = [line for line, signs in _SIGNS.items() if not files.isdisjoint(signs)]
    if not wanted and not lines and not kept and not keeps:
        return
    for kind, where in before:
        if (kind, where) not in wanted:
            yield Mount(where, fstype="none", mounted=False, automount=kind == "automount")
    if SERVES_NFS in lines and SERVES_NFS not in kept:
        yield from no_nfs_server()
    if SERVES_SSH in lines and SERVES_SSH not in kept:
        yield from no_ssh_server()
    if COPIES in lines and COPIES not in kept:
        yield from no_copies()
    text = "".join(f"{line}\n" for line in (*(f"{kind} {where}" for kind, where in wanted), *kept, *keeps))
    yield Directory("/etc/shoal")
    yield File(RECORD, f"# Written by shoal; changes here are lost.\n{text}" if text else None)


_FAREWELL = r"""
set -u
while read -r kind where; do
    case $kind in automount | mount) ;; *) continue ;; esac
    unit=$(systemd-escape --path "$where")
    systemctl disable --now "$unit.automount" 2> /dev/null
    systemctl disable "$unit.mount" 2> /dev/null
    while umount --lazy --no-canonicalize "$where" 2> /dev/null; do :; done
    rm -f "/etc/systemd/system/$unit.automount" "/etc/systemd/system/$unit.mount"
done < "$1"
[ ! -d /run/systemd/system ] || systemctl daemon-reload
"""


def _findings(cluster: Cluster) -> Iterator[Finding]:
    for share in shares(cluster.spec):
        if share.server not in cluster.facts:
            what = f"the host that keeps {share.where} does not answer; whoever uses the share waits"
            fix = f"bring {share.server} back; `shoal up` then mounts it where it is not yet"
            yield Finding("warning", what, fix=fix, path=f"storage.{share.where}")
            continue
        facts = cluster.facts[share.server]
        if share.share.kind == "nfs" and served_by_kernel(facts) and foreign_exports(facts):
            yield Finding(
                "warning",
                "this host has exports of its own, so its NFS server goes on answering on all addresses",
                FOREIGN_EXPORTS,
                "keep them off this host, or guard port 2049 yourself",
                host=share.server,
            )
    for name, facts in cluster.facts.items():
        text = text_of(facts, SSHD_CONFIG)
        if text and "/etc/ssh/sshd_config.d/" not in text:
            fix = f"put `Include /etc/ssh/sshd_config.d/*.conf` at the beginning of {SSHD_CONFIG}"
            yield Finding("warning", "sshd does not read what Shoal says about shares and users", "", fix, host=name)
