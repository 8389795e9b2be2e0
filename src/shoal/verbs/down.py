"""`shoal down`: take the cluster away. Hosts that a provider made are removed; other hosts are given back."""

from __future__ import annotations

import contextlib
import shutil
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from shoal.agent.client import Ask, Report
from shoal.errors import HostError, ProviderError, ShoalError, SlurmError
from shoal.plan.apply import ending
from shoal.plan.fleet import Fleet
from shoal.plan.nodes import active_jobs
from shoal.roles.documents import farewell
from shoal.roles.elastic import SERVICE
from shoal.roles.in_force import SLURM_CONF
from shoal.spec.finding import Finding
from shoal.spec.member import Member
from shoal.verbs.context import Context, Holdings, state_directory, telling
from shoal.verbs.reap import reap


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


async def down(context: Context, *, force: bool = False) -> DownResult:
    """Stop Slurm and remove what Shoal made. Refused while jobs run or nobody can say, unless forced."""
    holdings = await context.holdings()
    if not force:
        await _refuse_running_jobs(context, holdings)
    rented, told = await _give_back(context, force)
    lent = [member for member in context.members if member.provider is None]
    released, failures = await release(context, lent)
    deleted = await _delete(context, holdings)
    if not failures:
        shutil.rmtree(state_directory(context.cluster), ignore_errors=True)
    return DownResult(context.cluster, deleted, released, failures, (*holdings.findings, *told), rented)


async def _give_back(context: Context, force: bool) -> tuple[tuple[str, ...], tuple[Finding, ...]]:
    """Give rented machines back before the controller goes: while one is left, somebody must go on deleting it.

    Where a provider cannot be asked the controller stays, and its service goes on; forced, what is left is told.
    """
    if not context.spec.providers:
        return (), ()
    await _service(context, "stop")  # it would rent again what jobs in the queue ask for
    result = await reap(context)
    gone = tuple(f"{holding.machine.node} ({holding.account} {holding.machine.id})" for holding in result.gone)
    if result.clean:
        return gone, ()
    left = ", ".join(f"{holding.account} {holding.machine.id}" for holding in result.remaining) or "not known"
    causes = "; ".join(f"{name}: {error.message}" for name, error in result.failures.items())
    fix = "run `shoal reap` until it says that all is clean, or look in the provider's console"
    if force:
        return gone, (Finding("error", f"rented machines may be left: {causes}", left, fix),)
    await _service(context, "start")
    raise ProviderError(
        f"rented machines may be left ({left}): {causes}",
        hint="run `shoal down` again when the provider answers; the controller goes on giving them back. "
        "Or say --force, and see to them with `shoal reap`",
    )


async def _service(context: Context, verb: str) -> None:
    """Stop or start what rents on the controller. One that does not answer rents nothing that `reap` would not find."""
    with contextlib.suppress(ShoalError):
        async with await context.connections([context.controller]) as fleet:
            host = await fleet.host(context.controller.name)
            await host.run(("systemctl", verb, SERVICE), timeout=120)


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
            hint = f"{error.hint or 'mend that first'}; or say --force, which ends them"
            raise ShoalError(f"cannot ask whether jobs run: {error.message}", hint=hint) from error
    if running:
        raise ShoalError(
            f"cluster {context.cluster} has {len(running)} running job(s): {', '.join(running)}",
            hint="wait for them, cancel them, or say --force",
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
