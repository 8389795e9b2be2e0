"""`shoal usage`: who used how many GPU hours, and what they cost where a price is known."""

from __future__ import annotations

import time
from dataclasses import dataclass

from shoal.errors import SlurmError, UsageError
from shoal.slurm.usage import WAYS, By, UsageRow, parse_usage, sum_up, total, usage_command
from shoal.spec.members import all_members
from shoal.verbs.context import Context
from shoal.verbs.period import parse_period
from shoal.verbs.status import ask

PATIENCE = 120.0


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
        raise UsageError(f"--by {by}: there is no such way to sum up", hint=f"use one of {', '.join(WAYS)}")
    now = time.time()
    begin, end = parse_period(since, until, now, default="30d")
    require_accounting(context)
    async with await context.connections([context.controller]) as fleet:
        controller = await fleet.host(context.controller.name)
        try:
            text = await ask(controller, usage_command(begin, end), PATIENCE)
        except SlurmError as error:
            raise SlurmError(f"slurmdbd does not tell: {error.message}", hint=error.hint) from None
    runs = parse_usage(text, now)
    nodesets = {member.name: member.nodeset for member in all_members(context.spec)}
    prices = {name: nodeset.price for name, nodeset in context.spec.nodesets.items() if nodeset.price is not None}
    rows = sum_up(runs, way, begin, end, nodesets, prices)
    return UsageResult(context.cluster, way, begin, end, rows, total(rows, len({run.id for run in runs})))


def require_accounting(context: Context) -> None:
    """Raises UsageError where the spec asks for no database."""
    if context.spec.accounting is None:
        raise UsageError(
            f"cluster {context.cluster} has no accounting",
            hint="write `accounting: true` into the file and run `shoal up`; it counts from then on",
        )
