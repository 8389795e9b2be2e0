"""Which members reach which: asked of the members themselves, all at once."""

from __future__ import annotations

import ipaddress
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from itertools import combinations, permutations

from shoal.agent.facts import Facts
from shoal.hostlist import compress
from shoal.network import wireguard
from shoal.network.wireguard import Peer
from shoal.plan.connections import Fleet
from shoal.slurm.conf import PORTS, SLURMCTLD_PORT, SLURMD_PORT
from shoal.spec.finding import Finding
from shoal.spec.members import all_members
from shoal.spec.model import Spec

SSH_PORT = 22
CONNECT_TIMEOUT_S = 1.5
"""For an address that may not answer at all."""
PAIR_TIMEOUT_S = 8.0
"""For an address that should answer: the first packets through a tunnel may be lost."""
ANSWERS = ("open", "refused")
"""A refused connection is an answer, too: no daemon listens there yet."""
SILENT = "silent"
HANDSHAKE_MAX_AGE_S = 300
"""WireGuard repeats its handshake every two minutes while there is something to send. Twice that, and some."""
HANDSHAKES = f"date +%s && wg show {wireguard.INTERFACE} latest-handshakes"


def connection_addresses(fleet: Fleet) -> dict[str, str]:
    """The IP addresses of our own connections; not of hosts that we reach by name."""
    addresses = {}
    for name, target in fleet.targets.items():
        address = target.address or ""
        try:
            addresses[name] = str(ipaddress.ip_address(address))
        except ValueError:
            continue
    return addresses


async def add_reachability(spec: Spec, facts: Mapping[str, Facts], fleet: Fleet) -> dict[str, Facts]:
    """The facts, each with the addresses at which the other members answered the host.

    A member that answered before and is silent now may only be busy: it gets more time, then handshakes decide.
    """
    members = {member.name: member for member in all_members(spec)}
    sites = {name: members[name].site for name in facts}
    addresses = wireguard.addresses_to_try(facts, sites, connection_addresses(fleet))
    peers = {name: wireguard.peers_in(fact.text(wireguard.PEERS)) for name, fact in facts.items()}
    endpoints = {name: _known_endpoints(host_peers, addresses) for name, host_peers in peers.items()}

    def ports(name: str) -> tuple[int, ...]:
        # The ports most likely to answer. The port of our own connection may be a router's.
        return tuple(dict.fromkeys((SSH_PORT, members[name].port or SSH_PORT, spec.network.port)))

    def is_first_contact(name: str, other: str) -> bool:
        """Whether this result decides how the two are connected. Without a key nothing is decided yet."""
        keys = all(facts[host].text(wireguard.PUBLIC_KEY).strip() for host in (name, other))
        return keys and not (peers[name] and peers[other])

    async def try_addresses(name: str, others: Iterable[str], seconds: float) -> dict[str, list[str]]:
        """The addresses at which each of the others answered, the best first."""
        attempts = [
            (other, address)
            for other in others
            for address in addresses[other]
            if wireguard.worth_trying(facts[name], sites[name], sites[other], address)
        ]
        targets = [(address, port) for other, address in attempts for port in ports(other)]
        answers = iter(await (await fleet.agent(name)).reach(targets, seconds) if targets else ())
        reachable: dict[str, list[str]] = {}
        for other, address in attempts:
            results = [next(answers) for _ in ports(other)]
            # Between sites a router may have refused the connection.
            if "open" in results or ("refused" in results and sites[name] == sites[other]):
                reachable.setdefault(other, []).append(address)
        return reachable

    async def find_members(name: str) -> dict[str, str]:
        old_endpoints, others = endpoints[name], [other for other in addresses if other != name]
        reachable = await try_addresses(name, others, CONNECT_TIMEOUT_S)
        missed_names = [other for other in old_endpoints if old_endpoints[other] not in reachable.get(other, ())]
        new_names = [other for other in others if other not in reachable and is_first_contact(name, other)]
        if missed_names or new_names:
            reachable |= await try_addresses(name, dict.fromkeys((*missed_names, *new_names)), PAIR_TIMEOUT_S)
        lost_names = [other for other in old_endpoints if other not in reachable]
        if lost_names:
            working_names = await _peers_with_handshake(fleet, name, [peers[name][other] for other in lost_names])
            reachable |= {other: [old_endpoints[other]] for other in working_names}
        return {
            other: old_endpoints[other] if old_endpoints.get(other) in reachable[other] else reachable[other][0]
            for other in others
            if other in reachable
        }

    reached_addresses = await fleet.each(facts, find_members)
    return {name: replace(fact, reaches=reached_addresses.get(name, endpoints[name])) for name, fact in facts.items()}


def _known_endpoints(peers: Mapping[str, Peer], addresses: Mapping[str, list[str]]) -> dict[str, str]:
    """The endpoints in a host's configuration that the other members still have."""
    endpoints = {name: wireguard.without_port(peer.endpoint) for name, peer in peers.items() if peer.endpoint}
    return {name: address for name, address in endpoints.items() if address in addresses.get(name, ())}


async def _peers_with_handshake(fleet: Fleet, name: str, peers: Sequence[Peer]) -> list[str]:
    """The peers with a recent WireGuard handshake; all of them where WireGuard cannot be queried."""
    # WireGuard makes no handshake while there is nothing to send.
    await (await fleet.agent(name)).reach([(peer.allowed[0], SLURMD_PORT) for peer in peers], PAIR_TIMEOUT_S)
    result = await (await fleet.host(name)).run(("sh", "-c", HANDSHAKES), timeout=60)
    if result.status != 0:
        return [peer.name for peer in peers]
    now, *lines = result.text.splitlines()
    handshake_times = {key: int(handshake_time) for key, _, handshake_time in (line.partition("\t") for line in lines)}
    return [peer.name for peer in peers if int(now) - handshake_times.get(peer.public_key, 0) < HANDSHAKE_MAX_AGE_S]


async def unreachable_findings(
    spec: Spec, addresses: Mapping[str, str], fleet: Fleet, names: Iterable[str]
) -> list[Finding]:
    """Every host that others cannot reach on the cluster's network, where Slurm's messages go."""
    present_names = [name for name in names if name in addresses and name not in fleet.failures]
    targets = slurm_ports(spec, addresses)
    failures = await _failed_connections(spec, fleet, present_names, targets)
    findings = []
    for name in present_names:
        errors = {source: error for (source, target), error in failures.items() if target == name}
        if not errors:
            continue
        address, port = targets[name]
        cause = ", ".join(dict.fromkeys("no answer" if error == SILENT else error for error in errors.values()))
        findings.append(
            Finding(
                "error",
                f"cannot be reached from {compress(errors)}",
                f"{address} port {port}: {cause}",
                _fix(spec, port),
                host=name,
            )
        )
    return findings


def slurm_ports(spec: Spec, addresses: Mapping[str, str]) -> dict[str, tuple[str, int]]:
    """Where Slurm's messages to each member go."""
    controller = next(iter(all_members(spec))).name
    return {
        name: (address, SLURMCTLD_PORT if name == controller else SLURMD_PORT) for name, address in addresses.items()
    }


async def _failed_connections(
    spec: Spec, fleet: Fleet, names: Sequence[str], targets: Mapping[str, tuple[str, int]]
) -> dict[tuple[str, str], str]:
    """The pairs of hosts of which the first cannot connect to the second, with the error."""
    if spec.network.kind != "wireguard":
        return await try_connections(fleet, permutations(names, 2), targets)
    forward, backward = list(combinations(names, 2)), list(combinations(reversed(names), 2))
    # Two hosts that start a handshake with each other at the same time both drop the other's. They repeat it after 5 s,
    # and on busy hosts again at the same time: so one of the two goes first.
    failures = await try_connections(fleet, forward, targets) | await try_connections(fleet, backward, targets)
    for direction in (forward, backward):
        silent_pairs = [pair for pair in direction if failures.get(pair) == SILENT]
        new_failures = await try_connections(fleet, silent_pairs, targets)
        failures = {pair: error for pair, error in failures.items() if pair not in silent_pairs} | new_failures
    return failures


async def try_connections(
    fleet: Fleet, pairs: Iterable[tuple[str, str]], targets: Mapping[str, tuple[str, int]]
) -> dict[tuple[str, str], str]:
    """Connect the first of each pair to the second, all at once. Returns the pairs that fail, with the error."""
    targets_of: dict[str, list[str]] = {}
    for source, target in pairs:
        targets_of.setdefault(source, []).append(target)

    async def connect(name: str) -> list[str]:
        return await (await fleet.agent(name)).reach([targets[target] for target in targets_of[name]], PAIR_TIMEOUT_S)

    answers = await fleet.each(targets_of, connect)
    return {
        (source, target): error
        for source, errors in answers.items()
        for target, error in zip(targets_of[source], errors, strict=True)
        if error not in ANSWERS
    }


def _fix(spec: Spec, port: int) -> str:
    if spec.network.kind == "wireguard":
        return (
            f"run `wg show` on the two, and open UDP port {spec.network.port} between the hosts, or forward it "
            "to one that all others then reach (`hub`)"
        )
    if spec.network.kind == "lan":
        ports = ", ".join(PORTS)
        return f"open TCP ports {ports} between the hosts (jobs use others, too), or join them by `network: wireguard`"
    if spec.network.kind == "tailscale":
        return f"run `tailscale ping` on the two, and let the tailnet's rules open TCP port {port} to members"
    return f"open TCP port {port} between the hosts on the network {spec.network.kind}"
