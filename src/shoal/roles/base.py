"""What every member has: service users, packages, the munge key, the members' names, the firewall."""

from __future__ import annotations

from shoal.agent.document import Directory, Document, File, Group, Item, Packages, SecretRef, Service, User
from shoal.agent.facts import Facts
from shoal.network.firewall import NFT, RULES, UNIT, firewall_rules, firewall_unit
from shoal.network.tailscale import INTERFACE as TAILSCALE
from shoal.network.tunnel import needs_tunnel
from shoal.network.wireguard import INTERFACE as WIREGUARD
from shoal.roles.component import PACKAGES_PREFIX, Cluster, SharedSecret
from shoal.roles.containers import container_names
from shoal.roles.host_address import host_name_items
from shoal.roles.host_record import host_record_items
from shoal.roles.plugins import pmix_items, pmix_packages
from shoal.roles.registry import component_packages, component_ports
from shoal.roles.slurm_source import source_items
from shoal.roles.slurm_tree import SLURM_PACKAGES, tree_items, uses_tree
from shoal.slurm.conf import PORTS
from shoal.spec.member import Member
from shoal.spec.model import Spec

INTERFACES = {"wireguard": WIREGUARD, "tailscale": TAILSCALE}
"""The network interface of each kind of network."""
MUNGE_DIRECTORIES = ("/etc/munge", "/var/lib/munge", "/var/log/munge", "/run/munge")
SLURM_DIRECTORIES = ("/var/lib/slurm", "/var/log/slurm", "/var/spool/slurm", "/run/slurm", "/etc/slurm")
MUNGE_KEY = "/etc/munge/munge.key"
MUNGE_KEY_NEXT = "/etc/munge/munge.key.next"
"""The next key: on the controller, during a rotation."""
MUNGE_KEY_BYTES = 1024
MUNGE_SECRET = "munge"
MUNGED = ("setpriv", "--reuid=munge", "--regid=munge", "--init-groups", "/usr/sbin/munged", "--foreground")
"""Without systemd. The supervisor runs as root, and munged must own the key."""


def base(cluster: Cluster, member: Member) -> Document:
    """What all roles build on."""
    return (
        *installation(cluster, member),
        *_munge(cluster, member),
        *host_record_items(cluster),
        *([container_names(cluster, member)] if member.name in cluster.tunnels else host_name_items(cluster, member)),
        *_firewall(cluster, member),
    )


def installation(cluster: Cluster, member: Member) -> Document:
    """The slowest items, which depend on no other host: service users and packages."""
    facts = cluster.facts[member.name]
    if uses_tree(cluster.spec):
        names = packages(cluster.spec, member, facts)
        installed = [Packages(names)] if names else ()
        return (*_accounts(cluster), *source_items(cluster, member), *installed, *tree_items(cluster, member))
    names = (*packages(cluster.spec, member, facts), *pmix_packages(facts))
    return (*_accounts(cluster), Packages(names), *pmix_items(facts))


def neighbour_items(cluster: Cluster, member: Member) -> Document:
    """Items that change when another host joins or leaves: names and the firewall."""
    return (*host_name_items(cluster, member), *_firewall(cluster, member))


def munge_secret(controller: str) -> dict[str, SharedSecret]:
    """The munge key as a shared secret."""
    return {MUNGE_SECRET: SharedSecret(controller, MUNGE_KEY, MUNGE_KEY_BYTES, text=False)}


def munge_file(digest: str | None) -> File:
    """The key file of a host."""
    secret = SecretRef(MUNGE_SECRET, digest)
    return File(MUNGE_KEY, secret, owner="munge", group="munge", mode=0o400, restarts=("munge",))


def _accounts(cluster: Cluster) -> list[Item]:
    ids = cluster.ids
    munge: list[Item] = [
        Group("munge", ids.munge.gid),
        User("munge", ids.munge.uid, group="munge", owns=MUNGE_DIRECTORIES, services=("munge",)),
    ]
    return [
        *(() if uses_tree(cluster.spec) else munge),
        Group("slurm", ids.slurm.gid),
        User(
            "slurm",
            ids.slurm.uid,
            group="slurm",
            home="/var/lib/slurm",
            owns=SLURM_DIRECTORIES,
            services=("slurmctld",),
        ),
    ]


def packages(spec: Spec, member: Member, facts: Facts | None = None) -> tuple[str, ...]:
    """The packages that a member's roles need. Shoal's own Slurm takes the place of some."""
    names = ["munge", "slurm-client"]
    if "controller" in member.roles:
        names.append("slurmctld")
    if "compute" in member.roles:
        names.append("slurmd")
    if spec.firewall and not (facts and needs_tunnel(spec.network.kind, facts)):
        names.append("nftables")
    replaced = set(SLURM_PACKAGES) if uses_tree(spec) else set()
    if spec.network.kind == "wireguard" and not member.rented:
        replaced.discard("nftables")  # the network's hub runs it by name
    needed = dict.fromkeys((*names, *component_packages(spec, member, facts)))
    return tuple(name for name in needed if name not in replaced)


def _munge(cluster: Cluster, member: Member) -> list[Item]:
    if uses_tree(cluster.spec):
        return []
    # systemd creates it otherwise.
    run = [Directory("/run/munge", owner="munge", group="munge")] if member.name in cluster.tunnels else []
    return [
        Directory("/etc/munge", owner="munge", group="munge", mode=0o700),
        munge_file(cluster.controller_facts.digest(MUNGE_KEY)),
        *run,
        Service("munge", command=MUNGED),
    ]


def _firewall(cluster: Cluster, member: Member) -> list[Item]:
    if member.name in cluster.tunnels:
        return []  # a container cannot filter packets, and accepts none from outside
    if not cluster.spec.firewall:
        return firewall_removal()
    ports = (*PORTS, *component_ports(cluster.spec, member))
    rules = firewall_rules(cluster.addresses.values(), ports, INTERFACES.get(cluster.spec.network.kind, ""))
    return [
        File(RULES, rules, restarts=("shoal-firewall",)),
        File(UNIT, firewall_unit(_nft(cluster, member)), restarts=("shoal-firewall",)),
        Service("shoal-firewall"),
    ]


def _nft(cluster: Cluster, member: Member) -> str:
    """The host's own program where it has one: an older nft dies of sets that a newer one has made."""
    own = cluster.slurm_prefix == PACKAGES_PREFIX or cluster.facts[member.name].has_file(NFT)
    return NFT if own else f"{cluster.slurm_prefix}{NFT.removeprefix('/usr')}"


def firewall_removal() -> list[Item]:
    """Removes our rules."""
    return [Service("shoal-firewall", enabled=False, running=False), File(UNIT), File(RULES)]
