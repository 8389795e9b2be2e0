"""Shares: the host that keeps one serves it to the members and nobody else; the others mount it as they can."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from functools import cache
from importlib import resources
from typing import TYPE_CHECKING

from shoal.agent.document import Command, Directory, Document, File, Group, Item, Mount, Service, User
from shoal.agent.facts import Facts
from shoal.roles.ids import choose_pair
from shoal.roles.part import How, Part
from shoal.roles.stage import Stage
from shoal.spec.finding import Finding
from shoal.spec.member import Member
from shoal.spec.members import members as members_of
from shoal.spec.model import Spec
from shoal.spec.storage import SharedDirectory
from shoal.storage import nfs, sshfs, stage
from shoal.storage.ways import FILESYSTEMS, WayKind, served_by_kernel, server_of, way

if TYPE_CHECKING:
    from shoal.roles.cluster import Cluster

RECORD = "/etc/shoal/shares"
"""What an earlier run mounted on a host, so that a later one takes away what the file no longer names."""
SERVES_NFS, SERVES_SSH, COPIES = "serves nfs", "serves ssh", "copies"
EXPORTFS, RELOAD_SSHD, RELOAD_GANESHA = "export the shares", "reload sshd", "reload ganesha"
ACCOUNT_FIRST_CHOICE = 979
FOREIGN_EXPORTS = "/etc/exports"
SSHD_CONFIG = "/etc/ssh/sshd_config"
NOT_FOR_US = ("nfs-ganesha", "nfs-ganesha-lock")
RPCBIND = ("rpcbind.socket", "rpcbind")


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


def way_of(cluster: Cluster, share: Served, member: str) -> WayKind:
    return way(share.share, share.server, member, cluster.facts[member]).kind


class Storage(Part):
    """What hosts have to be for the shares."""

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
        serving, using = tuple(_serving(cluster, member)), tuple(_using(cluster, member))
        mounts = [item for item in (*serving, *using) if isinstance(item, Mount)]
        clearing = tuple(_clearing(cluster, member, mounts))
        return {Stage.SERVICES: (*clearing, *serving), Stage.NODES: using}

    def farewell(self) -> Document:
        """Nothing of a share stays mounted or served; what is in it stays on the host that keeps it."""
        return (
            Command("take the shares away", ("sh", "-c", _FAREWELL, "sh", RECORD), unless=("test", "!", "-e", RECORD)),
            *_serving_no_more(),
            *_no_copies(),
            File(sshfs.KEY),
            File(sshfs.PUBLIC_KEY),
            File(sshfs.KNOWN_HOSTS),
            File(sshfs.TRANSPORT),
            File(RECORD),
        )

    def findings(self, cluster: Cluster) -> tuple[Finding, ...]:
        return tuple(dict.fromkeys(_findings(cluster)))


def _serving(cluster: Cluster, member: Member) -> Iterator[Item]:
    """The directories that the member keeps, and what lets the others get at them."""
    mine = [share for share in shares(cluster.spec) if share.server == member.name]
    for share in mine:
        mode = "0755" if share.homes or share.share.read_only else "1777"
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
    yield from _no_rpcbind(facts)
    if served_by_kernel(facts):
        yield Directory("/etc/exports.d")
        yield File(nfs.EXPORTS, nfs.exports(exported), reloads=(f"command {EXPORTFS}",))
        if not foreign_exports(facts):
            yield Directory("/etc/nfs.conf.d")
            yield File(nfs.NFS_CONF, nfs.nfs_conf(address), restarts=("nfs-server",))
        yield Service("nfs-server")
        yield Command(EXPORTFS, ("exportfs", "-ra"), on_change=True)
        return
    conf = nfs.ganesha_conf(address, exported)
    before = text_of(facts, nfs.GANESHA_CONF)
    # A new list of members is taken while it runs; what stands before it is read at the start only.
    restart = before.partition("EXPORT {")[0] != conf.partition("EXPORT {")[0]
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


def _no_rpcbind(facts: Facts) -> list[Item]:
    """Version 4 has no use for it, and it answers everybody. One that ran before is somebody else's."""
    if any(facts.services.get(name) == "active" for name in RPCBIND):
        return []
    return [Service(name, enabled=False, running=False) for name in RPCBIND]


def _ssh_server(cluster: Cluster, member: Member, mine: list[Served]) -> Iterator[Item]:
    ids = choose_pair(sshfs.ACCOUNT, ACCOUNT_FIRST_CHOICE, cluster.controller.name, _without_twins(cluster.facts))
    yield Group(sshfs.ACCOUNT, ids.gid)
    yield User(sshfs.ACCOUNT, ids.uid, group=sshfs.ACCOUNT, home="/")
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
            stage.ACCOUNT, ids.uid, group=sshfs.ACCOUNT, home="/", shell="/bin/sh", twin_of=sshfs.ACCOUNT
        )
        conf += stage.sshd_block()
    yield sshd_file(sshfs.SSHD_CONF, conf)
    yield reload_sshd()


def _without_twins(facts: Mapping[str, Facts]) -> dict[str, Facts]:
    """The hosts as if the account had one name only: its second one takes nobody's number."""
    return {
        host: replace(fact, users={name: user for name, user in fact.users.items() if name != stage.ACCOUNT})
        for host, fact in facts.items()
    }


def _anybody_copies(cluster: Cluster, mine: list[Served]) -> bool:
    names = [member.name for member in cluster.members if member.name in cluster.facts]
    return any(way_of(cluster, share, name) == "stage" for share in mine for name in names)


def sshd_file(path: str, text: str | None) -> File:
    """A file of sshd's settings, which sshd has read before it is put in place."""
    trial = ("/usr/sbin/sshd", "-t", "-f", "/dev/stdin") if text else ()
    return File(path, text, reloads=(f"command {RELOAD_SSHD}",), accepted_by=trial)


def reload_sshd() -> Command:
    return Command(RELOAD_SSHD, ("systemctl", "try-reload-or-restart", "ssh"), on_change=True)


def host_keys(cluster: Cluster, server: str, path: str) -> list[sshfs.HostKey]:
    """The keys of the other hosts. One that does not answer just now keeps the key that is in force on the server."""
    before = sshfs.read_authorized(text_of(cluster.facts[server], path))
    keys = []
    for name, address in cluster.addresses.items():
        if name == server:
            continue
        facts = cluster.facts.get(name)
        key = sshfs.plain_key(text_of(facts, sshfs.PUBLIC_KEY)) if facts else ""
        if not key and facts is None and name in before:
            key = before[name].key
        if key:
            keys.append(sshfs.HostKey(name, address, key))
    return keys


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


def _using(cluster: Cluster, member: Member) -> Iterator[Item]:
    """The shares of other hosts that the member mounts. One whose server does not answer stays as it is."""
    facts = cluster.facts[member.name]
    others = [share for share in shares(cluster.spec) if share.server != member.name]
    ways = {share: way_of(cluster, share, member.name) for share in others}
    if "nfs" in ways.values():
        yield from _no_rpcbind(facts)
    if not {"sshfs", "stage"}.isdisjoint(ways.values()):
        yield Directory("/etc/shoal")
        yield Directory(sshfs.DIRECTORY, mode=0o700)
        yield File(sshfs.KNOWN_HOSTS, sshfs.known_hosts(_server_keys(cluster, member)))
        yield Directory("/usr/local/lib/shoal")
    if "sshfs" in ways.values():
        yield File(sshfs.TRANSPORT, _transport(), mode=0o755)
    copies = [share for share, kind in ways.items() if kind == "stage" and not share.homes]
    if copies:
        yield from _copies(cluster, copies)
    for share, kind in ways.items():
        address = cluster.addresses.get(share.server)
        if address is None:
            continue
        read_only = share.share.read_only
        if kind == "nfs":
            options = nfs.mount_options(share.share.connections, read_only=read_only)
            yield Mount(share.where, f"{bracketed(address)}:{share.path}", "nfs4", options, automount=True)
        elif kind == "sshfs" and share.homes:
            for name, user in cluster.spec.users.items():
                options = sshfs.mount_options(read_only=False, owner=(user.uid, user.gid or user.uid))
                place = f"{share.where}/{name}"
                what = f"{name}@{bracketed(address)}:{share.path}/{name}"
                yield Mount(place, what, "fuse.sshfs", options, automount=True)
        elif kind == "sshfs":
            what = f"{sshfs.ACCOUNT}@{bracketed(address)}:{share.where}"
            yield Mount(share.where, what, "fuse.sshfs", sshfs.mount_options(read_only=read_only), automount=True)


def _copies(cluster: Cluster, copies: list[Served]) -> Iterator[Item]:
    """Local directories, and the program that fills them before a job and brings back what it left."""
    for share in copies:
        yield Command(
            f"make {share.where}", ("install", "-d", "-m", "1777", share.where), unless=("test", "-d", share.where)
        )
    some = [
        stage.Copied(share.where, cluster.addresses[share.server], share.share.read_only)
        for share in copies
        if share.server in cluster.addresses
    ]
    yield File(stage.LIST, stage.copied(some))
    yield File(stage.PROGRAM, stage.program(), mode=0o755)
    yield File(stage.SUDOERS, stage.sudoers("shoal-users"), mode=0o440, accepted_by=("visudo", "-c", "-f", "-"))


@cache
def _transport() -> str:
    return resources.files("shoal.storage").joinpath("patient_sftp.py").read_text()


def _server_keys(cluster: Cluster, member: Member) -> dict[str, str]:
    """The servers' host keys by address. One that does not answer keeps the key that is known."""
    known = dict(
        line.split(" ", 1)
        for line in text_of(cluster.facts[member.name], sshfs.KNOWN_HOSTS).splitlines()
        if line and not line.startswith("#")
    )
    found = {}
    for share in shares(cluster.spec):
        address = cluster.addresses.get(share.server, "")
        facts = cluster.facts.get(share.server)
        key = sshfs.plain_key(text_of(facts, sshfs.HOST_KEY)) if facts else known.get(address, "")
        if address and key and share.server != member.name:
            found[address] = key
    return found


def _clearing(cluster: Cluster, member: Member, mounts: list[Mount]) -> Iterator[Item]:
    """What an earlier file had asked for and this one does not, taken away; then the record of what is to be there."""
    facts = cluster.facts[member.name]
    lines = text_of(facts, RECORD).splitlines()
    before = [tuple(line.split(" ", 1)) for line in lines if line.startswith(("automount /", "mount /"))]
    wanted = [("automount" if mount.automount else "mount", mount.where) for mount in mounts]
    others = [share for share in shares(cluster.spec) if share.server != member.name and not share.homes]
    copies = any(way_of(cluster, share, member.name) == "stage" for share in others)
    mine = [share for share in shares(cluster.spec) if share.server == member.name]
    serving = [kind for kind in (SERVES_NFS, SERVES_SSH) if _serves(cluster, mine, kind)]
    serving += [COPIES] if copies else []
    if not before and not wanted and not lines and not serving:
        return
    for kind, where in before:
        if (kind, where) not in wanted:
            yield Mount(where, mounted=False, automount=kind == "automount")
    if SERVES_NFS in lines and SERVES_NFS not in serving:
        yield from _no_nfs_server()
    if SERVES_SSH in lines and SERVES_SSH not in serving:
        yield from _no_ssh_server()
    if COPIES in lines and not copies:
        yield from _no_copies()
    text = "".join(f"{line}\n" for line in (*(f"{kind} {where}" for kind, where in wanted), *serving))
    yield Directory("/etc/shoal")
    yield File(RECORD, f"# Written by shoal; changes here are lost.\n{text}" if text else None)


def _serves(cluster: Cluster, mine: list[Served], kind: str) -> bool:
    if kind == SERVES_NFS:
        return any(share.share.kind == "nfs" for share in mine)
    return any(not share.homes for share in mine) and _clients_over_ssh(cluster, mine)


def _no_nfs_server() -> list[Item]:
    return [
        Service(nfs.GANESHA_SERVICE, enabled=False, running=False),
        File(nfs.GANESHA_UNIT),
        File(nfs.GANESHA_CONF),
        File(nfs.EXPORTS, reloads=(f"command {EXPORTFS}",)),
        File(nfs.NFS_CONF, restarts=("nfs-server",)),
        Command(EXPORTFS, ("sh", "-c", "! command -v exportfs > /dev/null || exportfs -ra"), on_change=True),
    ]


def _no_ssh_server() -> list[Item]:
    return [sshd_file(sshfs.SSHD_CONF, None), File(f"{sshfs.KEYS}/{sshfs.ACCOUNT}"), reload_sshd()]


def _no_copies() -> list[Item]:
    """What was copied stays: there may be results in it that never got back."""
    return [File(path) for path in (stage.PROGRAM, stage.SUDOERS, stage.LIST)]


def _serving_no_more() -> list[Item]:
    return [*_no_nfs_server(), *_no_ssh_server()]


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
systemctl daemon-reload
"""


def _findings(cluster: Cluster) -> Iterator[Finding]:
    for share in shares(cluster.spec):
        if share.server not in cluster.facts:
            what = f"the host that keeps {share.where} does not answer; whoever uses the share waits"
            yield Finding("warning", what, fix=f"bring {share.server} back", path=f"storage.{share.where}")
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


def foreign_exports(facts: Facts) -> bool:
    """Whether somebody else's exports are on the host."""
    lines = text_of(facts, FOREIGN_EXPORTS).splitlines()
    return any(line.strip() and not line.strip().startswith("#") for line in lines)


def text_of(facts: Facts | None, path: str) -> str:
    """The text of a file we asked about; "" where there is none."""
    fact = facts.files.get(path) if facts else None
    return (fact.text if fact else None) or ""


def bracketed(address: str) -> str:
    return f"[{address}]" if ":" in address else address
