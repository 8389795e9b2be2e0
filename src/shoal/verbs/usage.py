"""`shoal usage`: who used how many GPU hours, and what they cost where a price is known."""

from __future__ import annotations

import time
from dataclasses import dataclass

from shoal.errors import SlurmError, UsageError
from shoal.hosts.api import Host
from shoal.roles.accounting import database_host
from shoal.slurm.usage import WAYS, By, UsageRow, parse_usage, sum_up, total, usage_command
from shoal.spec.members import all_members
from shoal.verbs.context import Context
from shoal.verbs.period import parse_period
from shoal.verbs.status import ask, refuse_without_cluster

PATIENCE = 120.0
"""Seconds for a year of jobs."""
ANSWERS = ("timeout", "15", "sacctmgr", "-nP", "show", "cluster", "format=cluster")
"""A small question to slurmdbd: sacct waits minutes for one whose host is away."""


@dataclass(frozen=True)
class UsageResult:
    cluster: str
    by: By
    since: float
    until: float
    rows: tuple[UsageRow, ...]
    total: UsageRow


async def usage(context: Context, by: str, since: str | None, until: str | None) -> UsageResult:
    """What was used in a period, the last 30 days by default. Jobs that still run count up to now."""
    way = next((known for known in WAYS if known == by), None)
    if way is None:
        raise UsageError(f"--by {by}: there is no such sum", hint=f"use one of {', '.join(WAYS)}")
    now = time.time()
    begin, end = parse_period(since, until, now, default="30d")
    require_accounting(context)
    async with await context.connections([context.controller]) as fleet:
        controller = await fleet.host(context.controller.name)
        await _expect_slurmdbd(controller, context)
        text = await ask(controller, usage_command(begin, end), PATIENCE)
    runs = parse_usage(text, now)
    nodesets = {member.name: member.nodeset for member in all_members(context.spec)}
    prices = {name: nodeset.price for name, nodeset in context.spec.nodesets.items() if nodeset.price is not None}
    rows = sum_up(runs, way, begin, end, nodesets, prices)
    return UsageResult(context.cluster, way, begin, end, rows, total(rows, len({run.id for run in runs})))


async def _expect_slurmdbd(controller: Host, context: Context) -> None:
    result = await controller.run(ANSWERS, timeout=60)
    refuse_without_cluster(controller.name, result)
    if result.status != 0:
        said = result.error_text.strip().splitlines()
        raise SlurmError(
            f"slurmdbd on {database_host(context.spec)} does not answer" + (f": {said[-1]}" if said else ""),
            hint="`shoal status` says how it does; `shoal jobs --all` knows ended jobs without it",
        )


def require_accounting(context: Context) -> None:
    """Raises UsageError where the spec asks for no database."""
    if context.spec.accounting is None:
        raise UsageError(
            f"cluster {context.cluster} has no accounting",
            hint="write `accounting: true` into the file and run `shoal up`; it counts from then on",
        )
