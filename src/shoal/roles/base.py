"""What every member has: the accounts, the packages, the munge key, the names of the others, the firewall."""

from __future__ import annotations

from shoal.agent.document import Directory, Document, File, Group, Item, Packages, SecretRef, Service, User
from shoal.agent.facts import Facts
from shoal.network.firewall import RULES, UNIT, firewall_rules, firewall_unit
from shoal.network.tailscale import INTERFACE as TAILSCALE
from shoal.network.tunnel import needs_tunnel
from shoal.network.wireguard import INTERFACE as WIREGUARD
from shoal.roles.cluster import Cluster
from shoal.roles.own_name import names
from shoal.roles.part import Kept
from shoal.roles.parts import part_packages, part_ports
from shoal.roles.pmix import pmix_items, pmix_packages
from shoal.roles.reduced import reduced_names
from shoal.slurm.conf import PORTS
from shoal.spec.member import Member
from shoal.spec.model import Spec

INTERFACES = {"wireguard": WIREGUARD, "tailscale": TAILSCALE}
"""The interface of a network of our own, by its kind."""
MUNGE_KEY = "/etc/munge/munge.key"
MUNGE_KEY_NEXT = "/etc/munge/munge.key.next"
"""On the controller, while the key is being rotated: what it is to become."""
MUNGE_KEY_BYTES = 1024
MUNGE_SECRET = "munge"
MUNGED = ("setpriv", "--reuid=munge", "--regid=munge", "--init-groups", "/usr/sbin/munged", "--foreground")
"""What a plain supervisor runs. It is root's, and munged wants the key to be its own."""


def base(cluster: Cluster, member: Member) -> Document:
    """The state that all roles build on."""
    return (
        *_accounts(cluster),
        *_packages(cluster, member),
        *_munge(cluster, member),
        *([reduced_names(cluster, member)] if member.name in cluster.tunnels else names(cluster, member)),
        *_firewall(cluster, member),
    )


def installation(cluster: Cluster, member: Member) -> Document:
    """What takes longest to bring about, and depends on no other host: accounts and packages."""
    return (*_accounts(cluster), *_packages(cluster, member))


def neighbours(cluster: Cluster, member: Member) -> Document:
    """What a host must know of the others, and changes when one comes or goes."""
    return (*names(cluster, member), *_firewall(cluster, member))


def munge_kept(controller: str) -> dict[str, Kept]:
    """Where the key that all hosts share is made and kept."""
    return {MUNGE_SECRET: Kept(controller, MUNGE_KEY, MUNGE_KEY_BYTES, text=False)}


def munge_digest(cluster: Cluster) -> str | None:
    """The digest of the controller's key, by which the others are compared without anybody seeing a key."""
    fact = cluster.facts.get(cluster.controller.name)
    return fact.files[MUNGE_KEY].sha256 if fact and MUNGE_KEY in fact.files else None


def munge_file(digest: str | None) -> File:
    """The key in its place on a host."""
    secret = SecretRef(MUNGE_SECRET, digest)
    return File(MUNGE_KEY, secret, owner="munge", group="munge", mode=0o400, restarts=("munge",))


def _accounts(cluster: Cluster) -> list[Item]:
    ids = cluster.ids
    return [
        Group("munge", ids.munge.gid),
        User(
            "munge",
            ids.munge.uid,
            group="munge",
            owns=("/etc/munge", "/var/lib/munge", "/var/log/munge", "/run/munge"),
            services=("munge",),
        ),
        Group("slurm", ids.slurm.gid),
        User(
            "slurm",
            ids.slurm.uid,
            group="slurm",
            home="/var/lib/slurm",
            owns=("/var/lib/slurm", "/var/log/slurm", "/var/spool/slurm", "/run/slurm", "/etc/slurm"),
            services=("slurmctld",),
        ),
    ]


def _packages(cluster: Cluster, member: Member) -> list[Item]:
    facts = cluster.facts[member.name]
    return [Packages((*packages(cluster.spec, member, facts), *pmix_packages(facts))), *pmix_items(facts)]


def packages(spec: Spec, member: Member, facts: Facts | None = None) -> tuple[str, ...]:
    """The packages that a member's roles need."""
    names = ["munge", "slurm-client"]
    if "controller" in member.roles:
        names.append("slurmctld")
    if "compute" in member.roles:
        names.append("slurmd")
    if spec.firewall and not (facts and needs_tunnel(spec.network.kind, facts)):
        names.append("nftables")
    return tuple(dict.fromkeys((*names, *part_packages(spec, member, facts))))


def _munge(cluster: Cluster, member: Member) -> list[Item]:
    # systemd makes it where there is one.
    run = [Directory("/run/munge", owner="munge", group="munge")] if member.name in cluster.tunnels else []
    return [
        Directory("/etc/munge", owner="munge", group="munge", mode=0o700),
        munge_file(munge_digest(cluster)),
        *run,
        Service("munge", command=MUNGED),
    ]


def _firewall(cluster: Cluster, member: Member) -> list[Item]:
    if member.name in cluster.tunnels:
        return []  # it has no say over packets, and takes none from outside
    if not cluster.spec.firewall:
        return without_firewall()
    ports = (*PORTS, *part_ports(cluster.spec, member))
    rules = firewall_rules(cluster.addresses.values(), ports, INTERFACES.get(cluster.spec.network.kind, ""))
    return [
        Directory("/etc/shoal"),
        File(RULES, rules, restarts=("shoal-firewall",)),
        File(UNIT, firewall_unit(), restarts=("shoal-firewall",)),
        Service("shoal-firewall"),
    ]


def without_firewall() -> list[Item]:
    """Our rules taken away, whether or not they were ever there."""
    return [Service("shoal-firewall", enabled=False, running=False), File(UNIT), File(RULES)]
