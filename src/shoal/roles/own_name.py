"""A host's own name, on a network of our own: it means the address there, to the host itself as to everyone else."""

from __future__ import annotations

from typing import TYPE_CHECKING

from shoal.agent.document import Command, Document
from shoal.agent.facts import Facts
from shoal.network.names import own_names
from shoal.roles.in_force import HOSTS, HOSTS_BLOCK
from shoal.spec.member import Member

if TYPE_CHECKING:
    from shoal.roles.cluster import Cluster

MARK = "#shoal "
"""Before a line of `/etc/hosts` that we have put out of force."""


def own_name(cluster: Cluster, member: Member) -> Document:
    """Put lines of `/etc/hosts` out of force that give the host's own name another address."""
    facts = cluster.facts[member.name]
    if all(_names_localhost(line) for line in other_lines(facts, member.name, cluster.addresses.get(member.name, ""))):
        return ()
    words = "|".join(dict.fromkeys(name.replace(".", "[.]") for name in (member.name, facts.hostname)))
    inside = f"/^# BEGIN shoal {HOSTS_BLOCK}$/,/^# END shoal {HOSTS_BLOCK}$/"
    line = rf"^([0-9a-fA-F.:]+[[:blank:]]+([^#]*[[:blank:]])?({words})([[:blank:]#].*)?)$"
    rule = rf"{inside}! {{ /localhost/! s/{line}/{MARK}\1/I }}"
    # munged puts the address of the host's name into every credential, as it was when it started.
    return (Command("own name", ("sed", "-i", "-E", rule, HOSTS), restarts=("munge",)),)


def other_lines(facts: Facts, name: str, address: str) -> tuple[str, ...]:
    """The lines of the host's `/etc/hosts` by which it takes its own name for another address."""
    hosts = facts.files.get(HOSTS)
    return own_names((hosts and hosts.text) or "", HOSTS_BLOCK, (name, facts.hostname), address)


def keeps_another(facts: Facts, name: str, address: str) -> bool:
    """Whether a line is left that is not ours to touch, because it says what `localhost` is."""
    return any(_names_localhost(line) for line in other_lines(facts, name, address))


def _names_localhost(line: str) -> bool:
    return "localhost" in line


def own_name_back(kind: str = "lan") -> Document:
    """Put them in force again. `kind` is that of the network the host goes to: another of our own wants the same."""
    if kind != "lan":
        return ()
    there = ("sh", "-c", f"! grep -q '^{MARK}' {HOSTS}")
    return (Command("own name", ("sed", "-i", f"s/^{MARK}//", HOSTS), unless=there),)
