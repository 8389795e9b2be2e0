"""Rented nodes as Slurm is told of them before there is any: what their machines will have, and when they go. Pure."""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Mapping
from difflib import SequenceMatcher

from shoal.agent.facts import Facts
from shoal.providers.prices import Shape, known_types, shape_of
from shoal.providers.rented import abilities
from shoal.roles.in_force import InForce
from shoal.slurm.conf import gpu_type
from shoal.slurm.model import GpuLine, Node, PowerSaving
from shoal.spec.finding import Finding
from shoal.spec.member import Member
from shoal.spec.members import partitions, rented_members
from shoal.spec.model import Spec
from shoal.spec.problem import closest
from shoal.spec.rented import RentedSet, accounts, rented_sets

PROGRAMS = "/usr/local/lib/shoal/elastic"
"""Where slurmctld finds what it starts to have nodes made and given back."""
SMALLEST = Shape(cpus=1, memory_mb=1024)
"""What is promised of a machine of which nothing is known."""
LIKE = 0.75
"""Above this two words are one and the same, spelt differently: `edgegpu` and `megagpu` are not."""


def rented_nodes(spec: Spec) -> tuple[Node, ...]:
    """Every node that may be rented, the same whether or not it is there: slurmctld keeps its configuration."""
    found = []
    for one in rented_sets(spec).values():
        shape = promised(spec, one)
        gpus = tuple(GpuLine(shape.gpu, f"/dev/nvidia{number}") for number in range(shape.gpus))
        for name in one.nodes:
            node = Node(
                name=name,
                hostname=name,
                address=name,
                cpus=shape.cpus,
                cores_per_socket=shape.cpus,
                memory_mb=shape.memory_mb,
                gpus=gpus,
                features=(one.name, *one.features),
                weight=one.weight,
                cloud=True,
            )
            found.append(node)
    return tuple(found)


def promised(spec: Spec, one: RentedSet) -> Shape:
    """What every machine of a rented nodeset has at least; what the file says goes before what is known of types.

    The GPU is Slurm's type of it, and empty where the offers are of different ones.
    """
    known = _shapes(spec, one) or [SMALLEST]
    kinds = {gpu_type(shape.gpu) if shape.gpu else "" for shape in known}
    return Shape(
        cpus=one.cpus or min(shape.cpus for shape in known),
        memory_mb=one.memory_mb or min(shape.memory_mb for shape in known),
        gpus=min(shape.gpus for shape in known) if one.gpus is None else one.gpus,
        gpu=kinds.pop() if len(kinds) == 1 else "",
    )


def power_saving(spec: Spec) -> PowerSaving | None:
    """How nodes come and go; None where none do."""
    sets = rented_sets(spec)
    if not sets:
        return None
    kinds = {accounts(spec)[name].kind or name for one in sets.values() for name in one.accounts}
    return PowerSaving(PROGRAMS, max(_boot_seconds(kind) for kind in kinds))


def suspend_time(spec: Spec, partition: str) -> int | None:
    """When idle nodes of a partition are given back: the longest `idle` of its nodesets, as Slurm knows one only."""
    sets, inside = rented_sets(spec), partitions(spec)[partition].nodesets
    return max((sets[name].idle for name in inside if name in sets), default=None)


def present(spec: Spec, facts: Mapping[str, Facts]) -> tuple[Member, ...]:
    """The rented nodes that are there: those that were asked."""
    return tuple(member for member in rented_members(spec) if member.name in facts)


def addressed(spec: Spec, facts: Mapping[str, Facts], before: InForce) -> tuple[str, ...]:
    """Rented nodes that have an address though nobody asked them now.

    On a network of our own each has its address for good, so that members know the way to it before it is there.
    """
    own = spec.network.kind == "wireguard"
    absent = [member.name for member in rented_members(spec) if member.name not in facts]
    return tuple(name for name in absent if own or name in before.addresses)


def rented_containers(spec: Spec) -> tuple[str, ...]:
    """Rented nodes that are containers: reached through a tunnel, at a port that Slurm knows beforehand."""
    return tuple(name for one in rented_sets(spec).values() if _kinds_of(spec, one) == {True} for name in one.nodes)


def _kinds_of(spec: Spec, one: RentedSet) -> set[bool]:
    """Whether the machines of a nodeset are containers; both, where its offers are of both kinds."""
    return {_is_container(accounts(spec)[name].kind or name) for name in one.accounts}


def _is_container(kind: str) -> bool:
    try:
        return abilities(kind).container
    except (LookupError, ImportError):
        return False


def rented_findings(spec: Spec) -> Iterator[Finding]:
    """What is worth saying about rented nodesets before anything is rented."""
    sets = rented_sets(spec)
    for one in sets.values():
        if len(_kinds_of(spec, one)) > 1:
            yield Finding(
                "error",
                f"nodeset `{one.name}`: some of its offers are containers and some whole machines, and Slurm must know "
                "beforehand where a node answers",
                ", ".join(one.accounts),
                "give each kind a nodeset of its own",
                path=f"nodesets.{one.name}",
            )
        elif _kinds_of(spec, one) == {True}:
            yield Finding(
                "info",
                f"nodeset `{one.name}`: because of it Slurm listens on all addresses of all hosts, and not on the "
                "network's alone",
                "rented containers, which call slurmctld from the end of a tunnel",
                path=f"nodesets.{one.name}",
            )
        unknown = [
            f"{offer.type} of {offer.provider}"
            for offer in one.offers
            if _shape(spec, offer.provider, offer.type) is None
        ]
        if unknown and not (one.cpus and one.memory_mb):
            yield Finding(
                "warning",
                f"nodeset `{one.name}`: what is in this machine is not known, so Slurm counts on very little",
                ", ".join(unknown),
                "say what each has at least: `cpus: 8`, `memory: 60G`, `gpus: 1`",
                path=f"nodesets.{one.name}",
            )
        for account, type in dict.fromkeys((offer.provider, offer.type) for offer in one.offers if offer.type):
            if like := _meant(_plain(type), known_types(accounts(spec)[account].kind or account)):
                yield Finding(
                    "warning",
                    f"nodeset `{one.name}`: Shoal knows no such machine, and if its name is wrong no order is filled",
                    f"{type} of {account}",
                    f"did you mean `{like}`? `shoal offers --provider {account}` shows what there is",
                    path=f"nodesets.{one.name}",
                )
    for name, partition in partitions(spec).items():
        times = {inside: sets[inside].idle for inside in partition.nodesets if inside in sets}
        if len(set(times.values())) > 1:
            longest = max(times, key=lambda inside: times[inside])
            yield Finding(
                "warning",
                f"partition `{name}`: Slurm knows one time for idle nodes, so all wait as long as `{longest}`'s",
                ", ".join(f"{inside} {seconds} s" for inside, seconds in times.items()),
                "give them the same `idle`, or a partition each",
                path=f"partitions.{name}",
            )


def _plain(type: str) -> str:
    """A type without how many it has: `8x NVIDIA H200`, and without what is put in: `n1-standard-8+nvidia-t4:2`."""
    return re.sub(r"^[0-9]+x ", "", type).partition("+")[0]


def _meant(type: str, known: frozenset[str]) -> str | None:
    """The type that somebody has probably misspelt.

    Providers have more types than we know. They differ from each other by a number or by whole words; what is spelt
    wrong has the numbers of the right one and words like its.
    """
    words = _words(type)
    alike = [one for one in known if len(_words(one)) == len(words) and all(map(_alike, words, _words(one)))]
    return None if type in known else closest(type, sorted(alike))


def _words(type: str) -> list[str]:
    """Letters and numbers each on their own: `H20O-sxm5` is h 200 sxm 5, for an O after digits is meant to be one."""
    plain = re.sub(r"(?<=[0-9])o+", lambda found: "0" * len(found[0]), type.lower())
    return re.findall(r"[a-z]+|[0-9]+", plain)


def _alike(word: str, other: str) -> bool:
    return word == other or (not word.isdigit() and SequenceMatcher(None, word, other).ratio() > LIKE)


def _shapes(spec: Spec, one: RentedSet) -> list[Shape]:
    found: Iterable[Shape | None] = (_shape(spec, offer.provider, offer.type) for offer in one.offers)
    return [shape for shape in found if shape is not None]


def _shape(spec: Spec, account: str, type: str | None) -> Shape | None:
    return shape_of(accounts(spec)[account].kind or account, type) if type else None


def _boot_seconds(kind: str) -> int:
    try:
        return abilities(kind).boot_seconds
    except (LookupError, ImportError):
        return 1800  # somebody else's, and not installed here: the service on the controller tells
