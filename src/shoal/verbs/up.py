"""`shoal up` and `shoal plan`: bring the cluster to what the file says, or show what that would take."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace

from shoal.errors import HostError, ProviderError, ShoalError
from shoal.hostlist import compress
from shoal.plan.apply import Patience, apply, ending
from shoal.plan.diff import creation_plan, make_plan, network_addresses
from shoal.plan.fleet import Fleet
from shoal.plan.model import Cost, Plan
from shoal.plan.observe import Observed, observe
from shoal.plan.prepare import preparations, prepare
from shoal.plan.reachability import reached_addresses, unconnected
from shoal.plan.secrets import not_at_hand, refuse, wanting
from shoal.plan.shapes import shape_findings
from shoal.providers.api import Instance, Request
from shoal.roles.accounting import left_records
from shoal.roles.forgotten import Forgotten, forgotten, forgotten_finding, given_up
from shoal.roles.parts import given_secrets
from shoal.roles.shares import moved
from shoal.spec.finding import Finding
from shoal.spec.rented import rented_sets
from shoal.verbs.context import Context, cannot_make, computing, telling
from shoal.verbs.held_machines import Held, held, strike_off
from shoal.verbs.move_controller import note, predecessor, succeed
from shoal.verbs.shares import unservable


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
    again: str = "shoal up"
    """The command that goes on from here when something is left to do."""

    @property
    def unchanged(self) -> bool:
        return not (self.created or self.changed or self.removed)

    @property
    def whole(self) -> bool:
        return not (self.failures or self.unready or self.staying)


@dataclass(frozen=True)
class Survey:
    """How what providers have made differs from what the spec asks of them."""

    missing: tuple[tuple[str, Request], ...] = ()
    """Hosts that are still to be made or started, each with the name of its provider."""
    orphans: tuple[tuple[str, Instance], ...] = ()
    """Instances that the spec no longer names."""
    new: tuple[str, ...] = ()
    """Those of the missing that no provider has in any state."""
    findings: tuple[Finding, ...] = ()


async def plan(context: Context) -> Plan:
    """The changes that `up` would make. Changes nothing."""
    stock = await survey(context)
    absent = {request.name for _, request in stock.missing}
    if context.controller.name in absent:
        return replace(creation_plan(context.cluster, stock.missing, stock.orphans), findings=stock.findings)
    async with await context.fleet(member for member in context.members if member.name not in absent) as fleet:
        observed = await _look(context, fleet)
        first = await preparations(context.spec, observed.facts, fleet)
        planned = await make_plan(context.spec, observed, fleet, reached_addresses(fleet), stock.orphans)
        return replace(
            planned,
            create=stock.missing,
            prepare=tuple(change for changes in first.values() for change in changes),
            findings=(*stock.findings, *planned.findings),
        )


async def up(
    context: Context,
    patience: Patience | None = None,
    *,
    allow_job_loss: bool = False,
    leave_rented: bool = False,
    leave_records: bool = False,
) -> UpResult:
    """Make missing hosts, bring all hosts to what the spec says, and wait until Slurm sees every node."""
    stock = await survey(context)
    if context.controller.name in stock.new:
        refuse(not_at_hand(given_secrets(context.spec)))
    not_made = await _create(context, stock.missing)
    async with await context.fleet(member for member in context.members if member.name not in not_made) as fleet:
        fleet.failures.update(not_made)
        observed = await _look(context, fleet)
        left = _forgotten(context, observed, leave_rented)
        _refuse_left_records(context, observed, leave_records)
        _refuse_moved_shares(context, observed)
        former, alone = await predecessor(context, fleet, observed, end_jobs=allow_job_loss, leave=leave_rented)
        await _refuse_wanting(context, fleet, observed)
        prepared = await prepare(context.spec, observed.facts, fleet, context.progress)
        if prepared:
            observed = await _look(context, fleet)
        with context.progress.phase("compare", len(fleet.live)) as phase:
            planned = await make_plan(
                context.spec, observed, fleet, reached_addresses(fleet), stock.orphans, on_done=ending(phase)
            )
        _refuse_job_loss(planned, allow_job_loss)
        if former:
            await succeed(context, fleet, former)
        nodes, patience = computing(context), patience or Patience()
        applied = await apply(planned, fleet, context.controller.name, nodes, context.progress, patience)
        note(context, fleet)
        await strike_off(context, left)
        meanwhile = await _ordered_meanwhile(context, observed)
        lost = await _in_the_way(context, fleet, observed) if applied.changed else []
        removed = () if applied.staying else await _remove(context, planned)
        return UpResult(
            cluster=context.cluster,
            created=tuple(request.name for _, request in stock.missing if request.name not in not_made),
            changed=tuple(dict.fromkeys((*prepared, *applied.changed))),
            removed=removed,
            staying=applied.staying,
            unready=applied.unready,
            failures=dict(fleet.failures),
            findings=(*context.warnings, *stock.findings, *planned.findings, *alone, *meanwhile, *lost),
        )


def _forgotten(context: Context, observed: Observed, allowed: bool) -> dict[Held, float]:
    """Rented machines that nobody could give back any more: refused before any host is changed.

    Who leaves them sees to them without us: they are struck off once the service no longer has their account.
    """
    name = context.controller.name
    machines = forgotten(context.spec, observed.facts.get(name))
    if machines and not allowed:
        finding = forgotten_finding(context.spec, machines, name)
        raise ProviderError(
            f"{finding.what}: {finding.found}; no host was changed",
            hint=f"{finding.fix}; or use --leave-rented, and see to them in the provider's console",
        )
    return {Held(one.token, one.node, one.account, one.id, one.state, 0.0): 0.0 for one in machines}


def _refuse_left_records(context: Context, observed: Observed, allowed: bool) -> None:
    finding = left_records(context.spec, observed.facts)
    if finding and not allowed:
        raise ShoalError(
            f"{finding.host}: {finding.what}; nothing was changed", hint=f"use --leave-records; {finding.fix}"
        )


def _refuse_moved_shares(context: Context, observed: Observed) -> None:
    for finding in moved(context.spec, observed.facts):
        raise ShoalError(f"{finding.host}: {finding.what}; nothing was changed", hint=finding.fix)


async def _ordered_meanwhile(context: Context, observed: Observed) -> list[Finding]:
    """Machines that the service ordered after it was looked at, with an account that it no longer has as it was.

    What it ordered since it was started again is of the account as it is.
    """
    name, named = context.controller.name, context.spec.providers
    lost = given_up(context.spec, observed.facts.get(name))
    if not lost:
        return []
    kept = named.keys() - lost if rented_sets(context.spec) else frozenset()
    known = [one for one in await held(context) or () if one.live and not one.of_now and one.account not in kept]
    machines = [Forgotten(one.token, one.node, one.account, one.id, one.state) for one in known]
    return [forgotten_finding(context.spec, machines, name)] if machines else []


async def _refuse_wanting(context: Context, fleet: Fleet, observed: Observed) -> None:
    """Secrets that hosts are to have and nobody can give them now: said before anything is prepared."""
    if not_at_hand(given_secrets(context.spec)):
        planned = await make_plan(context.spec, observed, fleet, reached_addresses(fleet))
        refuse(wanting((*planned.hosts, *planned.after_drain), planned.given))


async def _in_the_way(context: Context, fleet: Fleet, observed: Observed) -> list[Finding]:
    """Members that others cannot reach and shares that nobody is served, looked for whenever something has changed."""
    with context.progress.phase("members reach each other", 1):
        addresses = network_addresses(context.spec, observed, reached_addresses(fleet))
        found = await unconnected(context.spec, addresses, fleet, observed.facts)
    shares = await unservable(context.spec, observed.facts, fleet)
    return [*found, *(finding for finding in shares if finding.level == "error")]


async def survey(context: Context) -> Survey:
    """Ask every provider what it has for this cluster."""
    holdings = await context.holdings()
    ours = {(member.provider, member.name) for member in context.members}
    made = {instance.name: instance for provider, instance in holdings.found if (provider, instance.name) in ours}
    missing = tuple(
        (member.provider, Request(member.name, member.shape))
        for member in context.members
        if member.provider and (member.name not in made or made[member.name].state in ("stopped", "starting"))
    )
    orphans = tuple(
        (provider, instance) for provider, instance in holdings.found if (provider, instance.name) not in ours
    )
    shapes = shape_findings(context.members, {name: instance.shape for name, instance in made.items()})
    new = tuple(request.name for _, request in missing if request.name not in made)
    return Survey(missing, orphans, new, (*holdings.findings, *shapes))


async def _create(context: Context, missing: Sequence[tuple[str, Request]]) -> dict[str, HostError]:
    """Make hosts. Those that could not be made are told, each with the reason; they do not stop the others."""
    failed: dict[str, HostError] = {}
    for name in dict.fromkeys(provider for provider, _ in missing):
        provider = context.providers(name)
        wanted = [request for at, request in missing if at == name]
        problems = [finding for finding in provider.check(wanted) if finding.level == "error"]
        if problems:
            raise cannot_make(name, problems)
        with context.progress.phase(f"{name} hosts", 1) as phase:
            try:
                await provider.create(context.cluster, wanted, telling(phase))
            except ProviderError as error:
                if not error.hosts:
                    raise
                failed |= {
                    host: HostError(host, f"{name} could not make it: {why}", hint=error.hint)
                    for host, why in error.hosts.items()
                }
    return failed


async def _look(context: Context, fleet: Fleet) -> Observed:
    controller = context.controller.name
    with context.progress.phase("connect and look", len(fleet.targets)) as phase:
        observed = await observe(fleet, context.spec, ending(phase))
    fleet.require(controller)
    return observed


def _refuse_job_loss(planned: Plan, allowed: bool) -> None:
    if planned.unasked and not allowed:
        raise ShoalError(
            f"{compress(planned.unasked)} would be deleted, and the new controller cannot say which jobs run there; "
            "nothing was changed",
            hint="`shoal down` the cluster as it was first, give this one another name, or use --allow-job-loss",
        )
    if planned.cost is Cost.JOBS and planned.loses and not allowed:
        raise ShoalError(
            f"this change would end jobs ({', '.join(planned.loses)}); nothing was changed",
            hint="wait for them, or use --allow-job-loss",
        )


async def _remove(context: Context, planned: Plan) -> tuple[str, ...]:
    for name in dict.fromkeys(provider for provider, _ in planned.delete):
        gone = [host for at, host in planned.delete if at == name]
        provider = context.providers(name)
        with context.progress.phase(f"{name} hosts removed", 1) as phase:
            if name in context.provider_names():
                await provider.delete(context.cluster, gone, telling(phase))
            else:  # then `down` will not think of it either
                await provider.destroy(context.cluster, telling(phase))
    return tuple(dict.fromkeys((*planned.drain, *(host for _, host in planned.delete))))
