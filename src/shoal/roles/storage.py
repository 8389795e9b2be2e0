"""Shares: their servers and clients. Clients mount a share by NFS or over SSH, or copy it for each job."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence

from shoal.agent.document import HEADER, Command, Directory, Document, File, Item, Mount
from shoal.agent.facts import Facts
from shoal.network.tunnel import bracketed
from shoal.remote import program_text, shell_command
from shoal.roles.component import Cluster, Component, FileQuery, Stage
from shoal.roles.shares import (
    COPIES,
    FOREIGN_EXPORTS,
    PACKAGE_SERVICES,
    RECORD,
    RPCBIND,
    SERVED_RECORD,
    SERVES_NFS,
    SERVES_SSH,
    ServedShare,
    access_kind,
    has_foreign_exports,
    moved_share_findings,
    nfs_server_removal,
    recorded_shares,
    rpcbind_removal,
    server_items,
    shares,
    shares_account,
    ssh_server_removal,
)
from shoal.spec.finding import Finding
from shoal.spec.member import Member
from shoal.spec.model import Spec
from shoal.storage import nfs, sshfs, stage
from shoal.storage.nfs import FILESYSTEMS, choose_access, kernel_serves_nfs

SSHD_CONFIG = "/etc/ssh/sshd_config"


class StorageComponent(Component):
    """Packages, servers, mounts and copies of shares."""

    in_containers = True
    changes_with_members = changes_with_rentals = precedes_slurmd = True
    files: Mapping[str, FileQuery] = {RECORD: "text"}
    services = (nfs.GANESHA_SERVICE, "nfs-server", *PACKAGE_SERVICES, *RPCBIND)

    def packages(self, spec: Spec, member: Member, facts: Facts | None) -> tuple[str, ...]:
        if facts is None:
            return ()
        names: list[str] = []
        for share in shares(spec):
            kind = choose_access(share.share, share.server, member.name, facts).kind
            if kind == "local" and share.share.kind == "nfs":
                names += ["nfs-kernel-server"] if kernel_serves_nfs(facts) else ["nfs-ganesha", "nfs-ganesha-vfs"]
            # netbase: without its /etc/protocols mount.nfs4 ends with "Failed to find 'tcp' protocol".
            names += {"nfs": ["nfs-common", "netbase"], "sshfs": ["sshfs"], "stage": ["rsync", "sudo"]}.get(kind, [])
            if kind == "local":
                names.append("rsync")  # for clients that can only copy
        return tuple(names)

    def filesystems(self, spec: Spec) -> tuple[str, ...]:
        return FILESYSTEMS if spec.storage else ()

    def fact_files(self, spec: Spec) -> Mapping[str, FileQuery]:
        if not spec.storage:
            return {}
        keys = (sshfs.PUBLIC_KEY, sshfs.HOST_KEY, sshfs.KNOWN_HOSTS, f"{sshfs.KEYS}/{sshfs.ACCOUNT}", sshfs.HOME_KEYS)
        return dict.fromkeys((*keys, nfs.GANESHA_CONF, FOREIGN_EXPORTS, SSHD_CONFIG), "text")

    def ports(self, spec: Spec, member: Member) -> tuple[str, ...]:
        serves = any(share.server == member.name and share.share.kind == "nfs" for share in shares(spec))
        return (nfs.PORT,) if serves else ()

    def prepare(self, spec: Spec, member: Member, facts: Facts) -> Document:
        """A key that the servers must authorize. It never leaves the host."""
        kinds = {choose_access(share.share, share.server, member.name, facts).kind for share in shares(spec)}
        if kinds.isdisjoint(("sshfs", "stage")) or sshfs.strip_comment(facts.text(sshfs.PUBLIC_KEY)):
            return ()
        make = 'rm -f "$1" "$1.pub" && exec ssh-keygen -q -t ed25519 -N "" -C "shoal $2" -f "$1"'
        argv = shell_command(make, sshfs.KEY, member.name)
        key = Command("make a key for shares", argv, unless=("test", "-s", sshfs.PUBLIC_KEY))
        return (Directory("/etc/shoal"), Directory(sshfs.DIRECTORY, mode=0o700), key)

    def documents(self, cluster: Cluster, member: Member) -> Mapping[Stage, Document]:
        served, used = tuple(server_items(cluster, member)), tuple(client_items(cluster, member))
        keeps = [share for share in shares(cluster.spec) if share.server == member.name]
        lines = [f"{SERVED_RECORD} {share.where} {share.path}" for share in keeps]
        unreachable = [share.where for share in unreachable_shares(cluster, member)]
        clearing = tuple(_record_items(cluster.facts[member.name], (*served, *used), lines, unreachable))
        return {Stage.SERVICES: (*clearing, *served), Stage.NODES: used}

    def removal(self) -> Document:
        """Unmounts and stops serving all shares; their files stay on the server."""
        unmount = shell_command(program_text("share_removal.sh"), RECORD)
        return (
            Command("take the shares away", unmount, unless=("test", "!", "-e", RECORD)),
            *nfs_server_removal(),
            *ssh_server_removal(),
            *copy_removal(),
            *map(File, (sshfs.KEY, sshfs.PUBLIC_KEY, sshfs.KNOWN_HOSTS, sshfs.HOME_KEYS, sshfs.PROXY_PROGRAM, RECORD)),
        )

    def cluster_services(self, facts: Facts) -> tuple[str, ...]:
        return tuple(f"the share {mount_point}" for mount_point in recorded_shares(facts))

    def findings(self, cluster: Cluster) -> tuple[Finding, ...]:
        return (*moved_share_findings(cluster.spec, cluster.facts), *dict.fromkeys(_findings(cluster)))


_RECORD_FILES = {SERVES_NFS: (nfs.EXPORTS, nfs.GANESHA_CONF), SERVES_SSH: (sshfs.SSHD_CONF,), COPIES: (stage.LIST,)}
"""The files of a host that serves or copies, by line of the record."""


def _record_items(
    facts: Facts, items: Document, keeps: Sequence[str], unreachable_shares: Sequence[str]
) -> Iterator[Item]:
    """Removes what an earlier spec had and this one does not; then the record of what should exist.

    What was mounted of shares that are `away` stays.
    """
    lines = facts.text(RECORD).splitlines()
    before = [tuple(line.split(" ", 1)) for line in lines if line.startswith(("automount /", "mount /"))]
    mounts = [("automount" if mount.automount else "mount", mount.where) for mount in items if isinstance(mount, Mount)]
    away = tuple(f"{share}/" for share in unreachable_shares)
    mounts += [(kind, mount_point) for kind, mount_point in before if f"{mount_point}/".startswith(away)]
    files = {item.path for item in items if isinstance(item, File)}
    file_lines = [line for line, signs in _RECORD_FILES.items() if not files.isdisjoint(signs)]
    if not mounts and not lines and not file_lines and not keeps:
        return
    for kind, mount_point in before:
        if (kind, mount_point) not in mounts:
            yield Mount(mount_point, fstype="none", mounted=False, automount=kind == "automount")
    removals = {SERVES_NFS: nfs_server_removal, SERVES_SSH: ssh_server_removal, COPIES: copy_removal}
    for line, removal in removals.items():
        if line in lines and line not in file_lines:
            yield from removal()
    text = "".join(
        f"{line}\n" for line in (*(f"{kind} {mount_point}" for kind, mount_point in mounts), *file_lines, *keeps)
    )
    yield Directory("/etc/shoal")
    yield File(RECORD, HEADER + text if text else None)


def _findings(cluster: Cluster) -> Iterator[Finding]:
    for share in shares(cluster.spec):
        if share.server not in cluster.facts:
            what = f"{share.server}, the server of {share.where}, does not answer; processes that use the share wait"
            fix = f"start {share.server}; `shoal up` then mounts the share where it is missing"
            yield Finding("warning", what, fix=fix, path=f"storage.{share.where}")
            continue
        facts = cluster.facts[share.server]
        if share.share.kind == "nfs" and kernel_serves_nfs(facts) and has_foreign_exports(facts):
            what = "this host has other exports, so its NFS server listens on all addresses"
            fix = "remove them, or close port 2049 to other hosts yourself"
            yield Finding("warning", what, FOREIGN_EXPORTS, fix, host=share.server)
    for name, facts in cluster.facts.items():
        text = facts.text(SSHD_CONFIG)
        if text and "/etc/ssh/sshd_config.d/" not in text:
            fix = f"put `Include /etc/ssh/sshd_config.d/*.conf` at the beginning of {SSHD_CONFIG}"
            yield Finding("warning", "sshd does not read Shoal's settings for shares and users", "", fix, host=name)


def client_items(cluster: Cluster, member: Member) -> Iterator[Item]:
    """The mounts and copies of other hosts' shares, without `unreachable_shares`."""
    facts = cluster.facts[member.name]
    others = [share for share in shares(cluster.spec) if share.server != member.name]
    ways = {share: access_kind(cluster, share, member.name) for share in others}
    if "nfs" in ways.values():
        yield from rpcbind_removal(facts)
    servers = sshfs.render_known_hosts(_server_keys(cluster, member))
    if not {"sshfs", "stage"}.isdisjoint(ways.values()):
        yield Directory("/etc/shoal")
        yield Directory(sshfs.DIRECTORY, mode=0o700)
        yield File(sshfs.KNOWN_HOSTS, servers)
        yield Directory("/usr/local/lib/shoal")
    if "sshfs" in ways.values():
        yield File(sshfs.PROXY_PROGRAM, program_text("sftp_proxy"), mode=0o755)
    copies = [share for share, kind in ways.items() if kind == "stage" and not share.homes]
    if copies:
        yield from _copies(cluster, copies, servers)
    for share, kind in ways.items():
        address = cluster.addresses.get(share.server)
        if address is None or share in unreachable_shares(cluster, member):
            continue
        read_only = share.share.read_only
        if kind == "nfs":
            options = nfs.mount_options(share.share.connections, read_only=read_only)
            yield Mount(share.where, f"{bracketed(address)}:{share.path}", "nfs4", options, automount=True)
        elif kind == "sshfs" and share.homes:
            for name, ids in cluster.user_ids.items():
                options = sshfs.mount_options(read_only=False, owner=(ids.uid, ids.gid))
                place = f"{share.where}/{name}"
                yield _over_ssh(place, f"{name}@{bracketed(address)}:{share.path}/{name}", options)
        elif kind == "sshfs":
            options = sshfs.mount_options(read_only=read_only)
            yield _over_ssh(share.where, f"{sshfs.ACCOUNT}@{bracketed(address)}:{share.where}", options)


def unreachable_shares(cluster: Cluster, member: Member) -> list[ServedShare]:
    """Shares whose server does not answer: the member keeps its mounts of them, and gets no new ones.

    A rented machine joins with the facts of the controller only, so none counts as unreachable there.
    """
    missing = [] if member.rented else [share for share in shares(cluster.spec) if share.server not in cluster.facts]
    return [share for share in missing if share.server != member.name]


def _over_ssh(mount_point: str, remote: str, options: str) -> Mount:
    return Mount(mount_point, remote, "fuse.sshfs", options, automount=True, if_known=sshfs.SYMLINK_OPTION)


def _copies(cluster: Cluster, copies: list[ServedShare], servers: str) -> Iterator[Item]:
    """Local directories, and the program that copies to them before a job and back after it."""
    yield from shares_account(cluster)
    for share in copies:
        make = ("install", "-d", "-m", "0777", "-o", sshfs.ACCOUNT, "-g", sshfs.ACCOUNT, share.where)
        yield Command(f"make {share.where}", make, unless=("test", "-d", share.where))
    copied = [
        stage.StagedShare(share.where, cluster.addresses[share.server], share.share.read_only)
        for share in copies
        if share.server in cluster.addresses
    ]
    yield Directory(stage.DIRECTORY, owner=sshfs.ACCOUNT, group=sshfs.ACCOUNT, mode=0o700)
    give = ("install", "-o", sshfs.ACCOUNT, "-g", sshfs.ACCOUNT, "-m", "0600", sshfs.KEY, stage.KEY)
    yield Command("give the key to who copies", give, unless=("cmp", "-s", sshfs.KEY, stage.KEY))
    yield File(stage.KNOWN_HOSTS, servers)
    yield File(stage.LIST, stage.render_list(copied))
    yield File(stage.PROGRAM, stage.render_program(), mode=0o755)
    yield File(stage.SUDOERS, stage.render_sudoers("shoal-users"), mode=0o440, accepted_by=("visudo", "-c", "-f", "-"))


def _server_keys(cluster: Cluster, member: Member) -> dict[str, str]:
    """The servers' host keys by address. A server that does not answer keeps its known key."""
    lines = cluster.facts[member.name].text(sshfs.KNOWN_HOSTS).splitlines()
    known_keys = dict(line.split(" ", 1) for line in lines if line and not line.startswith("#"))
    keys = {}
    for share in shares(cluster.spec):
        address = cluster.addresses.get(share.server, "")
        facts = cluster.facts.get(share.server)
        key = sshfs.strip_comment(facts.text(sshfs.HOST_KEY)) if facts else known_keys.get(address, "")
        if address and key and share.server != member.name:
            keys[address] = key
    return keys


def copy_removal() -> list[Item]:
    """Removes the program. The copies stay: they may hold results that were never copied back."""
    return [File(path) for path in (stage.PROGRAM, stage.SUDOERS, stage.LIST, stage.KEY, stage.KNOWN_HOSTS)]
