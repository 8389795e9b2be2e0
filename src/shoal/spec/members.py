"""The members of a cluster, its rented nodesets and its partitions, worked out from the spec. Pure."""

from __future__ import annotations

from shoal.spec.checks import seconds, size_mb
from shoal.spec.hosts import Controller, NodeSet, located_members
from shoal.spec.machines import Sandbox, SandboxKind
from shoal.spec.member import Member, Shape
from shoal.spec.model import Spec
from shoal.spec.partitions import Partition
from shoal.spec.rental import DEFAULT_IDLE_TIME, DISK_GB, LIFETIME, OfferChoice, ProviderAccount, RentedSet


def members(spec: Spec) -> tuple[Member, ...]:
    """Every host that is always there: the controller, login hosts, then the nodesets in the order of the file."""
    return tuple(member for _, member in located_members(spec.controller, spec.login, spec.nodesets, spec.sandbox))


def rented_members(spec: Spec) -> tuple[Member, ...]:
    """Every node that may be rented, whether or not it is there now, in the order of the file."""
    return tuple(
        Member(
            name=name,
            roles=frozenset({"compute"}),
            nodeset=nodeset.name,
            shape=Shape(cpus=nodeset.cpus, memory_mb=nodeset.memory_mb, gpus=nodeset.gpus or 0, site=nodeset.site),
            features=nodeset.features,
            weight=nodeset.weight,
            shards=nodeset.shards,
            mps=nodeset.mps,
            rented=True,
        )
        for nodeset in rented_sets(spec).values()
        for name in nodeset.nodes
    )


def all_members(spec: Spec) -> tuple[Member, ...]:
    """Every host there is or may be: those that are always there, then those that may be rented."""
    return (*members(spec), *rented_members(spec))


def partitions(spec: Spec) -> dict[str, Partition]:
    """The partitions with the defaults filled in: one called `main` when there is none, and always one default."""
    sets = (*spec.nodesets, *(("controller",) if spec.controller.compute else ()))
    if not spec.partitions:
        return {"main": Partition(nodesets=sets, default=True)}
    over = {name: partition.over(sets) for name, partition in spec.partitions.items()}
    if any(partition.default for partition in over.values()):
        return over
    first = next(iter(over))
    return {name: partition.model_copy(update={"default": name == first}) for name, partition in over.items()}


def default_spec(cluster: str = "sandbox", nodes: int = 2, gpus: int = 2, kind: SandboxKind = "container") -> Spec:
    """What Shoal builds when there is no file: a sandbox with a controller and a few nodes with simulated GPUs."""
    return Spec(
        cluster=cluster,
        sandbox=Sandbox(kind=kind),
        controller=Controller(provider="sandbox"),
        nodesets={"fish": NodeSet(provider="sandbox", count=nodes, gpus=gpus)},
    )


def rented_sets(spec: Spec) -> dict[str, RentedSet]:
    """The rented nodesets, by name, in the order of the file."""
    return {name: _rented_set(name, nodeset) for name, nodeset in spec.nodesets.items() if nodeset.max is not None}


def provider_accounts(spec: Spec) -> dict[str, ProviderAccount]:
    """The accounts at providers, each with its kind filled in."""
    return {name: account.model_copy(update={"kind": account.kind or name}) for name, account in spec.providers.items()}


def _rented_set(name: str, nodeset: NodeSet) -> RentedSet:
    assert nodeset.max is not None
    offers = nodeset.offers
    if not offers:
        values = {key: getattr(nodeset, key) for key in OfferChoice.model_fields}
        image = nodeset.image if nodeset.is_set("image") else None  # the default is the sandbox's
        offers = (OfferChoice.model_validate({**values, "image": image}),)
    return RentedSet(
        name=name,
        offers=offers,
        prefer=nodeset.prefer,
        max=nodeset.max,
        idle=seconds(nodeset.idle or DEFAULT_IDLE_TIME),
        lifetime=seconds(nodeset.lifetime or LIFETIME),
        max_price=nodeset.max_price,
        budget=nodeset.budget,
        cpus=nodeset.cpus,
        memory_mb=size_mb(nodeset.memory) if nodeset.memory else None,
        gpus=nodeset.gpus or None,
        disk_gb=-(-size_mb(nodeset.disk) // 1024) if nodeset.disk else DISK_GB,
        features=nodeset.features,
        weight=nodeset.weight,
        shards=nodeset.shards,
        mps=nodeset.mps,
        site=nodeset.site,
    )
