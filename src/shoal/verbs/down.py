"""`shoal down`: take the cluster away. Hosts that a provider made are removed; other hosts are given back."""

from __future__ import annotations

import shutil
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from shoal.agent.client import Report
from shoal.errors import AgentFailed, HostError, ProviderError, ShoalError
from shoal.plan.apply import ending
from shoal.plan.observe import slurm_view
from shoal.roles.documents import farewell
from shoal.spec.member import Member
from shoal.verbs.context import Context, state_directory, telling


@dataclass(frozen=True)
class DownResult:
    cluster: str
    deleted: tuple[str, ...] = ()
    """Hosts that a provider removed."""
    released: tuple[str, ...] = ()
    """Hosts on which Slurm was stopped and our configuration taken away."""
    failures: Mapping[str, HostError] = field(default_factory=dict)


async def down(context: Context, *, force: bool = False) -> DownResult:
    """Stop Slurm and remove what Shoal made. Refused while jobs run, unless forced."""
    if not force:
        await _refuse_running_jobs(context)
    lent = [member for member in context.members if member.provider is None]
    released, failures = await release(context, lent)
    deleted = await _delete(context)
    if not failures:
        shutil.rmtree(state_directory(context.cluster), ignore_errors=True)
    return DownResult(context.cluster, deleted, released, failures)


async def _refuse_running_jobs(context: Context) -> None:
    try:
        async with await context.fleet([context.controller]) as fleet:
            view = await slurm_view(await fleet.host(context.controller.name))
    except (HostError, ProviderError):
        return  # Without a controller there is nobody to ask and no job that could end well.
    running = [job for job in view.jobs if job.state == "RUNNING"]
    if running:
        raise ShoalError(
            f"cluster {context.cluster} has {len(running)} running job(s): {', '.join(job.id for job in running)}",
            hint="wait for them, cancel them, or say --force",
        )


async def release(context: Context, lent: Sequence[Member]) -> tuple[tuple[str, ...], dict[str, HostError]]:
    """Bring hosts that we did not make back to a state without us."""
    if not lent:
        return (), {}
    async with await context.fleet(lent) as fleet:
        with context.progress.phase("hosts released", len(lent)) as phase:

            async def say_farewell(name: str) -> Report:
                agent = await fleet.agent(name)
                report = await agent.apply(farewell(), {}, lambda event: phase.say(name, event.text))
                failed = next((item for item in report.items if item.status == "failed"), None)
                if failed is not None:
                    raise AgentFailed(name, f"{failed.key}: {failed.detail}", hint="mend it and run `shoal down` again")
                return report

            done = await fleet.each(fleet.targets, say_farewell, on_done=ending(phase))
        return tuple(done), dict(fleet.failures)


async def _delete(context: Context) -> tuple[str, ...]:
    deleted: list[str] = []
    for name in context.provider_names():
        provider = context.providers(name)
        deleted += [instance.name for instance in await provider.instances(context.cluster)]
        with context.progress.phase(f"{name} hosts removed", 1) as phase:
            await provider.destroy(context.cluster, telling(phase))
    return tuple(deleted)
