"""Assembles the cluster from the spec, the facts and the current configuration. Pure."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Iterator, Mapping
from contextlib import suppress
from dataclasses import asdict, replace

from shoal.agent.facts import NO_FACTS, Facts
from shoal.network.addresses import lan_addresses
from shoal.network.firewall import open_commands
from shoal.network.links import LINKS, SWITCH_PREFIX
from shoal.network.links import switches as switches_by_links
from shoal.network.tailscale import tailscale_addresses
from shoal.network.tunnel import LOOPBACK, choose_ports, needs_tunnel
from shoal.network.wireguard import assign_addresses
from shoal.roles import rented as rentals
from shoal.roles.component import PACKAGES_PREFIX, Cluster, choose_ids
from shoal.roles.containers import separate_containers, tunnels
from shoal.roles.current_conf import CurrentConf, confinement, limit_confinement
from shoal.roles.host_address import address_findings, can_listen_at_one_address
from shoal.roles.images import image_features, uses_oci
from shoal.roles.job_engines import uses_hooks
from shoal.roles.plugins import all_have_pmix, supports_spanning
from shoal.roles.rented import rented_containers, suspend_time
from shoal.roles.slurm_tree import find_trees, require_tree, uses_tree
from shoal.roles.user_ids import choose_user_ids
from shoal.slurm.accounting import enforcement
from shoal.slurm.conf import PORTS, gpu_type, slurm_settings
from shoal.slurm.model import AccountingConf, ClusterConf, Confinement, Node, NodeGpu, PartitionConf, Switch
from shoal.slurm.parsed_conf import parse_conf
from shoal.slurm.preemption import contract_violations
from shoal.slurm.versions import Version, packaged_version
from shoal.spec.containers import PLUGIN
from shoal.spec.finding import Finding
from shoal.spec.member import Member
from shoal.spec.members import members as members_of
from shoal.spec.members import partitions as partitions_of
from shoal.spec.members import rented_members
from shoal.spec.model import Spec

SLURM_PACKAGES = ("slurmctld", "slurmd", "slurm-client")
FIREWALLD = "firewalld"


def assemble(
    spec: Spec,
    facts: Mapping[str, Facts],
    reached: Mapping[str, str],
    before: CurrentConf | None = None,
    leaving: Iterable[str] = (),
) -> Cluster:
    """Combine spec and facts.

    `before` is the current configuration: a host that does not answer keeps its place in it, and so does a node that is
    `leaving`, until its jobs have ended.
    """
    before = before or CurrentConf()
    leaving = tuple(name for name in leaving if name in before.nodes)
    always = members_of(spec)
    members = (*always, *rentals.present_rentals(spec, facts))
    tunneled = _tunneled_members(spec, members, facts, before)
    rented_boxes = rented_containers(spec)
    ports = _ports(tunneled, rented_boxes, before)
    outside = tuple(m for m in members if m.name not in tunneled)
    meshed = tuple(name for name in leaving if not before.nodes[name].port)
    awaited = tuple(name for name in rentals.addressed_rentals(spec, facts, before) if name not in rented_boxes)
    addresses = _addresses(spec, outside, facts, reached, before, (*meshed, *awaited))
    versions = slurm_versions(spec, {m.name: facts[m.name] for m in members if m.name in facts})
    permanent = tuple(m for m in outside if not m.rented)
    # A machine that is not rented yet has no facts: it counts as one like the permanent ones.
    computes = [m.name for m in permanent if "compute" in m.roles] or [always[0].name]
    controller = members[0]
    all_nodes = (
        *_permanent_nodes(spec, always, facts, addresses, ports, before),
        *_rented_nodes(spec, rented_boxes, ports),
        *(before.nodes[name] for name in leaving),
    )
    all_members = (*always, *rented_members(spec))
    one_address = not rented_boxes and can_listen_at_one_address(spec.network.kind, permanent, facts, addresses, before)
    conf = ClusterConf(
        name=spec.cluster,
        controller=controller.name,
        controller_address=addresses.get(controller.name, ""),
        controller_hostname=facts[controller.name].hostname if controller.name in facts else None,
        versions=tuple(versions[m.name] for m in always if m.name in versions),
        nodes=all_nodes,
        partitions=_partitions(spec, all_members, all_nodes, before, leaving),
        switches=_switches(all_members, (node.name for node in all_nodes), before, facts),
        options=_options(spec),
        confinement=_confinement(computes, facts, versions, before, meshed),
        pmix=uses_tree(spec) or _pmix(always, facts, versions, before),
        spanning=supports_spanning(spec, facts.get(controller.name), versions.get(controller.name)),
        one_address=one_address,
        accounting=_accounting(spec, controller, addresses),
        auth=spec.auth,
        munge=not uses_tree(spec),
        power=rentals.power_saving(spec),
        health=spec.health.mode != "off",
        oci=uses_oci(spec),
        spank=spec.files[PLUGIN].digest if PLUGIN in spec.files else "",
        job_engines=uses_hooks(spec),
    )
    boxes = {name: facts[name] for name in tunneled if name in facts}
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
            *_contract_findings(conf),
            *rentals.rented_findings(spec),
            *address_findings(spec.network.kind, permanent, facts, addresses),
        ),
        tunnels=tunnels(spec, boxes, ports, addresses, controller.name, conf.one_address),
        user_ids=choose_user_ids(spec, facts, controller.name),
        slurm_prefix=require_tree().prefix if uses_tree(spec) else PACKAGES_PREFIX,
    )


def slurm_versions(spec: Spec, facts: Mapping[str, Facts]) -> dict[str, Version]:
    """The Slurm that each host has, or gets."""
    if uses_tree(spec):
        return {name: tree.release for name, fact in facts.items() if (tree := find_trees().get(fact.arch))}
    return {name: version for name, fact in facts.items() if (version := slurm_version(fact)) is not None}


def slurm_version(facts: Facts) -> Version | None:
    """The Slurm a host has, or the one its package manager would install."""
    packages = [facts.packages[name] for name in SLURM_PACKAGES if name in facts.packages]
    for text in (*(package.installed for package in packages), *(package.candidate for package in packages)):
        with suppress(ValueError):  # a package of that name that is not Slurm's
            if text:
                return Version.parse(text)
    return packaged_version(facts.os_id, facts.os_version or facts.os_codename)


def _options(spec: Spec) -> dict[str, str]:
    """The user's settings. Programs of ours that Slurm runs end with the user's own."""
    hooked = (
        *(("healthcheckprogram",) if spec.health.mode != "off" else ()),
        *(("epilog", "taskprolog") if uses_hooks(spec) else ()),
    )
    return {key: str(value) for key, value in spec.slurm.options.items() if key.lower() not in hooked}


def _tunneled_members(
    spec: Spec, members: tuple[Member, ...], facts: Mapping[str, Facts], before: CurrentConf
) -> tuple[str, ...]:
    """The containers behind a tunnel. One that does not answer keeps its former state."""

    def is_tunneled(name: str) -> bool:
        if name in facts:
            return needs_tunnel(spec.network.kind, facts[name])
        return name in before.nodes and before.nodes[name].port is not None

    return tuple(m.name for m in members[1:] if "compute" in m.roles and is_tunneled(m.name))


def _ports(tunneled: Iterable[str], rented_boxes: Collection[str], before: CurrentConf) -> dict[str, int]:
    """The ports of containers behind a tunnel, rented ones last; each keeps the port that it has."""
    known = {name: node.port for name, node in before.nodes.items() if node.port}
    return choose_ports((*(name for name in tunneled if name not in rented_boxes), *rented_boxes), known)


def _permanent_nodes(
    spec: Spec,
    members: Iterable[Member],
    facts: Mapping[str, Facts],
    addresses: Mapping[str, str],
    ports: Mapping[str, int],
    before: CurrentConf,
) -> Iterator[Node]:
    """The nodes of members that compute. One that does not answer keeps its line."""
    for member in members:
        if "compute" not in member.roles:
            continue
        if member.name in facts:
            node = _node(member, facts[member.name], addresses, ports.get(member.name))
            images = () if node.port else image_features(spec, facts[member.name])
            yield replace(node, features=(*node.features, *images))
        elif member.name in before.nodes:
            yield before.nodes[member.name]


def _rented_nodes(spec: Spec, rented_boxes: Collection[str], ports: Mapping[str, int]) -> Iterator[Node]:
    """The nodes that may be rented. The controller reaches a rented container through a tunnel."""
    for node in rentals.rented_nodes(spec):
        yield replace(node, address=LOOPBACK, port=ports[node.name]) if node.name in rented_boxes else node


def _addresses(
    spec: Spec,
    members: tuple[Member, ...],
    facts: Mapping[str, Facts],
    reached: Mapping[str, str],
    before: CurrentConf,
    leaving: tuple[str, ...],
) -> dict[str, str]:
    names = (*(m.name for m in members), *leaving)
    if spec.network.kind == "wireguard":
        return assign_addresses(spec.network.subnet, names, before.addresses)
    member_facts = {m.name: facts[m.name] for m in members if m.name in facts}
    addresses = (
        tailscale_addresses(member_facts) if spec.network.kind == "tailscale" else lan_addresses(member_facts, reached)
    )
    for name in names:
        if name not in addresses and name in before.addresses:
            addresses[name] = before.addresses[name]
        elif name not in addresses and name in before.nodes and not before.nodes[name].cloud:
            addresses[name] = before.nodes[name].address  # the address of a rented node is only a name
    return {name: addresses[name] for name in names if addresses.get(name)}


def _confinement(
    computes: list[str],
    facts: Mapping[str, Facts],
    versions: Mapping[str, Version],
    before: CurrentConf,
    leaving: tuple[str, ...],
) -> Confinement:
    compute_facts = [facts[name] for name in computes if name in facts]
    possible = confinement(compute_facts, versions.values())
    if before.confinement is None or (len(compute_facts) == len(computes) and not leaving):
        return possible
    return limit_confinement(possible, before.confinement) if compute_facts else before.confinement


def _switches(
    members: tuple[Member, ...], nodes: Iterable[str], before: CurrentConf, facts: Mapping[str, Facts]
) -> tuple[Switch, ...]:
    """One switch for each site where there are several, so that no job spans two; else by the measured links."""
    nodes = tuple(nodes)
    sites = {name: site for name, site in before.sites.items() if not site.startswith(SWITCH_PREFIX)}
    sites |= {member.name: member.shape.site for member in members}
    # A leaving node without a recorded site was in a cluster with one site.
    places = {node: sites.get(node, members[0].shape.site) for node in nodes}
    if len({*places.values()}) < 2:
        places = switches_by_links(facts.get(members[0].name, NO_FACTS).text(LINKS), nodes)
    by_place: dict[str, list[str]] = {}
    for node, place in places.items():
        by_place.setdefault(place, []).append(node)
    return tuple(Switch(place, tuple(names)) for place, names in sorted(by_place.items())) if len(by_place) > 1 else ()


def _accounting(spec: Spec, controller: Member, addresses: Mapping[str, str]) -> AccountingConf | None:
    if spec.accounting is None:
        return None
    host = spec.accounting.host or controller.name
    return AccountingConf(addresses.get(host, host), enforcement(spec.accounting))


def _pmix(
    members: tuple[Member, ...], facts: Mapping[str, Facts], versions: Mapping[str, Version], before: CurrentConf
) -> bool:
    member_facts = {member.name: facts[member.name] for member in members if member.name in facts}
    without_facts = [member.name for member in members if member.name not in facts and member.name in before.addresses]
    return (before.pmix or not without_facts) and all_have_pmix(member_facts, versions, before.addresses, before.pmix)


def _other_firewalls(spec: Spec, facts: Mapping[str, Facts], addresses: Mapping[str, str]) -> Iterator[Finding]:
    """Hosts with another firewall that blocks Slurm's ports: our own rules do not open them there."""
    udp = spec.network.port if spec.network.kind == "wireguard" else None
    for name, fact in facts.items() if spec.firewall else ():
        other = FIREWALLD if fact.is_active(FIREWALLD) else fact.firewall
        if other:
            commands = open_commands(other, addresses.values(), PORTS, udp)
            fix = f"run `{commands}` on it, and set `firewall: false`: then that firewall guards the ports"
            yield Finding("warning", "another firewall may block Slurm's ports", other, fix, host=name)


def _contract_findings(conf: ClusterConf) -> Iterator[Finding]:
    """The user's options that leave jobs too little time to save their work."""
    if conf.versions and conf.options:
        for violation in contract_violations(parse_conf(slurm_settings(conf)).settings):
            yield violation.finding(conf.options, conf.controller)


def _node(member: Member, fact: Facts, addresses: Mapping[str, str], port: int | None) -> Node:
    return Node(
        name=member.name,
        hostname=fact.hostname,
        address=LOOPBACK if port else addresses.get(member.name, member.name),
        port=port,
        **asdict(fact.cpu),
        memory_mb=fact.memory_mb,
        gpus=tuple(NodeGpu(type=gpu_type(gpu.name), device=gpu.device) for gpu in fact.gpus),
        shards=member.shards * len(fact.gpus),
        mps=member.mps * len(fact.gpus),
        features=(member.nodeset, *member.features),
        weight=member.weight,
    )


def _partitions(
    spec: Spec, members: tuple[Member, ...], nodes: tuple[Node, ...], before: CurrentConf, leaving: tuple[str, ...]
) -> tuple[PartitionConf, ...]:
    present = {node.name for node in nodes}.difference(leaving)
    lines: list[PartitionConf] = []
    specified = partitions_of(spec)
    # Leaving containers were in a partition that the spec does not name: they count as members of the default one.
    separate = {name for name in leaving if not specified.keys() & before.partitions.get(name, ())}
    for name, partition in specified.items():
        names = (
            *(m.name for m in members if m.nodeset in partition.nodesets and m.name in present),
            *(node for node in leaving if name in before.partitions.get(node, ())),
            *(node for node in leaving if node in separate and before.nodes[node].port and partition.default),
        )
        settings = partition.model_dump(exclude={"nodesets"})
        lines.append(PartitionConf(name, names, suspend_time=suspend_time(spec, name), **settings))
    return separate_containers(lines, nodes)
