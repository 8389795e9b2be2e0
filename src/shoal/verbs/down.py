"""`shoal down`: take the cluster down. Hosts that a provider made are deleted; other hosts are released."""

from __future__ import annotations

import contextlib
import shutil
from collections.abc import AsyncIterator, Mapping, Sequence
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass, field
from typing import Literal

from shoal.agent.client import FactsRequest
from shoal.cloud.rental import dollars
from shoal.errors import HostError, ProviderError, ShoalError, SlurmError
from shoal.local_files import state_directory
from shoal.plan.connections import Fleet
from shoal.plan.nodes import active_jobs
from shoal.plan.ownership import records_of_others
from shoal.remote.rental_ledger import SERVICE
from shoal.roles.current_conf import SLURM_CONF
from shoal.roles.documents import removal
from shoal.roles.orphaned_rentals import ACCOUNTS, STATUS, orphan_finding, rentals_of_other_accounts
from shoal.spec.finding import Finding
from shoal.spec.member import Member
from shoal.verbs.context import Context, ProviderInstances, note_at_exit, report_to
from shoal.verbs.cost import final_cost
from shoal.verbs.reap import Polling, reap
from shoal.verbs.rentals import control_service, restart_if_disconnected, run_to_completion

_FOREIGN_HINT = "take it out of this file"


@dataclass(frozen=True)
class RentedCost:
    """What the cluster rented from its beginning to its end, in US dollars."""

    total: float | None
    """None where a price is unknown."""
    hosts: float
    """The controller and login hosts."""
    nodes: float
    unpriced: tuple[str, ...] = ()
    """Hosts and nodes of unknown price, which are in no sum."""


@dataclass(frozen=True)
class DownResult:
    cluster: str
    deleted: tuple[str, ...] = ()
    """Hosts that a provider deleted."""
    released: tuple[str, ...] = ()
    """Hosts on which Slurm was stopped and our configuration removed."""
    failures: Mapping[str, HostError] = field(default_factory=dict)
    findings: tuple[Finding, ...] = ()
    given_back: tuple[str, ...] = ()
    """Rented machines that no provider lists any more."""
    cost: RentedCost | None = None
    """None where the cluster rents nothing, or nothing tells what that cost."""


async def down(context: Context, *, force: bool = False, polling: Polling | None = None) -> DownResult:
    """Stop Slurm and remove what Shoal made. Raises while jobs run, or may run, unless forced."""
    instances = await context.all_instances()
    await _reject_foreign_controller(context)
    if not force:
        await _reject_running_jobs(context, instances)
    is_on = not _is_off(context, instances)
    rental_texts, findings = await _release_rented(context, force, is_on, polling)
    rented_cost, cost_findings = await _final_cost(context, is_on)
    released_hosts, failures = await release(context, [member for member in context.members if member.provider is None])
    deleted_hosts = await _delete(context, instances)
    if not failures:
        shutil.rmtree(state_directory(context.cluster), ignore_errors=True)
    return DownResult(
        context.cluster,
        deleted_hosts,
        released_hosts,
        failures,
        (*instances.findings, *findings, *cost_findings),
        rental_texts,
        rented_cost,
    )


async def _reject_foreign_controller(context: Context) -> None:
    """Raise where the controller belongs to another cluster: the file may have got another name."""
    controller = context.controller
    if controller.provider is not None:
        return
    async with await context.fleet([controller]) as fleet:
        for record in (await records_of_others(context.cluster, fleet, [controller.name])).values():
            raise ShoalError(
                f"{controller.name} belongs to cluster {record}; nothing was changed",
                hint=f"to remove that cluster, write `cluster: {record.cluster}` into the file",
            )


async def _release_rented(
    context: Context, force: bool, is_on: bool, polling: Polling | None
) -> tuple[tuple[str, ...], tuple[Finding, ...]]:
    """Release rented machines before the controller: its service must go on deleting while one is left.

    Where a provider does not answer, the controller stays and its service goes on; forced, findings name what is left.
    """
    findings = await _orphans(context, force) if is_on else ()
    if not context.spec.providers:
        return (), findings
    try:
        async with _pause_service(context, force, is_on) as stop_findings:
            findings += stop_findings
            result = await reap(context, polling=polling)
    except BaseException:  # also Ctrl-C: the service must go on releasing what is rented
        await run_to_completion(_control_service(context, "start"))
        raise
    rental_texts = tuple(f"{instance.node} ({instance})" for instance in result.gone)
    if result.clean:
        return rental_texts, findings
    remaining = ", ".join(map(str, result.remaining)) or "not known"
    errors = [f"{name}: {error.message.removeprefix(f'{name}: ')}" for name, error in result.failures.items()]
    errors += [f"{finding.what}: {finding.found}" for finding in result.findings if finding not in findings]
    causes = "; ".join(errors)
    if force and not causes:
        return rental_texts, findings  # only orphans are left, and a finding names them already
    if force:
        fix = "run `shoal reap` until it reports that all is clean, or look in the provider's console"
        return rental_texts, (*findings, Finding("error", f"rented machines may be left: {causes}", remaining, fix))
    error = await run_to_completion(_control_service(context, "start"))
    next_step = f"start {SERVICE} on the controller, {error}" if error else "the controller goes on releasing them"
    raise ProviderError(
        f"rented machines may be left ({remaining}): {causes}",
        hint=f"run `shoal down` again when the provider answers; {next_step}. "
        "Or use --force, and release them with `shoal reap`",
    )


async def _final_cost(context: Context, is_on: bool) -> tuple[RentedCost | None, tuple[Finding, ...]]:
    """What was rented, while there is a controller that knows it."""
    if not context.spec.providers or not is_on:
        return None, ()
    try:
        spent = await final_cost(context)
    except ProviderError:
        return None, ()  # the controller was never made
    except ShoalError as error:
        fix = "look in the console of the provider"
        return None, (Finding("warning", "the cost of what was rented is unknown", error.message, fix),)
    if spent is None:
        return None, ()
    total = None if spent.unpriced else dollars(spent.hosts + spent.nodes)
    return RentedCost(total, dollars(spent.hosts), dollars(spent.nodes), spent.unpriced), ()


async def _orphans(context: Context, force: bool) -> tuple[Finding, ...]:
    """Rented machines of provider accounts that the file lacks: only the controller can release them."""
    try:
        async with await context.fleet([context.controller]) as fleet:
            request = FactsRequest(files={STATUS: "text", ACCOUNTS: "text"})
            facts = await (await fleet.agent(context.controller.name)).facts(request)
    except ShoalError:
        return ()  # never made, or unreachable; without --force that was an error before
    rentals = rentals_of_other_accounts(context.spec, facts)
    if not rentals:
        return ()
    finding = orphan_finding(context.spec, rentals, context.controller.name)
    if not force:
        raise ProviderError(
            f"{finding.what}: {finding.found}; nothing was changed",
            hint=f"{finding.fix}; or use --force, and delete them in the provider's console",
        )
    return (finding,)


@asynccontextmanager
async def _pause_service(context: Context, force: bool, is_on: bool) -> AsyncIterator[tuple[Finding, ...]]:
    """Keep shoal-elastic stopped inside the block. If this process is killed there, the controller starts it again."""
    if not is_on:
        yield ()
        return
    name = context.controller.name
    async with AsyncExitStack() as stack:
        has_watch = False
        with contextlib.suppress(ShoalError):  # a controller that was never made, or is away, has no service
            controller = await stack.enter_async_context(context.controller_host())
            has_watch = await stack.enter_async_context(restart_if_disconnected(controller))
        restart_text = (
            f"{name} starts {SERVICE} again by itself" if has_watch else f"on {name}: systemctl start {SERVICE}"
        )
        with note_at_exit(lambda: f"{restart_text}, which releases what is left; then run `shoal down` again"):
            yield await _stop_service(context, force)


async def _stop_service(context: Context, force: bool) -> tuple[Finding, ...]:
    """Stop shoal-elastic: it would rent again for the jobs in the queue."""
    error = await _control_service(context, "stop")
    if not error:
        return ()
    if not force:
        raise ShoalError(
            f"cannot stop {SERVICE}, which would rent again for jobs in the queue: {error}",
            hint="solve that first; or use --force, and then release what it rents with `shoal reap`",
        )
    what = f"cannot stop {SERVICE}, which may rent again for jobs in the queue"
    fix = "switch the controller off, then run `shoal reap`"
    return (Finding("error", what, error, fix, host=context.controller.name),)


async def _control_service(context: Context, verb: Literal["start", "stop"]) -> str:
    """Stop or start shoal-elastic. Returns the error, if any; a controller that was never made has no service."""
    try:
        async with context.controller_host() as controller:
            return await control_service(controller, verb)
    except ProviderError:
        return ""
    except ShoalError as error:
        return error.message


async def _reject_running_jobs(context: Context, instances: ProviderInstances) -> None:
    if _is_off(context, instances):
        return
    try:
        fleet = await context.fleet([context.controller])
    except ProviderError:
        return  # the controller was never made, so no job ever started
    async with fleet:
        try:
            job_ids = await _running_jobs(fleet, context.controller.name)
        except (HostError, SlurmError) as error:
            hint = f"{error.hint or 'solve that first'}; or use --force, which ends them"
            raise ShoalError(f"cannot ask whether jobs run: {error.message}", hint=hint) from error
    if job_ids:
        raise ShoalError(
            f"cluster {context.cluster} has {len(job_ids)} running job(s): {', '.join(job_ids)}",
            hint="wait for them, cancel them, or use --force",
        )


def _is_off(context: Context, instances: ProviderInstances) -> bool:
    """Whether a provider made every host and none runs, as after a reboot of this machine."""
    has_lent_hosts = any(member.provider is None for member in context.members)
    return not has_lent_hosts and all(instance.state == "stopped" for _, instance in instances.found)


async def _running_jobs(fleet: Fleet, controller: str) -> list[str]:
    """The jobs that would be lost. A host without slurm.conf was never up, or is released: it has none."""
    facts = await (await fleet.agent(controller)).facts(
        FactsRequest(files={SLURM_CONF: "hash"}, services=("slurmctld",))
    )
    if facts.digest(SLURM_CONF) is None:
        return []
    state = facts.services.get("slurmctld", "unknown")
    if state != "active":  # squeue would wait long for it
        raise SlurmError(f"slurmctld on {controller} does not run ({state})")
    return await active_jobs(await fleet.host(controller))


async def release(
    context: Context, lent: Sequence[Member], again: str = "shoal down"
) -> tuple[tuple[str, ...], dict[str, HostError]]:
    """Remove Shoal from hosts that we did not make. `again` is the command that continues after errors."""
    if not lent:
        return (), {}
    async with await context.fleet(lent) as fleet:
        others = await records_of_others(context.cluster, fleet, fleet.targets)
        with context.progress.phase("hosts released", len(lent)) as phase:
            names = [name for name in fleet.live if name not in others]
            released_hosts = await fleet.converge_all(dict.fromkeys(names, removal()), {}, phase, again)
        for name, record in others.items():
            fleet.failures[name] = HostError(
                name, f"belongs to cluster {record}, and is left as it is", hint=_FOREIGN_HINT
            )
        return tuple(released_hosts), dict(fleet.failures)


async def _delete(context: Context, instances: ProviderInstances) -> tuple[str, ...]:
    """Delete what providers have. Providers that the file names also remove what a killed run left behind."""
    for name in sorted({*context.provider_names(), *(provider for provider, _ in instances.found)}):
        with context.progress.phase(f"{name} hosts removed", 1) as phase:
            await context.provider(name).destroy(context.cluster, report_to(phase))
    return tuple(instance.name for _, instance in instances.found)
