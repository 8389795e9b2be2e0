"""A host's own name: it means the address on the cluster's network, to the host itself as to everyone else.

Slurm's daemons and srun listen where their host's name leads. The name may be another than the member's in the file.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from shoal.agent.document import Block, Command, Document, File, Service
from shoal.agent.facts import Facts
from shoal.network.names import MARK, REST, hosts_block, names_program, names_unit, own_name_rule, own_names
from shoal.roles.in_force import HOSTS, HOSTS_BLOCK
from shoal.spec.member import Member

if TYPE_CHECKING:
    from shoal.roles.cluster import Cluster

CLOUD_INIT = "/etc/cloud/cloud.cfg"
"""Where it is, cloud-init is, which on many images writes `/etc/hosts` again at every boot."""
KEPT = "/etc/shoal/hosts"
PROGRAM = "/usr/local/lib/shoal/names"
SERVICE = "shoal-names"
UNIT = f"/etc/systemd/system/{SERVICE}.service"
GO_BY_IT = ("munge", "slurmdbd", "slurmctld", "slurmd")
"""Who asks for the host's own name when it starts. munged puts the address it was told into every credential."""


def names(cluster: Cluster, member: Member) -> Document:
    """The members' names, with the host's own, which it may take for another address."""
    facts, alias = cluster.facts[member.name], _alias(cluster, member.name)
    text = hosts_block(cluster.addresses, {member.name: alias} if alias else {})
    if not _is_mended(cluster):
        return (Block(HOSTS, HOSTS_BLOCK, text),)
    own = (member.name, alias) if alias else (member.name,)
    rule = own_name_rule(HOSTS_BLOCK, own)
    others = own_names(_hosts(facts), HOSTS_BLOCK, own, cluster.addresses.get(member.name, ""))
    change = Command("own name", ("sed", "-i", "-E", rule, HOSTS), restarts=GO_BY_IT)
    return (
        Block(HOSTS, HOSTS_BLOCK, text),
        *([change] if others else ()),
        *(_again_at_boot(text, rule) if _there(facts, CLOUD_INIT) and facts.init == "systemd" else ()),
    )


def names_left(cluster: Cluster, member: Member) -> Document:
    """What an earlier run changed and need not be so any more, taken back once no daemon goes by it."""
    facts = cluster.facts[member.name]
    changed = _there(facts, UNIT) or f"\n{MARK}" in f"\n{_hosts(facts)}"
    return own_name_back() if changed and not _is_mended(cluster) else ()


def own_name_back() -> Document:
    """All of it taken away, and the lines of `/etc/hosts` in force again."""
    there = ("sh", "-c", f"! grep -q '^{MARK}' {HOSTS}")
    return (
        Service(SERVICE, enabled=False, running=False),
        *(File(path) for path in (UNIT, PROGRAM, KEPT)),
        Command("own name", ("sed", "-i", "-e", f"/{REST}$/d", "-e", f"s/^{MARK}//", HOSTS), unless=there),
    )


def _again_at_boot(text: str, rule: str) -> Document:
    program = names_program(HOSTS, HOSTS_BLOCK, KEPT, rule)
    return (File(KEPT, text), File(PROGRAM, program, mode=0o755), File(UNIT, names_unit(PROGRAM)), Service(SERVICE))


def is_localhost(name: str) -> bool:
    return name.lower().partition(".")[0] == "localhost"


def _alias(cluster: Cluster, name: str) -> str:
    """What the host calls itself, where that is not the member's name, and nobody else's either."""
    hostname = cluster.facts[name].hostname
    taken = {other.lower() for other in cluster.addresses}
    return "" if hostname.lower() in taken or is_localhost(hostname) else hostname


def _is_mended(cluster: Cluster) -> bool:
    """Whether lines of others may be changed: in a plain network for Slurm's sake alone."""
    return cluster.spec.network.kind != "lan" or cluster.conf.one_address


def _there(facts: Facts, path: str) -> bool:
    found = facts.files.get(path)
    return found is not None and found.there


def _hosts(facts: Facts) -> str:
    found = facts.files.get(HOSTS)
    return (found and found.text) or ""
