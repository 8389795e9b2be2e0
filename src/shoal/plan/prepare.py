"""Prepare: what hosts must be before a plan can be made at all, such as a key for the network that others must know."""

from __future__ import annotations

from collections.abc import Mapping

from shoal.agent.client import Report
from shoal.agent.document import Document
from shoal.agent.facts import Facts
from shoal.plan.apply import ending
from shoal.plan.diff import changes_of
from shoal.plan.fleet import Fleet
from shoal.plan.model import Change
from shoal.plan.progress import Progress
from shoal.plan.secrets import secrets_for
from shoal.roles.parts import given_secrets, kept_secrets, preparation
from shoal.spec.members import all_members
from shoal.spec.model import Spec


async def preparations(spec: Spec, facts: Mapping[str, Facts], fleet: Fleet) -> dict[str, tuple[Change, ...]]:
    """What is still to be prepared, by host. Changes nothing."""
    return await _changes(_documents(spec, facts), fleet)


async def prepare(spec: Spec, facts: Mapping[str, Facts], fleet: Fleet, progress: Progress) -> tuple[str, ...]:
    """Prepare the hosts that need it, and return their names: what they are has changed since it was observed."""
    documents = _documents(spec, facts)
    due = await _changes(documents, fleet)
    if not due:
        return ()
    secrets = await secrets_for([documents[name] for name in due], kept_secrets(spec), given_secrets(spec), fleet)
    with progress.phase("preparation", len(due)) as phase:

        async def converge(name: str) -> Report:
            return await fleet.converge(name, documents[name], secrets, phase)

        await fleet.each(due, converge, ending(phase))
    return tuple(due)


async def _changes(documents: Mapping[str, Document], fleet: Fleet) -> dict[str, tuple[Change, ...]]:
    async def dry_run(name: str) -> Report:
        return await (await fleet.agent(name)).check(documents[name])

    reports = await fleet.each(documents, dry_run) if documents else {}
    changes = {name: changes_of(name, report) for name, report in reports.items()}
    return {name: some for name, some in changes.items() if some}


def _documents(spec: Spec, facts: Mapping[str, Facts]) -> dict[str, Document]:
    wanted = {
        member.name: preparation(spec, member, facts[member.name], facts)
        for member in all_members(spec)
        if member.name in facts
    }
    return {name: document for name, document in wanted.items() if document}
