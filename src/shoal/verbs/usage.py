"""`shoal usage`: who used how many GPU hours, and what they cost where a price is known."""

from __future__ import annotations

import re
import time
from dataclasses import dataclass
from datetime import datetime

from shoal.errors import SlurmError, UsageError
from shoal.hostlist import expand
from shoal.hosts.api import Host
from shoal.roles.accounting import database_host
from shoal.slurm.usage import GROUPINGS, Grouping, UsageRow, parse_usage, summarize_usage, usage_command, usage_total
from shoal.spec.members import all_members
from shoal.verbs.context import Context
from shoal.verbs.slurmctld import require_configuration, slurm_output

SACCT_TIMEOUT_S = 120.0
"""For a year of jobs."""
PING_COMMAND = ("timeout", "15", "sacctmgr", "-nP", "show", "cluster", "format=cluster")
"""A quick question to slurmdbd: sacct waits minutes for one that is unreachable."""


@dataclass(frozen=True)
class UsageResult:
    cluster: str
    by: Grouping
    since: float
    until: float
    rows: tuple[UsageRow, ...]
    total: UsageRow


async def usage(context: Context, by: str, since: str | None, until: str | None) -> UsageResult:
    """The usage in a period, the last 30 days by default. Running jobs count up to now."""
    grouping = next((candidate for candidate in GROUPINGS if candidate == by), None)
    if grouping is None:
        raise UsageError(f"--by {by} is not a grouping", hint=f"use one of {', '.join(GROUPINGS)}")
    now = time.time()
    begin, end = parse_period(since, until, now, default="30d")
    database = require_accounting(context)
    async with context.controller_host() as controller:
        await _require_slurmdbd(controller, database)
        text = await slurm_output(controller, usage_command(begin, end), SACCT_TIMEOUT_S)
    runs = parse_usage(text, now)
    nodesets, prices = _nodesets(context)
    rows = summarize_usage(runs, grouping, begin, end, nodesets, prices)
    return UsageResult(context.cluster, grouping, begin, end, rows, usage_total(rows, len({run.id for run in runs})))


def _nodesets(context: Context) -> tuple[dict[str, str], dict[str, float]]:
    """The nodeset of each node, and the price of a GPU hour in each nodeset that has one."""
    if context.joined is None:
        nodesets = {member.name: member.nodeset for member in all_members(context.spec)}
        known = {name: nodeset.price for name, nodeset in context.spec.nodesets.items()}
    else:
        sets = context.joined.record.nodesets
        nodesets = {node: name for name, nodeset in sets.items() for node in expand(nodeset.nodes)}
        known = {name: nodeset.price for name, nodeset in sets.items()}
    return nodesets, {name: price for name, price in known.items() if price is not None}


async def _require_slurmdbd(controller: Host, database: str) -> None:
    result = await controller.run(PING_COMMAND, timeout=60)
    require_configuration(controller.name, result)
    if result.status != 0:
        output = result.error_text.strip().splitlines()
        raise SlurmError(
            f"slurmdbd on {database} does not answer" + (f": {output[-1]}" if output else ""),
            hint="`shoal status` shows its state; `shoal jobs --all` lists ended jobs without it",
        )


def require_accounting(context: Context) -> str:
    """The member that runs the database. Raises UsageError where the cluster has none."""
    if context.joined is not None:
        if not context.accounting:
            raise UsageError(
                f"cluster {context.cluster} has no accounting",
                hint="ask the operator for `accounting: true`; `shoal jobs --all` lists your ended jobs without it",
            )
        return context.controller.name
    name = database_host(context.spec)
    if name is None:
        raise UsageError(
            f"cluster {context.cluster} has no accounting",
            hint="add `accounting: true` to the file and run `shoal up`; it records jobs from then on",
        )
    return name


_AGO = re.compile(r"([0-9]{1,5})\s*([hdw])")
_UNIT_S = {"h": 3600, "d": 86400, "w": 7 * 86400}
_FIX = "write 2026-11-01, 2026-11-01T14:30, or how long ago: 12h, 7d, 4w"


def parse_when(option: str, text: str, now: float) -> float:
    """A time as seconds since the epoch, in the time zone of this machine."""
    ago = _AGO.fullmatch(text.strip())
    if ago:
        return now - int(ago[1]) * _UNIT_S[ago[2]]
    try:
        return datetime.fromisoformat(text.strip()).timestamp()
    except (ValueError, OverflowError):
        raise UsageError(f"{option} {text!r} is not a time", hint=_FIX) from None


def parse_period(since: str | None, until: str | None, now: float, default: str) -> tuple[float, float]:
    """Begin and end of a period, checked: the begin is past, and the end is later."""
    begin = parse_when("--since", since or default, now)
    end = parse_when("--until", until, now) if until else now
    if begin > now:
        raise UsageError(f"--since {since} is in the future", hint=_FIX)
    if begin >= end:
        raise UsageError(f"--until {until} is not later than --since {since or default}", hint="swap them")
    return begin, end
