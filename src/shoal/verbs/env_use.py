"""An environment for a job: found by its name, and seen on every node that the job may go to."""

from __future__ import annotations

from collections.abc import Sequence

from shoal.environments.place import Made, look_command, parse_look
from shoal.errors import Partly, UsageError
from shoal.hostlist import compress
from shoal.jobs.model import JobSpec
from shoal.plan.connections import Connections
from shoal.verbs.context import Context
from shoal.verbs.env import PATIENCE, chosen, in_force, is_stale


async def environment_of(context: Context, fleet: Connections, job: JobSpec) -> Made | None:
    """The environment that the job names; None where it names none. Raises UsageError for one that is not built."""
    name = job.environment
    if name is None:
        return None
    [placed] = chosen(context, [name]).values()
    controller = await fleet.host(context.controller.name)
    made = (await in_force(controller, [placed])).get((placed.directory, name))
    again = f"run `shoal env build {name}`"
    if made is None:
        raise UsageError(f"environment {name} is not built yet", hint=again)
    if is_stale(context, placed.entry, made):
        raise UsageError(f"environment {name} was made from another file than the one that is here now", hint=again)
    return made


async def expect_environment(fleet: Connections, made: Made | None, nodes: Sequence[str]) -> None:
    """Refuse a job some of whose nodes could not run it. What they have is marked as used."""
    if made is None:
        return

    async def one(node: str) -> str:
        host = await fleet.host(node)
        return parse_look((await host.run(look_command(made.path, use=True), timeout=PATIENCE)).text).state

    states = await fleet.each(nodes, one)
    lacking = [node for node in nodes if states.get(node) != made.python]
    if lacking:
        raise Partly(
            f"{compress(lacking)} cannot use environment {made.name}, so nothing was queued",
            hint=f"run `shoal env build {made.name}`, or name other nodes with --nodelist or --partition",
        )
