"""The members of a cluster and its partitions, worked out from the spec. Pure."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

from shoal.spec.member import Member, Role, Shape
from shoal.spec.model import Controller, HostEntry, HostSet, NodeSet, Partition, Spec
from shoal.spec.rented import rented_sets
from shoal.spec.words import size_mb


def members(spec: Spec) -> tuple[Member, ...]:
    """Every host that is always there: the controller, login hosts, then the nodesets in the order of the file."""
    return tuple(_members(spec))


def rented_members(spec: Spec) -> tuple[Member, ...]:
    """Every node that may be rented, whether or not it is there now, in the order of the file."""
    return tuple(
        Member(
            name=name,
            roles=frozenset({"compute"}),
            nodeset=one.name,
            shape=Shape(cpus=one.cpus, memory_mb=one.memory_mb, gpus=one.gpus or 0, site=one.site),
            features=one.features,
            weight=one.weight,
            rented=True,
        )
        for one in rented_sets(spec).values()
        for name in one.nodes
    )


def all_members(spec: Spec) -> tuple[Member, ...]:
    """Every host there is or may be: those that are always there, then those that may be rented."""
    return (*members(spec), *rented_members(spec))


def partitions(spec: Spec) -> dict[str, Partition]:
    """The partitions with the defaults filled in: one called `main` when there is none, and always one default."""
    if not spec.partitions:
        sets = (*spec.nodesets, *(("controller",) if spec.controller.compute else ()))
        return {"main": Partition(nodesets=sets, default=True)}
    if any(partition.default for partition in spec.partitions.values()):
        return dict(spec.partitions)
    first = next(iter(spec.partitions))
    return {
        name: partition.model_copy(update={"default": name == first}) for name, partition in spec.partitions.items()
    }


def default_spec(cluster: str = "sandbox", nodes: int = 2, gpus: int = 2) -> Spec:
    """What Shoal builds when there is no file: a sandbox with a controller and a few nodes with simulated GPUs."""
    return Spec(
        cluster=cluster,
        controller=Controller(provider="sandbox"),
        nodesets={"fish": NodeSet(provider="sandbox", count=nodes, gpus=gpus)},
    )


def _members(spec: Spec) -> Iterator[Member]:
    controller = spec.controller
    roles: frozenset[Role] = frozenset({"controller", "compute"} if controller.compute else {"controller"})
    if controller.host is not None:
        yield from _given("controller", roles, controller.host, controller)
    else:
        yield _made("controller", "controller", roles, controller)
    if spec.login is not None:
        yield from _set("login", frozenset({"login"}), spec.login)
    for name, nodeset in spec.nodesets.items():
        yield from _set(name, frozenset({"compute"}), nodeset)


def _set(nodeset: str, roles: frozenset[Role], entry: HostSet) -> Iterator[Member]:
    for host in entry.hosts:
        yield from _given(nodeset, roles, host, entry)
    if entry.provider is not None and entry.count is not None:
        for number in range(1, entry.count + 1):
            yield _made(f"{nodeset}{number}", nodeset, roles, entry)


def _given(nodeset: str, roles: frozenset[Role], host: HostEntry, reach: Controller | HostSet) -> Iterator[Member]:
    identity = host.identity or reach.identity
    for name in host.names:
        yield Member(
            name=name,
            roles=roles,
            nodeset=nodeset,
            address=host.address,
            port=host.port or reach.port,
            user=host.user or reach.user,
            identity=Path(identity).expanduser() if identity else None,
            endpoint=host.endpoint,
            shape=Shape(site=reach.site),
            features=reach.features if isinstance(reach, NodeSet) else (),
            weight=reach.weight if isinstance(reach, NodeSet) else 1,
        )


def _made(name: str, nodeset: str, roles: frozenset[Role], machine: Controller | HostSet) -> Member:
    return Member(
        name=name,
        roles=roles,
        nodeset=nodeset,
        provider=machine.provider,
        shape=Shape(
            image=machine.image,
            cpus=machine.cpus,
            memory_mb=size_mb(machine.memory) if machine.memory else None,
            disk_mb=size_mb(machine.disk) if machine.disk else None,
            gpus=machine.gpus,
            site=machine.site,
            cgroups=machine.cgroups,
        ),
        features=machine.features if isinstance(machine, NodeSet) else (),
        weight=machine.weight if isinstance(machine, NodeSet) else 1,
    )
