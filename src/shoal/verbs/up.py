"""`shoal up` and `shoal plan`: make the cluster match the file, or show the changes that this needs."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from contextlib import nullcontext
from dataclasses import dataclass, field, replace
from functools import partial

from shoal.agent.facts import Facts
from shoal.cloud.rental import Rental
from shoal.errors import HostError, ProviderError, ShoalError
from shoal.hostlist import compress
from shoal.hosts.provider import HostQuote, Instance, Request
from shoal.plan.apply import ApplyTimeouts, apply, preparations, prepare
from shoal.plan.cluster_findings import image_version, member_version_findings, reject_record_loss, state_finding
from shoal.plan.connections import Fleet
from shoal.plan.diff import cluster_goal, make_plan, network_addresses, reject_versions
from shoal.plan.model import Cost, Plan, shape_findings
from shoal.plan.observe import Observation, observe
from shoal.plan.ownership import (
    ForeignHost,
    foreign_hosts,
    reject_foreign,
    reject_hosts,
    take_over_hosts,
    unusable_host_findings,
    without_other_clusters,
)
from shoal.plan.reachability import connection_addresses, unreachable_findings
from shoal.plan.secret_values import missing_secrets, require_secrets, unavailable_secrets
from shoal.roles.accounting import moved_database_finding
from shoal.roles.assembly import slurm_version
from shoal.roles.files import reject_missing_scripts
from shoal.roles.orphaned_rentals import dropped_accounts, orphan_finding, orphaned_rentals
from shoal.roles.registry import user_secrets
from shoal.roles.shares import moved_share_findings
from shoal.roles.slurm_tree import uses_tree
from shoal.roles.user_ids import choose_user_ids, user_id_conflicts
from shoal.spec.finding import Finding
from shoal.spec.members import rented_sets
from shoal.verbs.context import Context, cannot_make, compute_hosts, note_at_exit, report_to
from shoal.verbs.provider_accounts import release_findings
from shoal.verbs.rebuild import rebuild_findings, record_controller
from shoal.verbs.rentals import ledger_rentals, record_ended
from shoal.verbs.rented_costs import (
    change_findings,
    price_findings,
    quote_hosts,
    quotes_text,
    rented_versions,
    require_consent,
)
from shoal.verbs.shares import unservable_share_findings

DEFAULT_TIMEOUTS = ApplyTimeouts()


@dataclass(frozen=True)
class UpResult:
    """The outcome of `shoal up`."""

    cluster: str
    created: tuple[str, ...] = ()
    changed: tuple[str, ...] = ()
    removed: tuple[str, ...] = ()
    staying: tuple[str, ...] = ()
    unready: tuple[tuple[str, str], ...] = ()
    failures: Mapping[str, HostError] = field(default_factory=dict)
    findings: tuple[Finding, ...] = ()
    again: str = "shoal up"
    """The command to run when something is left to do."""

    @property
    def unchanged(self) -> bool:
        return not (self.created or self.changed or self.removed)

    @property
    def whole(self) -> bool:
        return not (self.failures or self.unready or self.staying)


@dataclass(frozen=True)
class Survey:
    """How the instances that providers made differ from the spec."""

    missing: tuple[tuple[str, Request], ...] = ()
    """Hosts to be made or started, each with the name of its provider."""
    orphans: tuple[tuple[str, Instance], ...] = ()
    """Instances that the spec no longer names."""
    new: tuple[str, ...] = ()
    """The missing hosts that no provider has in any state."""
    images: Mapping[str, str] = field(default_factory=dict)
    """The images of the hosts that were made, by name."""
    findings: tuple[Finding, ...] = ()


async def plan(context: Context, *, take_over: bool = False) -> Plan:
    """The changes that `up` would make. Changes nothing."""
    stock = await survey(context)
    await _check_before_creation(context, stock, take_over)
    missing_names = {request.name for _, request in stock.missing}
    quotes = await rental_quotes(context, stock)
    if context.controller.name in missing_names:
        deletions = tuple((provider, instance.name) for provider, instance in stock.orphans)
        findings = (*stock.findings, *price_findings(quotes))
        return Plan(context.cluster, create=stock.missing, rent=quotes, delete=deletions, findings=findings)
    async with await context.fleet(member for member in context.members if member.name not in missing_names) as fleet:
        observed = await _observe(context, fleet)
        others, observed, _ = await _accept_hosts(context, stock, fleet, observed, take_over)
        preparation_changes = await preparations(context.spec, observed.facts, fleet)
        cluster_plan = await make_plan(context.spec, observed, fleet, connection_addresses(fleet), stock.orphans)
        return replace(
            cluster_plan,
            create=stock.missing,
            rent=quotes,
            take_over=tuple(host.change() for host in others),
            prepare=tuple(change for changes in preparation_changes.values() for change in changes),
            findings=(
                *stock.findings,
                *price_findings(quotes),
                *(host.finding(take_over) for host in others),
                *cluster_plan.findings,
            ),
        )


async def up(
    context: Context,
    timeouts: ApplyTimeouts = DEFAULT_TIMEOUTS,
    *,
    allow_job_loss: bool = False,
    leave_rented: bool = False,
    leave_records: bool = False,
    take_over: bool = False,
    rent: bool = False,
) -> UpResult:
    """Make missing hosts, apply the spec to all hosts, and wait until Slurm sees every node.

    With `rent`, the operator has accepted what rented hosts cost.
    """
    for finding in await release_findings(context.spec):
        raise ProviderError(f"{finding.what}; nothing was changed", hint=finding.fix)
    stock = await survey(context)
    if context.controller.name in stock.new:
        require_secrets(unavailable_secrets(user_secrets(context.spec)))
    await _check_before_creation(context, stock, take_over, leave_rented)
    require_consent(context.spec, await rental_quotes(context, stock), rent)
    create_failures = await _create(context, stock.missing)
    async with await context.fleet(member for member in context.members if member.name not in create_failures) as fleet:
        fleet.failures.update(create_failures)
        observed = await _observe(context, fleet)
        others, observed, warnings = await _accept_hosts(context, stock, fleet, observed, take_over, leave_rented)
        _reject_unwritable_state(context, observed)
        orphans = _require_no_orphans(context, observed, leave_rented)
        _reject_moves(context, observed, leave_records)
        _reject_id_conflicts(context, observed)
        reject_missing_scripts(context.spec, observed.facts)
        await _require_secrets(context, fleet, observed)
        if others:
            cluster_goal(context.spec, observed, connection_addresses(fleet))  # raises before anything is taken
            await take_over_hosts(others, fleet, context.progress)
            observed = await _observe(context, fleet)
        prepared_names = await prepare(context.spec, observed.facts, fleet, context.progress)
        if prepared_names:
            observed = await _observe(context, fleet)
        with context.progress.phase("compare", len(fleet.live)) as phase:
            addresses = connection_addresses(fleet)
            cluster_plan = await make_plan(context.spec, observed, fleet, addresses, stock.orphans, phase)
        reject_record_loss(cluster_plan.findings, leave_records)
        _reject_job_loss(cluster_plan, allow_job_loss)
        nodes = compute_hosts(context)
        record_controller(context, fleet, observed.facts[context.controller.name])  # a run that is killed may rent too
        result = await apply(cluster_plan, fleet, context.controller.name, nodes, context.progress, timeouts)
        await record_ended(context, ((rental, 0.0) for rental in orphans))
        late_orphans = await _late_orphans(context, observed)
        problems = await _network_problems(context, fleet, observed) if result.changed else []
        removed_names = () if result.staying else await _remove(context, cluster_plan)
        return UpResult(
            cluster=context.cluster,
            created=tuple(request.name for _, request in stock.missing if request.name not in create_failures),
            changed=tuple(dict.fromkeys((*(host.name for host in others), *prepared_names, *result.changed))),
            removed=removed_names,
            staying=result.staying,
            unready=result.unready,
            failures=dict(fleet.failures),
            findings=(*context.warnings, *stock.findings, *cluster_plan.findings, *warnings, *late_orphans, *problems),
        )


async def _check_before_creation(context: Context, stock: Survey, take_over: bool, leave_rented: bool = False) -> None:
    """Raise before hosts are created where hosts that exist cannot become members, where the cluster has another
    controller, or where the hosts' Slurm versions cannot talk to each other."""
    if not stock.missing:
        return
    missing_names = {request.name for _, request in stock.missing}
    async with await context.fleet(member for member in context.members if member.name not in missing_names) as fleet:
        observed = await observe(fleet, context.spec, reachability=False)
        await _accept_hosts(context, stock, fleet, observed, take_over, leave_rented)
    reject_versions(creation_version_findings(context, stock, observed.facts))


async def _accept_hosts(
    context: Context, stock: Survey, fleet: Fleet, observed: Observation, take_over: bool, leave_rented: bool = False
) -> tuple[tuple[ForeignHost, ...], Observation, tuple[Finding, ...]]:
    """Raise for hosts that cannot become members as they are, and for what the cluster keeps and the file changes.

    Returns the hosts to take over, the observation without what their clusters left, and warnings.
    """
    kept = await rebuild_findings(context, stock, fleet, observed, leave=leave_rented)
    reject_hosts(finding for finding in kept if finding.level == "error")
    others = await foreign_hosts(context.spec, observed, fleet)
    reject_foreign(others, take_over)
    observed = without_other_clusters(observed, others)
    reject_hosts(await unusable_host_findings(context.spec, observed, fleet))
    return others, observed, kept


def creation_version_findings(context: Context, stock: Survey, facts: Mapping[str, Facts]) -> list[Finding]:
    """Members whose Slurm versions cannot talk to each other: those of images, and of hosts that exist."""
    if uses_tree(context.spec):
        return []  # one release for all
    made = [member for member in context.members if member.provider and not member.machine]
    images = {member.name: member.shape.image for member in made} | {**stock.images}
    versions = {name: version for name, image in images.items() if (version := image_version(image)) is not None}
    versions |= rented_versions(context.spec, context.members)
    versions |= {name: version for name, fact in facts.items() if (version := slurm_version(fact)) is not None}
    return member_version_findings(context.spec, versions)


def _require_no_orphans(context: Context, observed: Observation, allowed: bool) -> tuple[Rental, ...]:
    """Raise ProviderError where the new file would leave rented machines that nothing can release.

    With `allowed` they are returned, to be removed from the ledger once the service lost their provider account.
    """
    name = context.controller.name
    orphans = orphaned_rentals(context.spec, observed.facts.get(name))
    if orphans and not allowed:
        finding = orphan_finding(context.spec, orphans, name)
        raise ProviderError(
            f"{finding.what}: {finding.found}; no host was changed",
            hint=f"{finding.fix}; or use --leave-rented, and delete them in the provider's console",
        )
    return orphans


def _reject_unwritable_state(context: Context, observed: Observation) -> None:
    """Raise where slurmctld could not write its state: a restart would lose jobs."""
    finding = state_finding(context.controller.name, observed.facts[context.controller.name])
    if finding:
        raise ShoalError(f"{finding.host}: {finding.what}: {finding.found}; nothing was changed", hint=finding.fix)


def _reject_moves(context: Context, observed: Observation, leave_records: bool) -> None:
    """Raise where records of jobs or files of a share would stay behind on another host."""
    records = None if leave_records else moved_database_finding(context.spec, observed.facts)
    if records:
        records = replace(records, fix=f"use --leave-records; {records.fix}")
    for finding in filter(None, (records, *moved_share_findings(context.spec, observed.facts))):
        raise ShoalError(f"{finding.host}: {finding.what}; nothing was changed", hint=finding.fix)


def _reject_id_conflicts(context: Context, observed: Observation) -> None:
    """Raise where no id fits a user on all hosts."""
    ids = choose_user_ids(context.spec, observed.facts, context.controller.name)
    conflicts = list(user_id_conflicts(context.spec, observed.facts, ids))
    if conflicts:
        problems = "\n".join(f"{finding.host}: {finding.what} ({finding.found})" for finding in conflicts)
        fixes = dict.fromkeys(finding.fix for finding in conflicts)
        raise ShoalError(f"{problems}\nnothing was changed", hint="\n".join(fixes))


async def _late_orphans(context: Context, observed: Observation) -> list[Finding]:
    """Machines that the service ordered during this run, with a provider account that it no longer has.

    Those it ordered since its restart belong to the provider account as the file has it now.
    """
    name, accounts = context.controller.name, context.spec.providers
    dropped = dropped_accounts(context.spec, observed.facts.get(name))
    if not dropped:
        return []
    kept_accounts = accounts.keys() - dropped if rented_sets(context.spec) else frozenset()
    rentals = await ledger_rentals(context) or ()
    orphans = [
        rental for rental in rentals if rental.live and not rental.of_now and rental.account not in kept_accounts
    ]
    return [orphan_finding(context.spec, orphans, name)] if orphans else []


async def _require_secrets(context: Context, fleet: Fleet, observed: Observation) -> None:
    """Raise before anything is prepared where a secret that a host needs is not available."""
    if unavailable_secrets(user_secrets(context.spec)):
        cluster_plan = await make_plan(context.spec, observed, fleet, connection_addresses(fleet))
        require_secrets(missing_secrets((*cluster_plan.hosts, *cluster_plan.after_drain), cluster_plan.user_secrets))


async def _network_problems(context: Context, fleet: Fleet, observed: Observation) -> list[Finding]:
    """Members that others cannot reach, and shares that no host can mount."""
    with context.progress.phase("members reach each other", 1):
        addresses = network_addresses(context.spec, observed, connection_addresses(fleet))
        findings = await unreachable_findings(context.spec, addresses, fleet, observed.facts)
    shares = await unservable_share_findings(context.spec, observed.facts, fleet)
    return [*findings, *(finding for finding in shares if finding.level == "error")]


async def survey(context: Context) -> Survey:
    """Ask every provider what it has for this cluster."""
    instances = await context.all_instances()
    member_keys = {(member.provider, member.name) for member in context.members}
    instance_by_name = {
        instance.name: instance for provider, instance in instances.found if (provider, instance.name) in member_keys
    }
    missing = tuple(
        (member.provider, Request(member.name, member.shape, member.machine))
        for member in context.members
        if member.provider
        and (member.name not in instance_by_name or instance_by_name[member.name].state in ("stopped", "starting"))
    )
    orphans = tuple(
        (provider, instance) for provider, instance in instances.found if (provider, instance.name) not in member_keys
    )
    shape_warnings = shape_findings(
        context.members, {name: instance.shape for name, instance in instance_by_name.items()}
    )
    new = tuple(request.name for _, request in missing if request.name not in instance_by_name)
    unreleasable = await release_findings(context.spec)
    images = {name: instance.shape.image for name, instance in instance_by_name.items() if not instance.type}
    findings = (
        *instances.findings,
        *shape_warnings,
        *change_findings(context.members, instance_by_name),
        *unreleasable,
    )
    return Survey(missing, orphans, new, images, findings)


async def rental_costs(context: Context) -> str:
    """What `up` would rent and its price, as a sentence; empty where it rents no host. Changes nothing."""
    quotes = await rental_quotes(context, await survey(context))
    return quotes_text(quotes) if quotes else ""


async def rental_quotes(context: Context, stock: Survey) -> tuple[HostQuote, ...]:
    """What it costs to rent the hosts that no provider account has yet."""
    return await quote_hosts(context, [(name, one) for name, one in stock.missing if one.name in stock.new])


async def _create(context: Context, missing: Sequence[tuple[str, Request]]) -> dict[str, HostError]:
    """Make hosts. Returns the errors of those that could not be made; they do not stop the others."""
    failures: dict[str, HostError] = {}
    for name in dict.fromkeys(provider for provider, _ in missing):
        provider = context.provider(name)
        requests = [request for provider_name, request in missing if provider_name == name]
        problems = [finding for finding in provider.check(requests) if finding.level == "error"]
        if problems:
            raise cannot_make(name, problems)
        note = f"machines may be rented from {name}; run `shoal up` to continue with them, or `shoal down`"
        rents = note_at_exit(partial(str, note)) if any(one.machine for one in requests) else nullcontext()
        with rents, context.progress.phase(f"{name} hosts", 1) as phase:
            try:
                await provider.create(context.cluster, requests, report_to(phase))
            except ProviderError as error:
                if not error.hosts:
                    raise
                failures |= {
                    host: HostError(host, f"{name} cannot create it: {cause}", hint=error.hint)
                    for host, cause in error.hosts.items()
                }
    return failures


async def _observe(context: Context, fleet: Fleet) -> Observation:
    with context.progress.phase("connect and read facts", len(fleet.targets)) as phase:
        observed = await observe(fleet, context.spec, phase)
    fleet.require(context.controller.name)
    return observed


def _reject_job_loss(cluster_plan: Plan, allowed: bool) -> None:
    if cluster_plan.foreign and not allowed:
        raise ShoalError(
            f"{compress(cluster_plan.foreign)} would be deleted, and the new controller does not know which jobs "
            "run there; nothing was changed",
            hint="run `shoal down` with the old file first, give this cluster another name, or use --allow-job-loss",
        )
    if cluster_plan.cost is Cost.JOBS and cluster_plan.lost_jobs and not allowed:
        raise ShoalError(
            f"this change would end jobs ({', '.join(cluster_plan.lost_jobs)}); nothing was changed",
            hint="wait for them, or use --allow-job-loss",
        )


async def _remove(context: Context, cluster_plan: Plan) -> tuple[str, ...]:
    for name in dict.fromkeys(provider for provider, _ in cluster_plan.delete):
        hosts = [host for provider_name, host in cluster_plan.delete if provider_name == name]
        provider = context.provider(name)
        with context.progress.phase(f"{name} hosts removed", 1) as phase:
            if name in context.provider_names():
                await provider.delete(context.cluster, hosts, report_to(phase))
            else:  # `down` would not ask this provider either
                await provider.destroy(context.cluster, report_to(phase))
    return tuple(dict.fromkeys((*cluster_plan.drain, *(host for _, host in cluster_plan.delete))))
