"""A host that has shares of others: mounted by NFS or over SSH, or copied for each job."""

from __future__ import annotations

from collections.abc import Iterator
from functools import cache
from importlib import resources
from typing import TYPE_CHECKING

from shoal.agent.document import Command, Directory, File, Item, Mount
from shoal.roles.share_server import no_rpcbind
from shoal.roles.shares import Served, bracketed, shares, text_of, way_of
from shoal.roles.shares_account import shares_account
from shoal.spec.member import Member
from shoal.storage import nfs, sshfs, stage

if TYPE_CHECKING:
    from shoal.roles.cluster import Cluster


def using(cluster: Cluster, member: Member) -> Iterator[Item]:
    """The shares of other hosts that the member mounts, but for those that are `away`."""
    facts = cluster.facts[member.name]
    others = [share for share in shares(cluster.spec) if share.server != member.name]
    ways = {share: way_of(cluster, share, member.name) for share in others}
    if "nfs" in ways.values():
        yield from no_rpcbind(facts)
    servers = sshfs.known_hosts(_server_keys(cluster, member))
    if not {"sshfs", "stage"}.isdisjoint(ways.values()):
        yield Directory("/etc/shoal")
        yield Directory(sshfs.DIRECTORY, mode=0o700)
        yield File(sshfs.KNOWN_HOSTS, servers)
        yield Directory("/usr/local/lib/shoal")
    if "sshfs" in ways.values():
        yield File(sshfs.TRANSPORT, _transport(), mode=0o755)
    copies = [share for share, kind in ways.items() if kind == "stage" and not share.homes]
    if copies:
        yield from _copies(cluster, copies, servers)
    for share, kind in ways.items():
        address = cluster.addresses.get(share.server)
        if address is None or share in away(cluster, member):
            continue
        read_only = share.share.read_only
        if kind == "nfs":
            options = nfs.mount_options(share.share.connections, read_only=read_only)
            yield Mount(share.where, f"{bracketed(address)}:{share.path}", "nfs4", options, automount=True)
        elif kind == "sshfs" and share.homes:
            for name, user in cluster.spec.users.items():
                options = sshfs.mount_options(read_only=False, owner=(user.uid, user.gid or user.uid))
                place = f"{share.where}/{name}"
                yield _over_ssh(place, f"{name}@{bracketed(address)}:{share.path}/{name}", options)
        elif kind == "sshfs":
            options = sshfs.mount_options(read_only=read_only)
            yield _over_ssh(share.where, f"{sshfs.ACCOUNT}@{bracketed(address)}:{share.where}", options)


def away(cluster: Cluster, member: Member) -> list[Served]:
    """Shares whose server does not answer: what the member has of them stays as it is, and nothing new is waited for.

    A machine that is rented meets the controller alone, and knows of no other host whether it answers.
    """
    silent = [] if member.rented else [share for share in shares(cluster.spec) if share.server not in cluster.facts]
    return [share for share in silent if share.server != member.name]


def _over_ssh(where: str, what: str, options: str) -> Mount:
    return Mount(where, what, "fuse.sshfs", options, automount=True, if_known=sshfs.WITH_LINKS)


def _copies(cluster: Cluster, copies: list[Served], servers: str) -> Iterator[Item]:
    """Local directories, and the program that fills them before a job and brings back what it left."""
    yield from shares_account(cluster)
    for share in copies:
        make = ("install", "-d", "-m", "0777", "-o", sshfs.ACCOUNT, "-g", sshfs.ACCOUNT, share.where)
        yield Command(f"make {share.where}", make, unless=("test", "-d", share.where))
    some = [
        stage.Copied(share.where, cluster.addresses[share.server], share.share.read_only)
        for share in copies
        if share.server in cluster.addresses
    ]
    yield Directory(stage.DIRECTORY, owner=sshfs.ACCOUNT, group=sshfs.ACCOUNT, mode=0o700)
    give = ("install", "-o", sshfs.ACCOUNT, "-g", sshfs.ACCOUNT, "-m", "0600", sshfs.KEY, stage.KEY)
    yield Command("give the key to who copies", give, unless=("cmp", "-s", sshfs.KEY, stage.KEY))
    yield File(stage.KNOWN_HOSTS, servers)
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


def no_copies() -> list[Item]:
    """What was copied stays: there may be results in it that never got back."""
    return [File(path) for path in (stage.PROGRAM, stage.SUDOERS, stage.LIST, stage.KEY, stage.KNOWN_HOSTS)]
