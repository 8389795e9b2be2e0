"""`shoal cost`: what rented machines cost, as the ledger on the controller has it."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from dataclasses import dataclass, field

from shoal.elastic.costs import Costs, decode
from shoal.elastic.money import micros
from shoal.errors import LedgerError, UsageError
from shoal.roles.elastic import UNIT
from shoal.spec.rented import Budget, rented_sets
from shoal.verbs.context import Context

_SCRIPT = r"""
python=$(sed -n 's/^ExecStart=\([^ ]*\) .*/\1/p' "$1" 2>/dev/null)
[ -x "$python" ] || exit 127
shift
exec "$python" -m shoal.elastic.costs "$@"
"""
COMMAND = ("sh", "-c", _SCRIPT, "cost", UNIT)
"""Runs on the controller as root, whose the ledger is, with the Shoal that the service there runs from."""
PATIENCE = 120.0


@dataclass(frozen=True)
class Limit:
    """A budget's limits, in millionths of a dollar."""

    per_hour: int | None = None
    per_day: int | None = None
    per_month: int | None = None


@dataclass(frozen=True)
class CostResult:
    cluster: str
    costs: Costs
    budget: Limit = field(default_factory=Limit)
    """What the file says for the whole cluster."""
    budgets: Mapping[str, Limit] = field(default_factory=dict)
    """What nodesets have of their own."""


async def cost(context: Context, month: str | None = None) -> CostResult:
    """What was spent, in this month or another one, such as 2026-10."""
    if month is not None and not re.fullmatch(r"[0-9]{4}-(0[1-9]|1[0-2])", month):
        raise UsageError(f"--month {month}: that is not a month", hint="write it as 2026-11")
    sets = rented_sets(context.spec)
    if not sets and not context.spec.providers:
        raise UsageError(
            f"cluster {context.cluster} rents no machines", hint="`shoal usage` shows what your own GPUs cost"
        )
    command = (*COMMAND, "--month", month) if month else COMMAND
    async with await context.connections([context.controller]) as fleet:
        host = await fleet.host(context.controller.name)
        result = await host.run(command, timeout=PATIENCE)
    if result.status == 127:
        raise LedgerError(f"{host.name} has no Shoal of its own yet", hint="run `shoal up`")
    try:
        costs = decode(result.text)
    except ValueError:
        raise _failed(host.name, result.text, result.error_text) from None
    own = {name: _limit(one.budget) for name, one in sets.items() if one.budget}
    return CostResult(context.cluster, costs, _limit(context.spec.budget), own)


def _failed(host: str, said: str, complained: str) -> LedgerError:
    try:
        told = json.loads(said)
        return LedgerError(f"{host}: {told['error']}", hint=str(told.get("fix", "")))
    except (ValueError, KeyError, TypeError):
        last = (complained.strip() or said.strip() or "nothing").splitlines()[-1]
        return LedgerError(f"{host} does not say what was spent: {last}", hint="run `shoal up`")


def _limit(budget: Budget | None) -> Limit:
    if budget is None:
        return Limit()
    limits = (budget.per_hour, budget.per_day, budget.per_month)
    return Limit(*(None if one is None else micros(one) for one in limits))
