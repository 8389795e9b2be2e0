"""The shares of a cluster, and their servers: they export to members only, by NFS and over SSH."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace

from shoal.agent.document import Command, Directory, File, Group, Item, Mount, Service, User
from shoal.agent.facts import Facts
from shoal.roles.component import AccountIds, Cluster, choose_account_ids
from shoal.spec.finding import Finding
from shoal.spec.member import Member
from shoal.spec.members import members as members_of
from shoal.spec.model import Spec
from shoal.spec.storage import SharedDirectory
from shoal.storage import nfs, sshfs, stage
from shoal.storage.nfs import AccessKind, choose_access, kernel_serves_nfs

RECORD = "/etc/shoal/shares"
"""What an earlier run mounted on a host, so that a later run removes what the spec no longer names."""
SERVES_NFS, SERVES_SSH, COPIES = "serves nfs", "serves ssh", "copies"
"""Lines of the record beside the mounts."""
SERVED_RECORD = "keeps"
"""Begins a line of the record for each share that the host serves, with its mount point and its directory."""
RELOAD_SSHD = "reload sshd"
# Debian calls the unit ssh, RHEL sshd. Where systemd has the port (ssh.socket), sshd does not survive a reload: it
# cannot bind that port. Connections outlive its restart, and new ones wait at the socket.
RELOAD = """
[ -d /run/systemd/system ] || exec pkill -HUP -o -x sshd
systemctl -q is-active ssh.service || systemctl -q is-active ssh.socket && unit=ssh || unit=sshd
systemctl -q is-active "$unit.socket" && exec systemctl try-restart "$unit.service"
systemctl try-reload-or-restart "$unit.service" || exec pkill -HUP -o -x sshd
"""
ACCOUNT_FIRST_CHOICE = 979
EXPORTFS, RELOAD_GANESHA = "export the shares", "reload ganesha"
FOREIGN_EXPORTS = "/etc/exports"
PACKAGE_SERVICES = ("nfs-ganesha", "nfs-ganesha-lock")
RPCBIND = ("rpcbind.socket", "rpcbind")


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
    return tuple(
        ServedShare(mount_point, share, share.server(controller)) for mount_point, share in spec.storage.items()
    )


def homes_of(spec: Spec) -> ServedShare | None:
    """The share with the users' homes, if any."""
    return next((share for share in shares(spec) if share.homes), None)


def moved_share_findings(spec: Spec, facts: Mapping[str, Facts]) -> tuple[Finding, ...]:
    """Shares that an earlier spec had in another place. Their files stay there: the new share would be empty."""
    fix = (
        "its files do not move by themselves: delete the share from the file and run `shoal up`, copy the "
        "files, then add it again"
    )
    findings = []
    for name, fact in facts.items():
        paths = recorded_shares(fact)
        for share in shares(spec):
            if share.where in paths and (name, paths[share.where]) != (share.server, share.path):
                what = f"{share.where} is in {paths[share.where]} here, and the file has {share.path} of {share.server}"
                findings.append(Finding("error", what, fix=fix, host=name))
    return tuple(findings)


def recorded_shares(facts: Facts) -> dict[str, str]:
    """The shares that a host serves by its record: their directories by mount point."""
    lines = [line.split(" ") for line in facts.text(RECORD).splitlines()]
    return {fields[1]: fields[2] for fields in lines if fields[0] == SERVED_RECORD and len(fields) == 3}


def access_kind(cluster: Cluster, share: ServedShare, member: str) -> AccessKind:
    return choose_access(share.share, share.server, member, cluster.facts[member]).kind


# Where systemd has sshd's port, the directory is there only while such a connection is.
TRY_SSHD = "mkdir -p /run/sshd && exec /usr/sbin/sshd -t -f /dev/stdin"


def sshd_file(path: str, text: str | None) -> File:
    """A file of sshd's settings, which sshd tests before it is installed."""
    trial = ("sh", "-c", TRY_SSHD) if text else ()
    return File(path, text, reloads=(f"command {RELOAD_SSHD}",), accepted_by=trial)


def reload_sshd() -> Command:
    """sshd reads its settings again, with or without systemd."""
    return Command(RELOAD_SSHD, ("sh", "-c", RELOAD), on_change=True)


def shares_account(cluster: Cluster) -> list[Item]:
    ids = shares_ids(cluster)
    return [Group(sshfs.ACCOUNT, ids.gid), User(sshfs.ACCOUNT, ids.uid, group=sshfs.ACCOUNT, home="/")]


def shares_ids(cluster: Cluster) -> AccountIds:
    # Without the second name of the user, which has the same id.
    facts = {
        host: replace(fact, users={name: user for name, user in fact.users.items() if name != stage.ACCOUNT})
        for host, fact in cluster.facts.items()
    }
    return choose_account_ids(sshfs.ACCOUNT, ACCOUNT_FIRST_CHOICE, cluster.controller.name, facts)


def server_items(cluster: Cluster, member: Member) -> Iterator[Item]:
    """The directories of the member's shares, and the servers through which others mount them."""
    served = [share for share in shares(cluster.spec) if share.server == member.name]
    for share in served:
        # Over SSH all files belong to one user: with the sticky bit, users on the server could not overwrite them.
        open_to_all = "1777" if share.share.kind == "nfs" else "0777"
        mode = "0755" if share.homes or share.share.read_only else open_to_all
        make = ("install", "-d", "-m", mode, share.path)
        yield Command(f"make {share.path}", make, unless=("test", "-d", share.path))
        if share.path != share.where:
            yield Mount(share.where, share.path, "none", "bind")
    others = tuple(address for name, address in cluster.addresses.items() if name != member.name)
    exports = [nfs.Export(share.path, others, share.share.read_only) for share in served if share.share.kind == "nfs"]
    if exports:
        serve = _kernel_server if kernel_serves_nfs(cluster.facts[member.name]) else _ganesha
        yield from serve(cluster.facts[member.name], cluster.addresses.get(member.name, "127.0.0.1"), exports)
    yield from _home_keys(cluster, member)
    over_ssh = [share for share in served if not share.homes]
    if over_ssh and _has_ssh_clients(cluster, served):
        yield from _ssh_server(cluster, member, over_ssh)


def _home_keys(cluster: Cluster, member: Member) -> Iterator[Item]:
    """The keys with which the other hosts mount homes; every user's account accepts them."""
    share = homes_of(cluster.spec)
    if share is not None and share.server == member.name and cluster.spec.users:
        yield Directory(sshfs.KEYS)
        yield File(sshfs.HOME_KEYS, sshfs.render_authorized_keys(host_keys(cluster, member.name, sshfs.HOME_KEYS)))
    elif cluster.facts[member.name].text(sshfs.HOME_KEYS):
        yield File(sshfs.HOME_KEYS)


def _kernel_server(facts: Facts, address: str, exported: list[nfs.Export]) -> Iterator[Item]:
    if not has_foreign_exports(facts):
        yield Directory("/etc/nfs.conf.d")
        yield File(nfs.NFS_CONF, nfs.nfs_conf(address), restarts=("nfs-server",))
        if not has_rpcbind(facts):
            # The package's unit starts these with the server, enabled or not.
            for path, text in map(nfs.unneeded_unit_drop_in, nfs.UNNEEDED_UNITS):
                yield Directory(path.rpartition("/")[0])
                yield File(path, text)
    yield from rpcbind_removal(facts)
    yield Directory("/etc/exports.d")
    yield File(nfs.EXPORTS, nfs.render_exports(exported), reloads=(f"command {EXPORTFS}",))
    yield Directory(nfs.SERVER_DROP_IN.rpartition("/")[0])
    yield File(nfs.SERVER_DROP_IN, nfs.server_drop_in())
    yield Service("nfs-server")
    yield Command(EXPORTFS, ("exportfs", "-ra"), on_change=True)


def _ganesha(facts: Facts, address: str, exported: list[nfs.Export]) -> Iterator[Item]:
    newer = nfs.supports_io_flusher(facts.os_id, facts.os_version)
    conf = nfs.ganesha_conf(address, exported, io_flusher=newer)
    before = facts.text(nfs.GANESHA_CONF)
    # Ganesha reloads the exports while it runs; it reads the rest only at the start.
    restart = before.partition("EXPORT {")[0] != conf.partition("EXPORT {")[0]
    yield from rpcbind_removal(facts)
    yield from [Service(name, enabled=False, running=False) for name in PACKAGE_SERVICES]
    yield Directory("/etc/shoal")
    reloads = () if restart else (f"command {RELOAD_GANESHA}",)
    yield File(nfs.GANESHA_CONF, conf, restarts=(nfs.GANESHA_SERVICE,) if restart else (), reloads=reloads)
    yield File(nfs.GANESHA_UNIT, nfs.ganesha_unit(), restarts=(nfs.GANESHA_SERVICE,))
    yield Service(nfs.GANESHA_SERVICE)
    yield Command(RELOAD_GANESHA, ("systemctl", "kill", "-s", "HUP", nfs.GANESHA_SERVICE), on_change=True)


def rpcbind_removal(facts: Facts) -> list[Item]:
    """NFS 4 does not need rpcbind, which answers everyone. An rpcbind that ran before Shoal is left alone."""
    return [] if has_rpcbind(facts) else [Service(name, enabled=False, running=False) for name in RPCBIND]


def has_rpcbind(facts: Facts) -> bool:
    return any(map(facts.is_active, RPCBIND))


def _ssh_server(cluster: Cluster, member: Member, served: list[ServedShare]) -> Iterator[Item]:
    yield from shares_account(cluster)
    yield Directory(sshfs.ROOT)
    for share in served:
        mode = "ro" if share.share.read_only else "rw"
        yield Mount(sshfs.ROOT + share.where, share.path, "none", f"bind,{mode},nosuid,nodev")
    yield Directory(sshfs.KEYS)
    keys = host_keys(cluster, member.name, f"{sshfs.KEYS}/{sshfs.ACCOUNT}")
    yield File(f"{sshfs.KEYS}/{sshfs.ACCOUNT}", sshfs.render_authorized_keys(keys))
    conf = sshfs.sshd_conf()
    if "stage" in _access_kinds(cluster, served):
        # sshd starts rrsync with the user's shell; Shoal starts nothing with it.
        account = User(stage.ACCOUNT, shares_ids(cluster).uid, group=sshfs.ACCOUNT, home="/", twin_of=sshfs.ACCOUNT)
        yield replace(account, shell="/bin/sh")  # noqa: S604  # nosec B604
        conf += stage.sshd_block()
    yield sshd_file(sshfs.SSHD_CONF, conf)
    yield reload_sshd()


def _access_kinds(cluster: Cluster, served: list[ServedShare]) -> set[AccessKind]:
    """How the hosts that answer have access to these shares."""
    names = [member.name for member in cluster.members if member.name in cluster.facts]
    return {access_kind(cluster, share, name) for share in served for name in names}


def _has_ssh_clients(cluster: Cluster, served: list[ServedShare]) -> bool:
    """Whether any host needs SSH for these shares. A host that does not answer may, if any did before."""
    facts_missing = any(member.name not in cluster.facts for member in cluster.members)
    if facts_missing and any(SERVES_SSH in cluster.facts[share.server].text(RECORD).splitlines() for share in served):
        return True
    return not {"sshfs", "stage"}.isdisjoint(_access_kinds(cluster, served))


def host_keys(cluster: Cluster, server: str, path: str) -> list[sshfs.MemberKey]:
    """The keys of the other hosts. A host that does not answer keeps its current key on the server."""
    before = sshfs.parse_authorized_keys(cluster.facts[server].text(path))
    keys = []
    # Containers connect through the tunnel of the controller.
    inside = dict.fromkeys(cluster.tunnels, cluster.addresses.get(cluster.controller.name, ""))
    for name, address in {**cluster.addresses, **inside}.items():
        if name == server:
            continue
        key = sshfs.strip_comment(cluster.facts_of(name).text(sshfs.PUBLIC_KEY))
        if name not in cluster.facts and name in before:
            key = before[name].key
        if key:
            keys.append(sshfs.MemberKey(name, address, key))
    return keys


def has_foreign_exports(facts: Facts) -> bool:
    """Whether the host has exports that Shoal did not write."""
    lines = facts.text(FOREIGN_EXPORTS).splitlines()
    return any(line.strip() and not line.strip().startswith("#") for line in lines)


def nfs_server_removal() -> list[Item]:
    return [
        Service(nfs.GANESHA_SERVICE, enabled=False, running=False),
        File(nfs.GANESHA_UNIT),
        File(nfs.GANESHA_CONF),
        File(nfs.EXPORTS, reloads=(f"command {EXPORTFS}",)),
        File(nfs.NFS_CONF, restarts=("nfs-server",)),
        File(nfs.SERVER_DROP_IN),
        *(File(nfs.unneeded_unit_drop_in(unit)[0]) for unit in nfs.UNNEEDED_UNITS),
        Command(EXPORTFS, ("sh", "-c", "! command -v exportfs > /dev/null || exportfs -ra"), on_change=True),
    ]


def ssh_server_removal() -> list[Item]:
    return [sshd_file(sshfs.SSHD_CONF, None), File(f"{sshfs.KEYS}/{sshfs.ACCOUNT}"), reload_sshd()]
