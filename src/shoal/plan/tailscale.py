"""A new key in the tailnet for every host: what `shoal keys rotate tailscale` does."""

from __future__ import annotations

from collections.abc import Sequence

from shoal.agent.client import Ask
from shoal.agent.facts import Facts
from shoal.errors import AgentFailed
from shoal.network.tailscale import read_status
from shoal.plan.fleet import Fleet
from shoal.plan.progress import Phase
from shoal.plan.secrets import secrets_for
from shoal.roles.tailscale import JOINED, SECRET, join
from shoal.spec.members import members as members_of
from shoal.spec.model import Spec

ASK = Ask(files={JOINED: "text"}, tailscale=True)
AGAIN = "shoal keys rotate tailscale"


async def rotate_tailscale(spec: Spec, fleet: Fleet, controller: str, hosts: Sequence[str], phase: Phase) -> None:
    """Log hosts in again, the controller last, and see that each is back where it was. Connections live on meanwhile.

    Those that fail are among the fleet's failures. Hosts do not depend on each other here: after an interruption the
    next run simply does all of them again.
    """
    assert spec.network.auth_key is not None
    members = {member.name: member for member in members_of(spec)}
    before = await fleet.each(hosts, lambda name: _look(fleet, name))
    documents = {name: join(spec, members[name], facts, again=True) for name, facts in before.items()}
    secrets = await secrets_for(documents.values(), {}, {SECRET: spec.network.auth_key}, fleet)

    async def one(name: str) -> None:
        await fleet.converge(name, documents[name], secrets, phase, AGAIN)
        old, new = read_status(before[name].tailscale), read_status((await _look(fleet, name)).tailscale)
        if not new.running:
            found = new.problem or new.state
            raise AgentFailed(name, f"is not in the tailnet with its new key: {found}", hint=f"run `{AGAIN}` again")
        if old.address not in ("", new.address):
            moved = f"came back into the tailnet as {new.address}; it was {old.address}"
            raise AgentFailed(name, moved, hint="run `shoal up`, which tells the others")
        phase.done(name)

    await fleet.each([name for name in documents if name != controller], one)
    await fleet.each([name for name in documents if name == controller], one)


async def _look(fleet: Fleet, name: str) -> Facts:
    facts = await (await fleet.agent(name)).facts(ASK)
    problem = read_status(facts.tailscale).problem if facts.tailscale else "there is none"
    if problem:
        raise AgentFailed(name, f"Tailscale does not answer there: {problem}", hint="run `shoal up`")
    return facts
