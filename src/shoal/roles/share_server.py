"""The host that keeps shares: it serves them to the members and nobody else, by NFS and over SSH."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING

from shoal.agent.document import Command, Directory, File, Item, Mount, Service, User
from shoal.agent.facts import Facts
from shoal.roles.shares import RECORD, SERVES_SSH, Served, reload_sshd, shares, sshd_file, text_of, way_of
from shoal.roles.shares_account import shares_account, shares_ids
from shoal.spec.member import Member
from shoal.storage import nfs, sshfs, stage
from shoal.storage.ways import served_by_kernel

if TYPE_CHECKING:
    from shoal.roles.cluster import Cluster

EXPORTFS, RELOAD_GANESHA = "export the shares", "reload ganesha"
FOREIGN_EXPORTS = "/etc/exports"
NOT_FOR_US = ("nfs-ganesha", "nfs-ganesha-lock")
RPCBIND = ("rpcbind.socket", "rpcbind")


def serving(cluster: Cluster, member: Member) -> Iterator[Item]:
    """The directories that the member keeps, and what lets the others get at them."""
    mine = [share for share in shares(cluster.spec) if share.server == member.name]
    for share in mine:
        # Over SSH files belong to one account: nobody could write over, on the server, what another host wrote.
        open_to_all = "1777" if share.share.kind == "nfs" else "0777"
        mode = "0755" if share.homes or share.share.read_only else open_to_all
        make = ("install", "-d", "-m", mode, share.path)
        yield Command(f"make {share.path}", make, unless=("test", "-d", share.path))
        if share.path != share.where:
            yield Mount(share.where, share.path, "none", "bind")
    by_nfs = [share for share in mine if share.share.kind == "nfs"]
    if by_nfs:
        yield from _nfs_server(cluster, member, by_nfs)
    over_ssh = [share for share in mine if not share.homes]
    if over_ssh and _clients_over_ssh(cluster, mine):
        yield from _ssh_server(cluster, member, over_ssh)


def _nfs_server(cluster: Cluster, member: Member, mine: list[Served]) -> Iterator[Item]:
    facts, address = cluster.facts[member.name], cluster.addresses.get(member.name, "127.0.0.1")
    others = tuple(other for name, other in cluster.addresses.items() if name != member.name)
    exported = [nfs.Export(share.path, others, share.share.read_only) for share in mine]
    serve = _kernel_server if served_by_kernel(facts) else _ganesha
    yield from serve(facts, address, exported)


def _kernel_server(facts: Facts, address: str, exported: list[nfs.Export]) -> Iterator[Item]:
    if not foreign_exports(facts):
        yield Directory("/etc/nfs.conf.d")
        yield File(nfs.NFS_CONF, nfs.nfs_conf(address), restarts=("nfs-server",))
        if not has_rpcbind(facts):
            # The package's unit starts these along with the server, enabled or not.
            for path, text in map(nfs.not_needed_drop_in, nfs.NOT_NEEDED):
                yield Directory(path.rpartition("/")[0])
                yield File(path, text)
    yield from no_rpcbind(facts)
    yield Directory("/etc/exports.d")
    yield File(nfs.EXPORTS, nfs.exports(exported), reloads=(f"command {EXPORTFS}",))
    yield Directory(nfs.SERVER_DROP_IN.rpartition("/")[0])
    yield File(nfs.SERVER_DROP_IN, nfs.server_drop_in())
    yield Service("nfs-server")
    yield Command(EXPORTFS, ("exportfs", "-ra"), on_change=True)


def _ganesha(facts: Facts, address: str, exported: list[nfs.Export]) -> Iterator[Item]:
    newer = nfs.knows_io_flusher(facts.os_id, facts.os_version)
    conf = nfs.ganesha_conf(address, exported, io_flusher=newer)
    before = text_of(facts, nfs.GANESHA_CONF)
    # A new list of members is taken while it runs; what stands before it is read at the start only.
    restart = before.partition("EXPORT {")[0] != conf.partition("EXPORT {")[0]
    yield from no_rpcbind(facts)
    yield from [Service(name, enabled=False, running=False) for name in NOT_FOR_US]
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


def no_rpcbind(facts: Facts) -> list[Item]:
    """Version 4 has no use for it, and it answers everybody. One that ran before is somebody else's."""
    return [] if has_rpcbind(facts) else [Service(name, enabled=False, running=False) for name in RPCBIND]


def has_rpcbind(facts: Facts) -> bool:
    return any(facts.services.get(name) == "active" for name in RPCBIND)


def _ssh_server(cluster: Cluster, member: Member, mine: list[Served]) -> Iterator[Item]:
    yield from shares_account(cluster)
    yield Directory(sshfs.ROOT)
    for share in mine:
        mode = "ro" if share.share.read_only else "rw"
        yield Mount(sshfs.ROOT + share.where, share.path, "none", f"bind,{mode},nosuid,nodev")
    yield Directory(sshfs.KEYS)
    keys = host_keys(cluster, member.name, f"{sshfs.KEYS}/{sshfs.ACCOUNT}")
    yield File(f"{sshfs.KEYS}/{sshfs.ACCOUNT}", sshfs.authorized(keys))
    conf = sshfs.sshd_conf()
    if _anybody_copies(cluster, mine):
        # sshd starts rrsync with the account's shell.
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


def _anybody_copies(cluster: Cluster, mine: list[Served]) -> bool:
    names = [member.name for member in cluster.members if member.name in cluster.facts]
    return any(way_of(cluster, share, name) == "stage" for share in mine for name in names)


def _clients_over_ssh(cluster: Cluster, mine: list[Served]) -> bool:
    """Whether any host needs SSH for these shares. One that does not answer may, if one did before."""
    silent = any(member.name not in cluster.facts for member in cluster.members)
    if silent and any(SERVES_SSH in text_of(cluster.facts[share.server], RECORD).splitlines() for share in mine):
        return True
    return any(
        way_of(cluster, share, member.name) in ("sshfs", "stage")
        for member in cluster.members
        if member.name in cluster.facts
        for share in mine
    )


def host_keys(cluster: Cluster, server: str, path: str) -> list[sshfs.HostKey]:
    """The keys of the other hosts. One that does not answer just now keeps the key that is in force on the server."""
    before = sshfs.read_authorized(text_of(cluster.facts[server], path))
    keys = []
    # A container comes through the tunnel that the controller holds.
    inside = dict.fromkeys(cluster.tunnels, cluster.addresses.get(cluster.controller.name, ""))
    for name, address in {**cluster.addresses, **inside}.items():
        if name == server:
            continue
        facts = cluster.facts.get(name)
        key = sshfs.plain_key(text_of(facts, sshfs.PUBLIC_KEY))
        if facts is None and name in before:
            key = before[name].key
        if key:
            keys.append(sshfs.HostKey(name, address, key))
    return keys


def foreign_exports(facts: Facts) -> bool:
    """Whether somebody else's exports are on the host."""
    lines = text_of(facts, FOREIGN_EXPORTS).splitlines()
    return any(line.strip() and not line.strip().startswith("#") for line in lines)


def no_nfs_server() -> list[Item]:
    return [
        Service(nfs.GANESHA_SERVICE, enabled=False, running=False),
        File(nfs.GANESHA_UNIT),
        File(nfs.GANESHA_CONF),
        File(nfs.EXPORTS, reloads=(f"command {EXPORTFS}",)),
        File(nfs.NFS_CONF, restarts=("nfs-server",)),
        File(nfs.SERVER_DROP_IN),
        *(File(nfs.not_needed_drop_in(unit)[0]) for unit in nfs.NOT_NEEDED),
        Command(EXPORTFS, ("sh", "-c", "! command -v exportfs > /dev/null || exportfs -ra"), on_change=True),
    ]


def no_ssh_server() -> list[Item]:
    return [sshd_file(sshfs.SSHD_CONF, None), File(f"{sshfs.KEYS}/{sshfs.ACCOUNT}"), reload_sshd()]
