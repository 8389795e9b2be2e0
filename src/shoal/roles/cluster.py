"""The cluster as one value: what the spec wants and what the hosts are, put together. Everything here is pure."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field, replace

from shoal.agent.facts import Facts
from shoal.network.addresses import lan_addresses
from shoal.network.firewall import opening
from shoal.network.links import LINKS, NEAR
from shoal.network.links import switches as switches_by_links
from shoal.network.peers import assign
from shoal.network.tailscale import tailscale_addresses
from shoal.network.tunnel import LOOPBACK, Tunnel, choose_ports, needs_tunnel
from shoal.roles.confinement import Confinement, confinement, no_stronger
from shoal.roles.ids import Ids, choose_ids
from shoal.roles.in_force import InForce
from shoal.roles.own_address import listens_at_one, obstacles
from shoal.roles.pmix import all_have_pmix
from shoal.roles.reduced import containers_apart, tunnels
from shoal.roles.rented import (
    addressed,
    power_saving,
    present,
    rented_containers,
    rented_findings,
    rented_nodes,
    suspend_time,
)
from shoal.roles.spanning import can_span
from shoal.slurm.accounting import enforcement
from shoal.slurm.conf import PORTS, gpu_type, slurm_settings
from shoal.slurm.model import AccountingConf, ClusterConf, GpuLine, Node, Partition, Switch
from shoal.slurm.preemption import breaches
from shoal.slurm.read import read
from shoal.slurm.versions import Version, packaged
from shoal.spec.finding import Finding
from shoal.spec.member import Member
from shoal.spec.members import members as members_of
from shoal.spec.members import partitions as partitions_of
from shoal.spec.members import rented_members
from shoal.spec.model import Spec

SLURM_PACKAGES = ("slurmctld", "slurmd", "slurm-client")
FIREWALLD = "firewalld"


@dataclass(frozen=True)
class Cluster:
    """All that a role needs to know to say what a host should be."""

    spec: Spec
    members: tuple[Member, ...]
    facts: Mapping[str, Facts]
    addresses: Mapping[str, str]
    versions: Mapping[str, Version]
    ids: Ids
    conf: ClusterConf
    findings: tuple[Finding, ...] = ()
    """What stands in the cluster's way and is not ours to change."""
    tunnels: Mapping[str, Tunnel] = field(default_factory=dict)
    """The ways to containers that have no address among `addresses`, by name."""

    @property
    def controller(self) -> Member:
        return self.members[0]


def assemble(
    spec: Spec,
    facts: Mapping[str, Facts],
    reached: Mapping[str, str],
    before: InForce | None = None,
    leaving: Iterable[str] = (),
) -> Cluster:
    """Put spec and facts together.

    `before` is the configuration in force: a host that does not answer just now keeps its place in it, and so does a
    node that is `leaving`, until its jobs have ended.
    """
    before = before or InForce()
    leaving = tuple(name for name in leaving if name in before.nodes)
    always = members_of(spec)
    members = (*always, *present(spec, facts))
    inside = _inside_containers(spec, members, facts, before)
    boxes = rented_containers(spec)
    known_ports = {name: node.port for name, node in before.nodes.items() if node.port}
    ports = choose_ports((*(name for name in inside if name not in boxes), *boxes), known_ports)
    outside = tuple(m for m in members if m.name not in inside)
    meshed = tuple(name for name in leaving if not before.nodes[name].port)
    awaited = tuple(name for name in addressed(spec, facts, before) if name not in boxes)
    addresses = _addresses(spec, outside, facts, reached, before, (*meshed, *awaited))
    versions = {m.name: v for m in members if m.name in facts and (v := slurm_version(facts[m.name])) is not None}
    staying = tuple(m for m in outside if not m.rented)
    # What is yet to be rented cannot be asked: it is taken for a machine like those that are there.
    computes = [m.name for m in staying if "compute" in m.roles] or [always[0].name]
    nodes = [
        node
        for m in always
        if "compute" in m.roles and (node := _node(m, facts, addresses, before.nodes, ports.get(m.name))) is not None
    ]
    controller = members[0]
    jobs = _confinement(computes, facts, versions, before, meshed)
    rented = [replace(n, address=LOOPBACK, port=ports[n.name]) if n.name in boxes else n for n in rented_nodes(spec)]
    everyone = (*nodes, *rented, *(before.nodes[name] for name in leaving))
    known = (*always, *rented_members(spec))
    conf = ClusterConf(
        name=spec.cluster,
        controller=controller.name,
        controller_address=addresses.get(controller.name, ""),
        controller_hostname=facts[controller.name].hostname if controller.name in facts else None,
        versions=tuple(versions[m.name] for m in always if m.name in versions),
        nodes=everyone,
        partitions=_partitions(spec, known, everyone, before, leaving),
        switches=_switches(known, (node.name for node in everyone), before, facts),
        options={key: str(value) for key, value in spec.slurm.options.items()},
        proctrack_cgroup=jobs.tracked,
        constrain_cores=jobs.cores,
        constrain_devices=jobs.devices,
        constrain_memory=jobs.memory,
        cgroup_plugin=jobs.plugin,
        pmix=_pmix(always, facts, versions, before),
        spanning=can_span(spec, facts.get(controller.name), versions.get(controller.name)),
        one_address=not boxes and listens_at_one(spec.network.kind, staying, facts, addresses, before),
        accounting=_accounting(spec, controller, addresses),
        auth=spec.auth,
        power=power_saving(spec),
    )
    return Cluster(
        spec=spec,
        members=members,
        facts=facts,
        addresses=addresses,
        versions=versions,
        ids=choose_ids(controller.name, facts),
        conf=conf,
        findings=(
            *_other_firewalls(spec, facts, addresses),
            *_broken_contract(conf),
            *rented_findings(spec),
            *obstacles(spec.network.kind, staying, facts, addresses),
        ),
        tunnels=tunnels(
            spec, {n: facts[n] for n in inside if n in facts}, ports, addresses, controller.name, conf.one_address
        ),
    )


def slurm_version(facts: Facts) -> Version | None:
    """The Slurm a host has, or the one its package manager would install."""
    for choice in ("installed", "candidate"):
        for name in SLURM_PACKAGES:
            package = facts.packages.get(name)
            text = package and getattr(package, choice)
            if text:
                try:
                    return Version.parse(text)
                except ValueError:
                    continue  # a package of that name that is not Slurm's
    return packaged(facts.os_id, facts.os_version or facts.os_codename)


def _inside_containers(
    spec: Spec, members: tuple[Member, ...], facts: Mapping[str, Facts], before: InForce
) -> tuple[str, ...]:
    """The members that only a tunnel leads to. One that does not answer is still what it was."""
    return tuple(
        member.name
        for member in members[1:]
        if "compute" in member.roles
        and (
            needs_tunnel(spec.network.kind, facts[member.name])
            if member.name in facts
            else member.name in before.nodes and before.nodes[member.name].port is not None
        )
    )


def _addresses(
    spec: Spec,
    members: tuple[Member, ...],
    facts: Mapping[str, Facts],
    reached: Mapping[str, str],
    before: InForce,
    leaving: tuple[str, ...],
) -> dict[str, str]:
    names = (*(m.name for m in members), *leaving)
    if spec.network.kind == "wireguard":
        return assign(spec.network.subnet, names, before.addresses)
    answered = {m.name: facts[m.name] for m in members if m.name in facts}
    chosen = tailscale_addresses(answered) if spec.network.kind == "tailscale" else lan_addresses(answered, reached)
    for name in names:
        if name not in chosen and name in before.addresses:
            chosen[name] = before.addresses[name]
        elif name not in chosen and name in before.nodes and not before.nodes[name].cloud:
            chosen[name] = before.nodes[name].address  # that of a node which is rented when needed is a name
    return {name: chosen[name] for name in names if chosen.get(name)}


def _confinement(
    computes: list[str],
    facts: Mapping[str, Facts],
    versions: Mapping[str, Version],
    before: InForce,
    leaving: tuple[str, ...],
) -> Confinement:
    answered = [facts[name] for name in computes if name in facts]
    found = confinement(answered, versions.values())
    if before.confinement is None or (len(answered) == len(computes) and not leaving):
        return found
    return no_stronger(found, before.confinement) if answered else before.confinement


def _switches(
    members: tuple[Member, ...], nodes: Iterable[str], before: InForce, facts: Mapping[str, Facts]
) -> tuple[Switch, ...]:
    """One switch a site where the nodes are in more than one, so that no job spans two; else what was measured."""
    nodes = tuple(nodes)
    sites = {name: site for name, site in before.sites.items() if not site.startswith(NEAR)}
    sites |= {member.name: member.shape.site for member in members}
    # A leaving node of a cluster that had one site was in the one that all were in.
    places = {node: sites.get(node, members[0].shape.site) for node in nodes}
    if len({*places.values()}) < 2:
        controller = facts.get(members[0].name)
        measured = controller.files.get(LINKS) if controller else None
        places = switches_by_links((measured and measured.text) or "", nodes)
    inside: dict[str, list[str]] = {}
    for node, place in places.items():
        inside.setdefault(place, []).append(node)
    return tuple(Switch(place, tuple(names)) for place, names in sorted(inside.items())) if len(inside) > 1 else ()


def _accounting(spec: Spec, controller: Member, addresses: Mapping[str, str]) -> AccountingConf | None:
    if spec.accounting is None:
        return None
    host = spec.accounting.host or controller.name
    return AccountingConf(addresses.get(host, host), enforcement(spec.accounting))


def _pmix(
    members: tuple[Member, ...], facts: Mapping[str, Facts], versions: Mapping[str, Version], before: InForce
) -> bool:
    answered = {member.name: facts[member.name] for member in members if member.name in facts}
    silent = [member.name for member in members if member.name not in facts and member.name in before.addresses]
    return (before.pmix or not silent) and all_have_pmix(answered, versions, before.addresses, before.pmix)


def _other_firewalls(spec: Spec, facts: Mapping[str, Facts], addresses: Mapping[str, str]) -> Iterator[Finding]:
    """Hosts where another firewall refuses what it was not told to let in: our own opens nothing in it."""
    udp = spec.network.port if spec.network.kind == "wireguard" else None
    for name, fact in facts.items() if spec.firewall else ():
        other = FIREWALLD if fact.services.get(FIREWALLD) == "active" else fact.firewall
        if other:
            yield Finding(
                "warning",
                "another firewall refuses what it was not told to let in, and the members may not reach Slurm's ports",
                other,
                f"run `{opening(other, addresses.values(), PORTS, udp)}` on it, and set `firewall: false`: that "
                "firewall guards the ports then",
                host=name,
            )


def _broken_contract(conf: ClusterConf) -> Iterator[Finding]:
    """Options of the user's that take from jobs the time to save their work."""
    for breach in breaches(read(slurm_settings(conf)).settings) if conf.versions and conf.options else ():
        yield breach.finding(conf.options, conf.controller)


def _node(
    member: Member,
    facts: Mapping[str, Facts],
    addresses: Mapping[str, str],
    known: Mapping[str, Node],
    port: int | None,
) -> Node | None:
    if member.name not in facts:
        return known.get(member.name)
    fact = facts[member.name]
    return Node(
        name=member.name,
        hostname=fact.hostname,
        address=LOOPBACK if port else addresses.get(member.name, member.name),
        port=port,
        cpus=fact.cpu.cpus,
        sockets=fact.cpu.sockets,
        cores_per_socket=fact.cpu.cores_per_socket,
        threads_per_core=fact.cpu.threads_per_core,
        memory_mb=fact.memory_mb,
        gpus=tuple(GpuLine(type=gpu_type(gpu.name), device=gpu.device) for gpu in fact.gpus),
        features=(member.nodeset, *member.features),
        weight=member.weight,
    )


def _partitions(
    spec: Spec, members: tuple[Member, ...], nodes: tuple[Node, ...], before: InForce, leaving: tuple[str, ...]
) -> tuple[Partition, ...]:
    present = {node.name for node in nodes}.difference(leaving)
    lines: list[Partition] = []
    wanted = partitions_of(spec)
    # Containers were taken out of theirs, into one that the spec does not name; they are again, until they have left.
    apart = {name for name in leaving if not wanted.keys() & before.partitions.get(name, ())}
    for name, partition in wanted.items():
        inside = (
            *(m.name for m in members if m.nodeset in partition.nodesets and m.name in present),
            *(node for node in leaving if name in before.partitions.get(node, ())),
            *(node for node in leaving if node in apart and before.nodes[node].port and partition.default),
        )
        lines.append(
            Partition(
                name=name,
                nodes=inside,
                default=partition.default,
                max_time=partition.max_time,
                default_time=partition.default_time,
                max_nodes=partition.max_nodes,
                priority=partition.priority,
                grace=partition.grace,
                preemptable=partition.preemptable,
                suspend_time=suspend_time(spec, name),
            )
        )
    return containers_apart(lines, nodes)
