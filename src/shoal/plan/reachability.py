"""Which members reach which: asked of the members themselves, all at once."""

from __future__ import annotations

import ipaddress
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from itertools import combinations, permutations

from shoal.agent.facts import Facts
from shoal.hostlist import compress
from shoal.network.peers import Peer, to_try, without_port, worth_trying
from shoal.network.wireguard import INTERFACE, PEERS, PUBLIC_KEY, peers_in
from shoal.plan.fleet import Fleet
from shoal.roles.wireguard import file_text
from shoal.slurm.conf import SLURMCTLD_PORT, SLURMD_PORT
from shoal.spec.finding import Finding
from shoal.spec.members import all_members
from shoal.spec.model import Spec

SSH_PORT = 22
LOOK_SECONDS = 1.5
"""How long to wait for an address that may not answer at all."""
PAIR_SECONDS = 8.0
"""The same for one that should: long enough for the first packets through a tunnel, which may be lost."""
ANSWERS = ("open", "refused")
"""A refusal is an answer, too: nobody listens there yet."""
SILENT = "silent"
HANDSHAKE_SECONDS = 300
"""WireGuard repeats its handshake every two minutes while there is something to send. Twice that, and some."""
HANDSHAKES = f"date +%s && wg show {INTERFACE} latest-handshakes"


def reached_addresses(fleet: Fleet) -> dict[str, str]:
    """The addresses that our connections went to, where they are addresses."""
    reached = {}
    for name, target in fleet.targets.items():
        address = target.address or ""
        try:
            reached[name] = str(ipaddress.ip_address(address))
        except ValueError:
            continue
    return reached


async def surroundings(spec: Spec, facts: Mapping[str, Facts], fleet: Fleet) -> dict[str, Facts]:
    """The facts, each with where the other members answered the host.

    Who answered before and is silent now may only be busy: it is asked for longer, and then WireGuard itself is.
    """
    members = {member.name: member for member in all_members(spec)}
    sites = {name: members[name].site for name in facts}
    addresses = to_try(facts, sites, reached_addresses(fleet))
    peers = {name: peers_in(file_text(fact, PEERS)) for name, fact in facts.items()}
    known = {name: _still_there(some, addresses) for name, some in peers.items()}

    def ports(name: str) -> tuple[int, ...]:
        # Where somebody most likely answers. The port that we came by may be a router's.
        return tuple(dict.fromkeys((SSH_PORT, members[name].port or SSH_PORT, spec.network.port)))

    def first_meeting(name: str, other: str) -> bool:
        """Whether what is found now decides how the two are joined. Without a key nothing is decided yet."""
        keys = all(file_text(facts[one], PUBLIC_KEY) for one in (name, other))
        return keys and not (peers[name] and peers[other])

    async def ask(name: str, others: Iterable[str], seconds: float) -> dict[str, list[str]]:
        """Where each of the others answered, the best first."""
        tries = [
            (other, address)
            for other in others
            for address in addresses[other]
            if worth_trying(facts[name], sites[name], sites[other], address)
        ]
        targets = [(address, port) for other, address in tries for port in ports(other)]
        answers = iter(await (await fleet.agent(name)).reach(targets, seconds) if targets else ())
        found: dict[str, list[str]] = {}
        for other, address in tries:
            said = [next(answers) for _ in ports(other)]
            # Between sites a refusal may be a router's.
            if "open" in said or ("refused" in said and sites[name] == sites[other]):
                found.setdefault(other, []).append(address)
        return found

    async def look(name: str) -> dict[str, str]:
        before, others = known[name], [other for other in addresses if other != name]
        found = await ask(name, others, LOOK_SECONDS)
        missed = [other for other in before if before[other] not in found.get(other, ())]
        new = [other for other in others if other not in found and first_meeting(name, other)]
        if missed or new:
            found |= await ask(name, dict.fromkeys((*missed, *new)), PAIR_SECONDS)
        lost = [other for other in before if other not in found]
        if lost:
            working = await _working(fleet, name, [peers[name][other] for other in lost])
            found |= {other: [before[other]] for other in working}
        return {
            other: before[other] if before.get(other) in found[other] else found[other][0]
            for other in others
            if other in found
        }

    seen = await fleet.each(facts, look)
    return {name: replace(fact, reaches=seen.get(name, known[name])) for name, fact in facts.items()}


def _still_there(peers: Mapping[str, Peer], addresses: Mapping[str, list[str]]) -> dict[str, str]:
    """The addresses at which a host was told to call others, as far as the others still have them."""
    told = {name: without_port(peer.endpoint) for name, peer in peers.items() if peer.endpoint}
    return {name: address for name, address in told.items() if address in addresses.get(name, ())}


async def _working(fleet: Fleet, name: str, peers: Sequence[Peer]) -> list[str]:
    """Those of a host's peers with which its WireGuard has spoken of late; all of them where it cannot be asked."""
    # Something must be sent: who has nothing to say to a peer has no handshake with it, either.
    await (await fleet.agent(name)).reach([(peer.allowed[0], SLURMD_PORT) for peer in peers], PAIR_SECONDS)
    asked = await (await fleet.host(name)).run(("sh", "-c", HANDSHAKES), timeout=60)
    if asked.status != 0:
        return [peer.name for peer in peers]
    now, *lines = asked.text.splitlines()
    last = {key: int(at) for key, _, at in (line.partition("\t") for line in lines)}
    return [peer.name for peer in peers if int(now) - last.get(peer.public_key, 0) < HANDSHAKE_SECONDS]


async def unconnected(spec: Spec, addresses: Mapping[str, str], fleet: Fleet, names: Iterable[str]) -> list[Finding]:
    """Every host that others cannot reach on the cluster's network, where Slurm's messages go."""
    present = [name for name in names if name in addresses and name not in fleet.failures]
    targets = slurm_ports(spec, addresses)
    missing = await _unanswered(spec, fleet, present, targets)
    findings = []
    for name in present:
        why = {asking: said for (asking, asked), said in missing.items() if asked == name}
        if not why:
            continue
        address, port = targets[name]
        said = ", ".join(dict.fromkeys("no answer" if text == SILENT else text for text in why.values()))
        findings.append(
            Finding(
                "error",
                f"cannot be reached from {compress(why)}",
                f"{address} port {port}: {said}",
                _fix(spec, port),
                host=name,
            )
        )
    return findings


def slurm_ports(spec: Spec, addresses: Mapping[str, str]) -> dict[str, tuple[str, int]]:
    """Where Slurm's messages to each member go."""
    controller = next(iter(all_members(spec))).name
    return {name: (at, SLURMCTLD_PORT if name == controller else SLURMD_PORT) for name, at in addresses.items()}


async def _unanswered(
    spec: Spec, fleet: Fleet, names: Sequence[str], targets: Mapping[str, tuple[str, int]]
) -> dict[tuple[str, str], str]:
    """Who gets no answer of whom, and what is said instead."""
    if spec.network.kind != "wireguard":
        return await call(fleet, permutations(names, 2), targets)
    there, back = list(combinations(names, 2)), list(combinations(reversed(names), 2))
    # Two who call each other for the first time, in one moment, both drop the other's call for their own. They call
    # again after 5 s, and where hosts are busy in one moment again: so one of the two calls first.
    missing = await call(fleet, there, targets) | await call(fleet, back, targets)
    for turn in (there, back):
        silent = [pair for pair in turn if missing.get(pair) == SILENT]
        again = await call(fleet, silent, targets)
        missing = {pair: said for pair, said in missing.items() if pair not in silent} | again
    return missing


async def call(
    fleet: Fleet, pairs: Iterable[tuple[str, str]], targets: Mapping[str, tuple[str, int]]
) -> dict[tuple[str, str], str]:
    """Let the first of each pair connect to the second, all at once: those that get no answer, and what is said."""
    calls: dict[str, list[str]] = {}
    for asking, asked in pairs:
        calls.setdefault(asking, []).append(asked)

    async def one(name: str) -> list[str]:
        return await (await fleet.agent(name)).reach([targets[asked] for asked in calls[name]], PAIR_SECONDS)

    answers = await fleet.each(calls, one)
    return {
        (asking, asked): said
        for asking, some in answers.items()
        for asked, said in zip(calls[asking], some, strict=True)
        if said not in ANSWERS
    }


def _fix(spec: Spec, port: int) -> str:
    if spec.network.kind == "wireguard":
        return (
            f"look at `wg show` on the two, and open UDP port {spec.network.port} between the hosts, or forward it "
            "to one that all others then reach (`hub`)"
        )
    if spec.network.kind == "lan":
        return f"open TCP port {port} between the hosts, or join them by `network: wireguard`"
    if spec.network.kind == "tailscale":
        return f"look at `tailscale ping` on the two, and let the rules of the tailnet open TCP port {port} to members"
    return f"open TCP port {port} between the hosts on the network {spec.network.kind}"
