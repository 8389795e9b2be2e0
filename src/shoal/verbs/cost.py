"""`shoal cost`: what rented machines cost, from the ledger on the controller."""

from __future__ import annotations

import json
import re
import time
from collections.abc import Mapping
from dataclasses import dataclass, field, replace

from shoal.cloud.providers.api import ProviderLogin, RentalProvider
from shoal.cloud.rental import Rental
from shoal.cloud.service.costs import CostReport, TotalCost, decode, summary
from shoal.cloud.service.host_costs import host_prices, host_rental
from shoal.errors import LedgerError, UsageError
from shoal.roles.elastic import UNIT
from shoal.spec.members import rented_sets
from shoal.spec.rental import Budget
from shoal.verbs.context import Context
from shoal.verbs.provider_accounts import ask_all, open_accounts
from shoal.verbs.rentals import read_public_report

_SCRIPT = r"""
python=$(sed -n 's/^ExecStart=\([^ ]*\) .*/\1/p' "$1" 2>/dev/null)
[ -x "$python" ] || exit 127
shift
exec "$python" -m shoal.cloud.service.costs "$@"
"""
COMMAND = ("sh", "-c", _SCRIPT, "cost", UNIT)
"""Runs on the controller as root, who owns the ledger, with the Shoal that the service there uses."""
COST_TIMEOUT_S = 120.0


@dataclass(frozen=True)
class CostResult:
    cluster: str
    costs: CostReport
    budget: Budget = field(default_factory=Budget)
    """Of the whole cluster."""
    budgets: Mapping[str, Budget] = field(default_factory=dict)
    """Of nodesets."""


async def cost(context: Context, month: str | None = None) -> CostResult:
    """What was spent in this month, or in another one such as 2026-10."""
    if month is not None and not re.fullmatch(r"[0-9]{4}-(0[1-9]|1[0-2])", month):
        raise UsageError(f"--month {month} is not a month", hint="write it as 2026-11")
    if context.joined is not None:
        return await _read_as_user(context, month)
    sets = rented_sets(context.spec)
    if not sets and not context.spec.providers:
        raise UsageError(
            f"cluster {context.cluster} rents no machines", hint="`shoal usage` shows what your own GPUs cost"
        )
    if not sets and any(member.machine for member in context.members):
        return CostResult(context.cluster, await _ask_providers(context, month or ""), context.spec.budget or Budget())
    command = (*COMMAND, "--month", month) if month else COMMAND
    async with context.controller_host() as host:
        result = await host.run(command, timeout=COST_TIMEOUT_S)
    if result.status == 127:
        raise LedgerError(f"{host.name} has no Shoal of its own yet", hint="run `shoal up`")
    try:
        costs = decode(result.text)
    except ValueError:
        raise _make_error(host.name, result.text, result.error_text) from None
    nodeset_budgets = {name: nodeset.budget for name, nodeset in sets.items() if nodeset.budget}
    return CostResult(context.cluster, costs, context.spec.budget or Budget(), nodeset_budgets)


async def final_cost(context: Context) -> TotalCost | None:
    """What the cluster rented since its beginning; None before the first `up`. Raises LedgerError, ProviderError."""
    if not rented_sets(context.spec):
        costs = await _ask_providers(context, "")
        return TotalCost(hosts=costs.total, unpriced=costs.unpriced)
    async with context.controller_host() as host:
        result = await host.run((*COMMAND, "--total"), timeout=COST_TIMEOUT_S)
    if result.status == 127:
        return None
    try:
        data = json.loads(result.text)
        return TotalCost(int(data["nodes"]), int(data["hosts"]), tuple(map(str, data["unpriced"])))
    except (ValueError, KeyError, TypeError):
        raise _make_error(host.name, result.text, result.error_text) from None


async def _ask_providers(context: Context, month: str) -> CostReport:
    """The costs of rented hosts, since their last start: without rented nodesets there is no ledger."""
    now, found = time.time(), host_prices(context.spec)

    async def running_hosts(login: ProviderLogin, client: RentalProvider) -> list[Rental]:
        listed = await client.instances(context.cluster)
        hosts = [one for one in listed if one.cluster == context.cluster and one.permanent and one.state != "stopped"]
        return [host_rental(one, login.name, found, client.abilities.billing, now) for one in hosts]

    answers, failures = await ask_all(open_accounts(context.spec), running_hosts)
    for error in failures.values():
        raise error
    return summary([host for hosts in answers.values() for host in hosts], (), now, month)


async def _read_as_user(context: Context, month: str | None) -> CostResult:
    """The costs that the rental service publishes: all sums, and the user's own jobs."""
    async with context.controller_host() as host:
        report = await read_public_report(context, host)
        user = (await host.run(("id", "-un"), timeout=COST_TIMEOUT_S, root=False)).text.strip()
    months = sorted(report.costs)
    costs = report.costs.get(month or (months[-1] if months else ""))
    if costs is None:
        raise UsageError(
            f"the costs of {month} are in the ledger, which only the operator reads",
            hint=f"use one of {', '.join(months)}, or ask the operator for `shoal cost --month {month}`",
        )
    costs = replace(costs, jobs=tuple(job for job in costs.jobs if job.user == user))
    budgets = {name: Budget.model_validate(budget) for name, budget in report.budgets.items()}
    return CostResult(context.cluster, costs, Budget.model_validate(report.budget), budgets)


def _make_error(host: str, output: str, error_text: str) -> LedgerError:
    try:
        answer = json.loads(output)
        return LedgerError(f"{host}: {answer['error']}", hint=str(answer.get("fix", "")))
    except (ValueError, KeyError, TypeError):
        last_line = (error_text.strip() or output.strip() or "no output").splitlines()[-1]
        return LedgerError(f"cannot read the costs on {host}: {last_line}", hint="run `shoal up`")
