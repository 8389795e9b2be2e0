"""`shoal up` and `shoal plan`: bring the cluster to what the file says, or show what that would take."""

from __future__ import annotations

import ipaddress
from collections.abc import Mapping
from dataclasses import dataclass, field, replace

from shoal.errors import HostError, ShoalError
from shoal.plan.apply import Applied, Patience, apply, ending
from shoal.plan.diff import creation_plan, make_plan
from shoal.plan.fleet import Fleet
from shoal.plan.model import Cost, Plan
from shoal.plan.observe import Observed, observe
from shoal.providers.api import Instance, Request
from shoal.spec.finding import Finding
from shoal.verbs.context import Context, cannot_make, telling


@dataclass(frozen=True)
class UpResult:
    """What `up` came to."""

    cluster: str
    created: tuple[str, ...] = ()
    changed: tuple[str, ...] = ()
    removed: tuple[str, ...] = ()
    staying: tuple[str, ...] = ()
    unready: tuple[tuple[str, str], ...] = ()
    failures: Mapping[str, HostError] = field(default_factory=dict)
    findings: tuple[Finding, ...] = ()

    @property
    def unchanged(self) -> bool:
        return not (self.created or self.changed or self.removed)

    @property
    def whole(self) -> bool:
        return not (self.failures or self.unready or self.staying)


async def plan(context: Context) -> Plan:
    """The changes that `up` would make. Changes nothing."""
    missing, orphans = await _instances(context)
    absent = {request.name for _, request in missing}
    if context.controller.name in absent:
        return creation_plan(context.cluster, missing, orphans)
    async with await context.fleet(member for member in context.members if member.name not in absent) as fleet:
        observed = await _look(context, fleet)
        planned = await make_plan(context.spec, observed, fleet, reached_addresses(fleet), orphans)
        return replace(planned, create=tuple(missing))


async def up(context: Context, patience: Patience | None = None, *, allow_job_loss: bool = False) -> UpResult:
    """Make missing hosts, bring all hosts to what the spec says, and wait until Slurm sees every node."""
    missing, orphans = await _instances(context)
    if missing:
        await _create(context, missing)
    async with await context.fleet() as fleet:
        observed = await _look(context, fleet)
        with context.progress.phase("compare", len(fleet.live)) as phase:
            planned = await make_plan(
                context.spec, observed, fleet, reached_addresses(fleet), orphans, on_done=ending(phase)
            )
        _refuse_job_loss(planned, allow_job_loss)
        nodes = [member.name for member in context.members if "compute" in member.roles]
        applied = await apply(planned, fleet, context.controller.name, nodes, context.progress, patience or Patience())
        removed = () if applied.staying else await _remove(context, planned, applied)
        return UpResult(
            cluster=context.cluster,
            created=tuple(request.name for _, request in missing),
            changed=applied.changed,
            removed=removed,
            staying=applied.staying,
            unready=applied.unready,
            failures=dict(fleet.failures),
            findings=(*context.warnings, *planned.findings),
        )


async def _instances(context: Context) -> tuple[list[tuple[str, Request]], list[tuple[str, Instance]]]:
    """Hosts that are still to be made, and instances that the spec no longer names."""
    made = await context.instances()
    members = {member.name: member for member in context.members}
    missing = [
        (member.provider, Request(member.name, member.shape))
        for member in members.values()
        if member.provider and (member.name not in made or made[member.name][1].state in ("stopped", "starting"))
    ]
    orphans = [found for name, found in made.items() if name not in members or members[name].provider != found[0]]
    return missing, orphans


async def _create(context: Context, missing: list[tuple[str, Request]]) -> None:
    for name in dict.fromkeys(provider for provider, _ in missing):
        provider = context.providers(name)
        wanted = [request for at, request in missing if at == name]
        problems = [finding for finding in provider.check(wanted) if finding.level == "error"]
        if problems:
            raise cannot_make(name, problems)
        with context.progress.phase(f"{name} hosts", 1) as phase:
            await provider.create(context.cluster, wanted, telling(phase))


async def _look(context: Context, fleet: Fleet) -> Observed:
    controller = context.controller.name
    with context.progress.phase("connect and look", len(fleet.targets)) as phase:
        observed = await observe(fleet, context.spec, ending(phase))
    if controller in fleet.failures:
        raise fleet.failures[controller]
    return observed


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


def _refuse_job_loss(planned: Plan, allowed: bool) -> None:
    if planned.cost is Cost.JOBS and planned.loses and not allowed:
        raise ShoalError(
            f"this change would end jobs ({', '.join(planned.loses)}); nothing was changed",
            hint="wait for them, or say --allow-job-loss",
        )


async def _remove(context: Context, planned: Plan, applied: Applied) -> tuple[str, ...]:
    for name in dict.fromkeys(provider for provider, _ in planned.delete):
        gone = [host for at, host in planned.delete if at == name]
        with context.progress.phase(f"{name} hosts removed", 1) as phase:
            await context.providers(name).delete(context.cluster, gone, telling(phase))
    return tuple(dict.fromkeys((*planned.drain, *(host for _, host in planned.delete))))
