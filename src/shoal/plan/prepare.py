"""Prepare: what hosts must be before a plan can be made at all, such as a key for the network that others must know."""

from __future__ import annotations

from collections.abc import Mapping

from shoal.agent.client import ItemEvent, Report
from shoal.agent.document import Document
from shoal.agent.facts import Facts
from shoal.plan.fleet import Fleet
from shoal.plan.model import Change
from shoal.plan.progress import Phase, Progress
from shoal.plan.secrets import secrets_for
from shoal.roles.parts import given_secrets, kept_secrets, preparation
from shoal.spec.members import members as members_of
from shoal.spec.model import Spec


async def preparations(spec: Spec, facts: Mapping[str, Facts], fleet: Fleet) -> dict[str, tuple[Change, ...]]:
    """What is still to be prepared, by host. Changes nothing."""
    documents = _documents(spec, facts)

    async def dry_run(name: str) -> Report:
        return await (await fleet.agent(name)).check(documents[name])

    reports = await fleet.each(documents, dry_run) if documents else {}
    changes = {
        name: tuple(
            Change(name, item.key, item.action or f"cannot be done: {item.detail}")
            for item in report.items
            if item.status != "ok"
        )
        for name, report in reports.items()
    }
    return {name: some for name, some in changes.items() if some}


async def prepare(spec: Spec, facts: Mapping[str, Facts], fleet: Fleet, progress: Progress) -> tuple[str, ...]:
    """Prepare the hosts that need it, and return their names: what they are has changed since it was observed."""
    due = await preparations(spec, facts, fleet)
    if not due:
        return ()
    documents = _documents(spec, facts)
    secrets = await secrets_for([documents[name] for name in due], kept_secrets(spec), given_secrets(spec), fleet)
    with progress.phase("network keys", len(due)) as phase:

        async def converge(name: str, phase: Phase = phase) -> Report:
            def tell(event: ItemEvent) -> None:
                if event.text:
                    phase.say(name, event.text)

            report = await (await fleet.agent(name)).apply(documents[name], secrets, tell)
            report.raise_failed(name, "shoal up")
            return report

        await fleet.each(
            due, converge, lambda outcome: phase.done(outcome.name, outcome.error.cause if outcome.error else "")
        )
    return tuple(due)


def _documents(spec: Spec, facts: Mapping[str, Facts]) -> dict[str, Document]:
    wanted = {
        member.name: preparation(spec, member, facts[member.name])
        for member in members_of(spec)
        if member.name in facts
    }
    return {name: document for name, document in wanted.items() if document}
