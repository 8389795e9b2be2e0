"""Which members reach which: asked of the members themselves, all at once."""

from __future__ import annotations

import ipaddress
from collections.abc import Iterable, Mapping
from dataclasses import replace

from shoal.agent.facts import Facts
from shoal.hostlist import compress
from shoal.network.mesh import to_try, worth_trying
from shoal.plan.fleet import Fleet
from shoal.slurm.conf import SLURMCTLD_PORT, SLURMD_PORT
from shoal.spec.finding import Finding
from shoal.spec.members import members as members_of
from shoal.spec.model import Spec

SSH_PORT = 22
LOOK_SECONDS = 1.5
"""How long to wait for an address that may not answer at all."""
PAIR_SECONDS = 8.0
"""The same for one that should: long enough for the first packets through a tunnel, which may be lost."""
ANSWERS = ("open", "refused")
"""A refusal is an answer, too: nobody listens there yet."""


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
    """The facts, each with where the other members answered the host."""
    members = {member.name: member for member in members_of(spec)}
    sites = {name: members[name].site for name in facts}
    addresses = to_try(facts, sites, reached_addresses(fleet))

    def ports(name: str) -> tuple[int, ...]:
        # Where somebody most likely answers. The port that we came by may be a router's.
        return tuple(dict.fromkeys((SSH_PORT, members[name].port or SSH_PORT, spec.network.port)))

    async def look(name: str) -> dict[str, str]:
        tries = [
            (other, address)
            for other, some in addresses.items()
            for address in some
            if other != name and worth_trying(facts[name], sites[name], sites[other], address)
        ]
        targets = [(address, port) for other, address in tries for port in ports(other)]
        answers = iter(await (await fleet.agent(name)).reach(targets, LOOK_SECONDS))
        found: dict[str, str] = {}
        for other, address in tries:
            said = [next(answers) for _ in ports(other)]
            # Between sites a refusal may be a router's.
            if "open" in said or ("refused" in said and sites[name] == sites[other]):
                found.setdefault(other, address)
        return found

    seen = await fleet.each(facts, look)
    return {name: replace(fact, reaches=seen.get(name, {})) for name, fact in facts.items()}


async def unconnected(spec: Spec, addresses: Mapping[str, str], fleet: Fleet, names: Iterable[str]) -> list[Finding]:
    """Every host that others cannot reach on the cluster's network, where Slurm's messages go."""
    controller = next(iter(members_of(spec))).name
    present = [name for name in names if name in addresses and name not in fleet.failures]

    def target(name: str) -> tuple[str, int]:
        return addresses[name], SLURMCTLD_PORT if name == controller else SLURMD_PORT

    async def look(name: str) -> dict[str, str]:
        others = [other for other in present if other != name]
        answers = await (await fleet.agent(name)).reach([target(other) for other in others], PAIR_SECONDS)
        return {other: said for other, said in zip(others, answers, strict=True) if said not in ANSWERS}

    missing = await fleet.each(present, look)
    findings = []
    for name in present:
        why = {other: lost[name] for other, lost in missing.items() if name in lost}
        if not why:
            continue
        address, port = target(name)
        said = ", ".join(dict.fromkeys("no answer" if text == "silent" else text for text in why.values()))
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
