"""The server of shares: it exports them to members only, by NFS and over SSH."""

from __future__ import annotations

from collections.abc import Iterator

from shoal.agent.document import Command, Directory, File, Item, Mount, Service, User
from shoal.agent.facts import Facts
from shoal.roles.cluster import Cluster
from shoal.roles.shares import (
    RECORD,
    SERVES_SSH,
    ServedShare,
    access_kind,
    reload_sshd,
    shares,
    shares_account,
    shares_ids,
    sshd_file,
)
from shoal.spec.member import Member
from shoal.storage import nfs, sshfs, stage
from shoal.storage.nfs import kernel_serves_nfs

EXPORTFS, RELOAD_GANESHA = "export the shares", "reload ganesha"
FOREIGN_EXPORTS = "/etc/exports"
PACKAGE_SERVICES = ("nfs-ganesha", "nfs-ganesha-lock")
RPCBIND = ("rpcbind.socket", "rpcbind")


def server_items(cluster: Cluster, member: Member) -> Iterator[Item]:
    """The directories of the member's shares, and the servers through which others mount them."""
    own = [share for share in shares(cluster.spec) if share.server == member.name]
    for share in own:
        # Over SSH all files belong to one user: with the sticky bit, users on the server could not overwrite them.
        open_to_all = "1777" if share.share.kind == "nfs" else "0777"
        mode = "0755" if share.homes or share.share.read_only else open_to_all
        make = ("install", "-d", "-m", mode, share.path)
        yield Command(f"make {share.path}", make, unless=("test", "-d", share.path))
        if share.path != share.where:
            yield Mount(share.where, share.path, "none", "bind")
    by_nfs = [share for share in own if share.share.kind == "nfs"]
    if by_nfs:
        yield from _nfs_server(cluster, member, by_nfs)
    over_ssh = [share for share in own if not share.homes]
    if over_ssh and _has_ssh_clients(cluster, own):
        yield from _ssh_server(cluster, member, over_ssh)


def _nfs_server(cluster: Cluster, member: Member, own: list[ServedShare]) -> Iterator[Item]:
    facts, address = cluster.facts[member.name], cluster.addresses.get(member.name, "127.0.0.1")
    others = tuple(other for name, other in cluster.addresses.items() if name != member.name)
    exported = [nfs.Export(share.path, others, share.share.read_only) for share in own]
    serve = _kernel_server if kernel_serves_nfs(facts) else _ganesha
    yield from serve(facts, address, exported)


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
    yield File(
        nfs.GANESHA_CONF,
        conf,
        restarts=(nfs.GANESHA_SERVICE,) if restart else (),
        reloads=() if restart else (f"command {RELOAD_GANESHA}",),
    )
    yield File(nfs.GANESHA_UNIT, nfs.ganesha_unit(), restarts=(nfs.GANESHA_SERVICE,))
    yield Service(nfs.GANESHA_SERVICE)
    yield Command(RELOAD_GANESHA, ("systemctl", "kill", "-s", "HUP", nfs.GANESHA_SERVICE), on_change=True)


def rpcbind_removal(facts: Facts) -> list[Item]:
    """NFS 4 does not need rpcbind, which answers everyone. An rpcbind that ran before Shoal is left alone."""
    return [] if has_rpcbind(facts) else [Service(name, enabled=False, running=False) for name in RPCBIND]


def has_rpcbind(facts: Facts) -> bool:
    return any(map(facts.is_active, RPCBIND))


def _ssh_server(cluster: Cluster, member: Member, own: list[ServedShare]) -> Iterator[Item]:
    yield from shares_account(cluster)
    yield Directory(sshfs.ROOT)
    for share in own:
        mode = "ro" if share.share.read_only else "rw"
        yield Mount(sshfs.ROOT + share.where, share.path, "none", f"bind,{mode},nosuid,nodev")
    yield Directory(sshfs.KEYS)
    keys = host_keys(cluster, member.name, f"{sshfs.KEYS}/{sshfs.ACCOUNT}")
    yield File(f"{sshfs.KEYS}/{sshfs.ACCOUNT}", sshfs.render_authorized_keys(keys))
    conf = sshfs.sshd_conf()
    if _has_copying_clients(cluster, own):
        # sshd starts rrsync with the user's shell.
        yield User(  # noqa: S604
            stage.ACCOUNT,
            shares_ids(cluster).uid,
            group=sshfs.ACCOUNT,
            home="/",
            shell="/bin/sh",
            twin_of=sshfs.ACCOUNT,
        )
        conf += stage.sshd_block()
    yield sshd_file(sshfs.SSHD_CONF, conf)
    yield reload_sshd()


def _has_copying_clients(cluster: Cluster, own: list[ServedShare]) -> bool:
    names = [member.name for member in cluster.members if member.name in cluster.facts]
    return any(access_kind(cluster, share, name) == "stage" for share in own for name in names)


def _has_ssh_clients(cluster: Cluster, own: list[ServedShare]) -> bool:
    """Whether any host needs SSH for these shares. A host that does not answer may, if any did before."""
    silent = any(member.name not in cluster.facts for member in cluster.members)
    if silent and any(SERVES_SSH in cluster.facts[share.server].text(RECORD).splitlines() for share in own):
        return True
    return any(
        access_kind(cluster, share, member.name) in ("sshfs", "stage")
        for member in cluster.members
        if member.name in cluster.facts
        for share in own
    )


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
