"""A new key in the tailnet for every host: what `shoal keys rotate tailscale` does."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from shoal.agent.client import Ask
from shoal.agent.facts import Facts
from shoal.errors import AgentFailed, UsageError
from shoal.network.tailscale import read_status
from shoal.plan.apply import ending
from shoal.plan.fleet import Fleet
from shoal.plan.progress import Phase, Progress
from shoal.plan.secrets import secrets_for
from shoal.roles.tailscale import JOINED, join
from shoal.spec.members import members as members_of
from shoal.spec.model import Spec

ASK = Ask(files={JOINED: "text"}, tailscale=True)


@dataclass(frozen=True)
class TailscaleRotation:
    """What came of it. Hosts that failed are in the fleet's failures."""

    hosts: tuple[str, ...]
    """Those that have a new key and were seen in the tailnet with it."""
    expires: Mapping[str, float | None] = field(default_factory=dict)
    """When each key ends; None where it does not."""
    moved: Mapping[str, str] = field(default_factory=dict)
    """Hosts that came back under another address: `shoal up` tells the others."""


async def rotate_tailscale(spec: Spec, fleet: Fleet, progress: Progress) -> TailscaleRotation:
    """Log every host in anew, the controller last, and see that each is back where it was.

    Connections live on meanwhile. Hosts do not depend on each other here: after an interruption the next run simply
    does all of them again.
    """
    if spec.network.kind != "tailscale":
        raise UsageError(f"the network of {spec.cluster} is {spec.network.kind}, which has no keys of Tailscale's")
    if spec.network.auth_key is None:
        raise UsageError(
            "the file names no auth key with which hosts could log in",
            hint="add `auth_key: env:TS_AUTHKEY` to `network`, or run `tailscale up --force-reauth` on each host",
        )
    members = {member.name: member for member in members_of(spec)}
    controller = next(iter(members))
    before: dict[str, Facts] = await fleet.each(fleet.live, lambda name: _look(fleet, name))
    documents = {name: join(spec, members[name], facts, again=True) for name, facts in before.items()}
    secrets = await secrets_for(documents.values(), {}, {"network.auth_key": spec.network.auth_key}, fleet)
    after: dict[str, Facts] = {}
    with progress.phase("keys of the tailnet", len(documents)) as phase:

        async def one(name: str, phase: Phase = phase) -> Facts:
            agent = await fleet.agent(name)
            report = await agent.apply(documents[name], secrets, lambda event: phase.say(name, event.text))
            report.raise_failed(name, "shoal keys rotate tailscale")
            return await _look(fleet, name)

        for names in ([name for name in documents if name != controller], [controller]):
            after |= await fleet.each([name for name in names if name in documents], one, ending(phase))
    old, new = ({name: read_status(facts.tailscale) for name, facts in some.items()} for some in (before, after))
    return TailscaleRotation(
        hosts=tuple(after),
        expires={name: tailnet.own.expires for name, tailnet in new.items()},
        moved={name: found.address for name, found in new.items() if old[name].address not in ("", found.address)},
    )


async def _look(fleet: Fleet, name: str) -> Facts:
    facts = await (await fleet.agent(name)).facts(ASK)
    tailnet = read_status(facts.tailscale)
    if not facts.tailscale or tailnet.problem:
        raise AgentFailed(
            name, f"Tailscale does not answer there: {tailnet.problem or 'there is none'}", hint="run `shoal up`"
        )
    return facts
