"""`shoal down`: take the cluster away. Hosts that a provider made are removed; other hosts are given back."""

from __future__ import annotations

import contextlib
import shutil
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping, Sequence
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass, field

from shoal.agent.client import Ask, Report
from shoal.errors import HostError, ProviderError, ShoalError, SlurmError
from shoal.hosts.api import Host
from shoal.plan.apply import ending
from shoal.plan.fleet import Fleet
from shoal.plan.nodes import active_jobs
from shoal.roles.documents import farewell
from shoal.roles.elastic import SERVICE
from shoal.roles.forgotten import ACCOUNTS, STATUS, forgotten_finding, strangers
from shoal.roles.in_force import SLURM_CONF
from shoal.spec.finding import Finding
from shoal.spec.member import Member
from shoal.verbs import elastic_service
from shoal.verbs.context import Context, Holdings, state_directory, telling
from shoal.verbs.elastic_service import to_its_end
from shoal.verbs.last_words import last_words
from shoal.verbs.reap import Pace, reap


@dataclass(frozen=True)
class DownResult:
    cluster: str
    deleted: tuple[str, ...] = ()
    """Hosts that a provider removed."""
    released: tuple[str, ...] = ()
    """Hosts on which Slurm was stopped and our configuration taken away."""
    failures: Mapping[str, HostError] = field(default_factory=dict)
    findings: tuple[Finding, ...] = ()
    given_back: tuple[str, ...] = ()
    """Rented machines that are gone: no provider's list shows one of the cluster's any more."""


async def down(context: Context, *, force: bool = False, pace: Pace | None = None) -> DownResult:
    """Stop Slurm and remove what Shoal made. Refused while jobs run or nobody can say, unless forced."""
    holdings = await context.holdings()
    if not force:
        await _refuse_running_jobs(context, holdings)
    rented, told = await _give_back(context, force, not _switched_off(context, holdings), pace)
    lent = [member for member in context.members if member.provider is None]
    released, failures = await release(context, lent)
    deleted = await _delete(context, holdings)
    if not failures:
        shutil.rmtree(state_directory(context.cluster), ignore_errors=True)
    return DownResult(context.cluster, deleted, released, failures, (*holdings.findings, *told), rented)


async def _give_back(
    context: Context, force: bool, switched_on: bool, pace: Pace | None
) -> tuple[tuple[str, ...], tuple[Finding, ...]]:
    """Give rented machines back before the controller goes: while one is left, somebody must go on deleting it.

    Where a provider cannot be asked the controller stays, and its service goes on; forced, what is left is told.
    """
    told = await _strangers(context, force) if switched_on else ()
    if not context.spec.providers:
        return (), told
    try:
        async with _without_renting(context, force, switched_on) as unstopped:
            told += unstopped
            result = await reap(context, pace=pace)
    except BaseException:  # Ctrl-C above all: what is rented still needs somebody who gives it back
        await to_its_end(_service(context, elastic_service.start))
        raise
    gone = tuple(f"{holding.machine.node} ({holding.account} {holding.machine.id})" for holding in result.gone)
    if result.clean:
        return gone, told
    left = ", ".join(f"{holding.account} {holding.machine.id}" for holding in result.remaining) or "not known"
    failed = {name: error.message.removeprefix(f"{name}: ") for name, error in result.failures.items()}
    strange = [f"{one.what}: {one.found}" for one in result.findings if one not in told]
    causes = "; ".join([*(f"{name}: {said}" for name, said in failed.items()), *strange])
    if force and not causes:
        return gone, told  # machines of accounts that the file does not have, and those were told
    fix = "run `shoal reap` until it says that all is clean, or look in the provider's console"
    if force:
        return gone, (*told, Finding("error", f"rented machines may be left: {causes}", left, fix))
    wrong = await to_its_end(_service(context, elastic_service.start))
    goes_on = f"start {SERVICE} on the controller, {wrong}" if wrong else "the controller goes on giving them back"
    raise ProviderError(
        f"rented machines may be left ({left}): {causes}",
        hint=f"run `shoal down` again when the provider answers; {goes_on}. "
        "Or use --force, and see to them with `shoal reap`",
    )


async def _strangers(context: Context, force: bool) -> tuple[Finding, ...]:
    """Machines of accounts that the file no longer has: nobody could give them back once the controller is gone."""
    try:
        async with await context.fleet([context.controller]) as fleet:
            facts = await (await fleet.agent(context.controller.name)).facts(
                Ask(files={STATUS: "text", ACCOUNTS: "text"})
            )
    except ShoalError:
        return ()  # never made, or away: who does not use --force was told
    machines = strangers(context.spec, facts)
    if not machines:
        return ()
    finding = forgotten_finding(context.spec, machines, context.controller.name)
    if not force:
        raise ProviderError(
            f"{finding.what}: {finding.found}; nothing was changed",
            hint=f"{finding.fix}; or use --force, and see to them in the provider's console",
        )
    return (finding,)


@asynccontextmanager
async def _without_renting(context: Context, force: bool, switched_on: bool) -> AsyncIterator[tuple[Finding, ...]]:
    """What rents is stopped meanwhile. Left at once, by a second Ctrl-C or a kill, the controller starts it again."""
    if not switched_on:
        yield ()
        return
    name = context.controller.name
    async with AsyncExitStack() as stack:
        watched = False
        with contextlib.suppress(ShoalError):  # a controller that was never made, or is away, has none to start
            fleet = await stack.enter_async_context(await context.connections([context.controller]))
            watched = await stack.enter_async_context(elastic_service.started_again(await fleet.host(name)))
        goes_on = f"{name} starts {SERVICE} again by itself" if watched else f"on {name}: systemctl start {SERVICE}"
        with last_words(lambda: f"{goes_on}, which gives back what is left; then run `shoal down` again"):
            yield await _stopped(context, force)


async def _stopped(context: Context, force: bool) -> tuple[Finding, ...]:
    """Stop what rents: it would rent again what jobs in the queue ask for."""
    wrong = await _service(context, elastic_service.stop)
    if not wrong:
        return ()
    if not force:
        raise ShoalError(
            f"{SERVICE} cannot be stopped, and would rent again what jobs ask for: {wrong}",
            hint="solve that first; or use --force, and see with `shoal reap` to what it rents meanwhile",
        )
    what = f"{SERVICE} could not be stopped, and may rent again what jobs ask for"
    fix = "switch the controller off, then run `shoal reap`"
    return (Finding("error", what, wrong, fix, host=context.controller.name),)


async def _service(context: Context, control: Callable[[Host], Awaitable[str]]) -> str:
    """Stop or start what rents on the controller; what went wrong. A controller that was never made has none."""
    try:
        async with await context.connections([context.controller]) as fleet:
            return await control(await fleet.host(context.controller.name))
    except ProviderError:
        return ""
    except ShoalError as error:
        return error.message


async def _refuse_running_jobs(context: Context, holdings: Holdings) -> None:
    if _switched_off(context, holdings):
        return
    try:
        fleet = await context.fleet([context.controller])
    except ProviderError:
        return  # The controller was never made, so no job ever started.
    async with fleet:
        try:
            running = await _running_jobs(fleet, context.controller.name)
        except (HostError, SlurmError) as error:
            hint = f"{error.hint or 'solve that first'}; or use --force, which ends them"
            raise ShoalError(f"cannot ask whether jobs run: {error.message}", hint=hint) from error
    if running:
        raise ShoalError(
            f"cluster {context.cluster} has {len(running)} running job(s): {', '.join(running)}",
            hint="wait for them, cancel them, or use --force",
        )


def _switched_off(context: Context, holdings: Holdings) -> bool:
    """Whether every host is one that a provider made and that does not run, as after a reboot of this machine."""
    lent = any(member.provider is None for member in context.members)
    return not lent and all(instance.state == "stopped" for _, instance in holdings.found)


async def _running_jobs(fleet: Fleet, controller: str) -> list[str]:
    """The jobs that would be lost. A host without slurm.conf was never up, or is given back: there is nobody to ask."""
    facts = await (await fleet.agent(controller)).facts(Ask(files={SLURM_CONF: "hash"}, services=("slurmctld",)))
    if facts.files[SLURM_CONF].sha256 is None:
        return []
    state = facts.services.get("slurmctld", "unknown")
    if state != "active":  # squeue would wait long for it
        raise SlurmError(f"slurmctld on {controller} does not run ({state})")
    return await active_jobs(await fleet.host(controller))


async def release(
    context: Context, lent: Sequence[Member], again: str = "shoal down"
) -> tuple[tuple[str, ...], dict[str, HostError]]:
    """Bring hosts that we did not make back to a state without us. `again` is the command that goes on after errors."""
    if not lent:
        return (), {}
    async with await context.fleet(lent) as fleet:
        with context.progress.phase("hosts released", len(lent)) as phase:

            async def say_farewell(name: str) -> Report:
                return await fleet.converge(name, farewell(), {}, phase, again)

            done = await fleet.each(fleet.targets, say_farewell, on_done=ending(phase))
        return tuple(done), dict(fleet.failures)


async def _delete(context: Context, holdings: Holdings) -> tuple[str, ...]:
    """Remove what providers have. Those that the file names also clear up what a killed run left around hosts."""
    for name in sorted({*context.provider_names(), *(provider for provider, _ in holdings.found)}):
        with context.progress.phase(f"{name} hosts removed", 1) as phase:
            await context.providers(name).destroy(context.cluster, telling(phase))
    return tuple(instance.name for _, instance in holdings.found)
