"""What a person sees of rented machines and their money: offers, costs, and what is given back."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping
from typing import Any

from rich.console import Console
from rich.markup import escape

from shoal.cli.as_json import plain
from shoal.cli.columns import Columns
from shoal.cli.say import show_findings
from shoal.elastic.money import dollars, micros, told
from shoal.errors import ShoalError
from shoal.providers.rental import Offer
from shoal.spec.words import printable
from shoal.verbs.cost import CostResult, Limit
from shoal.verbs.offers import OffersResult
from shoal.verbs.reap import Holding, Look, ReapResult

ROWS = 40
"""So many offers, and so many jobs, are shown; --json has all of them."""


def show_offers(console: Console, result: OffersResult) -> None:
    _silent(console, result.failures)
    if not result.offers:
        console.print("nothing of that kind is offered" + " by those that answered" * bool(result.failures))
        return
    rows: dict[tuple[str, ...], list[Offer]] = {}
    for offer in result.offers:
        rows.setdefault(_all_but_where(offer), []).append(offer)
    titles = ("provider", "type", "market", "GPUs", "price of", "stock")
    table = Columns(*titles, "$/hour", "$/GPU", "where", right=("$/hour", "$/GPU"), wraps=("where",))
    for cells, offers in list(rows.items())[:ROWS]:
        told = [escape(printable(cell)) for cell in (*cells, ", ".join(map(_where, offers)))]
        table.add_row(*told, style="dim" if offers[0].available == "no" else "")
    same = table.fold_same(console, ("provider", "market", "price of", "stock"))
    if same:
        console.print(f"of all of them: {same}\n", highlight=False)
    console.print(table)
    if len(rows) > ROWS:
        console.print(f"\nand {len(rows) - ROWS} more; --json shows all", highlight=False)
    if any(offers[0].usd_hour is None for offers in list(rows.values())[:ROWS]):
        console.print(f"\n{UNPRICED}", highlight=False, soft_wrap=True)


def _all_but_where(offer: Offer) -> tuple[str, ...]:
    gpus = f"{offer.gpus} × {offer.gpu}" if offer.gpus else "none"
    day = offer.as_of or ("now" if offer.usd_hour is not None else "")
    return offer.provider, offer.type, offer.market, gpus, day, AVAILABLE[offer.available], *_prices(offer)


def _where(offer: Offer) -> str:
    return offer.zone if offer.zone.startswith(offer.region) else f"{offer.region} {offer.zone}".strip()


UNPRICED = "?: neither the provider nor Shoal's table knows the price. Under a budget or a max_price it is not rented."
AVAILABLE = {"yes": "there", "low": "few left", "no": "none left", "unknown": "not told"}


def show_cost(console: Console, result: CostResult) -> None:
    costs, whole = result.costs, result.budget
    machines = f"{costs.machines} machine" + "s" * (costs.machines != 1)
    console.print(f"[bold]{result.cluster}[/]: {machines}\n", highlight=False)
    table = _table("", right=("", "of"))
    table.add_row("now, an hour", told(costs.per_hour), _of(whole.per_hour))
    table.add_row("today, by UTC", told(costs.today), _of(whole.per_day))
    table.add_row(costs.month, told(costs.total), _of(whole.per_month), style="bold")
    console.print(table)
    if costs.total:
        _parts(console, "nodeset", costs.nodesets, {name: _of(one.per_month) for name, one in result.budgets.items()})
        _parts(console, "user", {**costs.users, "(starting)": costs.starting, "(idle)": costs.idle})
        _jobs(console, result)
    if costs.unpriced:
        console.print(f"\nnot in these sums, as their price is unknown: {', '.join(costs.unpriced)}", highlight=False)
    if costs.unattributed:
        console.print(f"\n[yellow]![/] not known by user and job: {escape(costs.unattributed)}", highlight=False)


def cost_json(result: CostResult) -> dict[str, Any]:
    """The same for scripts: dollars, to the millionth."""
    costs = result.costs
    return {
        "cluster": result.cluster,
        "month": costs.month,
        "machines": costs.machines,
        "per_hour": dollars(costs.per_hour),
        "today": dollars(costs.today),
        "total": dollars(costs.total),
        "nodesets": {name: dollars(part) for name, part in costs.nodesets.items()},
        "users": {name: dollars(part) for name, part in costs.users.items()},
        "jobs": [{"id": job.id, "user": job.user, "name": job.name, "usd": dollars(job.micros)} for job in costs.jobs],
        "starting": dollars(costs.starting),
        "idle": dollars(costs.idle),
        "unpriced": list(costs.unpriced),
        "unattributed": costs.unattributed,
        "budget": _limits(result.budget),
        "budgets": {name: _limits(one) for name, one in result.budgets.items()},
    }


def show_look(console: Console, look: Look) -> None:
    """What is about to go."""
    _silent(console, look.failures)
    show_findings(console, look.findings)
    if not look.found:
        if not look.failures and not look.findings:
            console.print(f"{look.cluster}: no provider has a machine of this cluster", highlight=False)
        return
    _machines(console, look.found)


def show_reap(console: Console, result: ReapResult) -> None:
    _silent(console, result.failures)
    show_findings(console, result.findings)
    if result.remaining:
        console.print("still there, or unknown:")
        _machines(console, result.remaining)
    gone = f"{len(result.gone)} machine" + "s" * (len(result.gone) != 1)
    mark = "[green]✓[/]" if result.clean else "[yellow]![/]"
    after = "no provider has one any more" if result.clean else "run `shoal reap` again"
    console.print(f"{mark} {result.cluster}: {gone} given back; {after}", highlight=False)


def holdings_json(found: Iterable[Holding]) -> list[dict[str, Any]]:
    return [{"account": one.account, **plain(one.machine)} for one in found]


def _machines(console: Console, found: Iterable[Holding]) -> None:
    table = _table("provider", "machine", "node", "type", "where", "state", right=("$/hour",))
    for one in found:
        machine = one.machine
        price = "" if machine.usd_hour is None else told(micros(machine.usd_hour))
        cells = (one.account, machine.id, machine.node, machine.type, machine.zone or machine.region, machine.raw_state)
        table.add_row(*(escape(printable(cell)) for cell in (*cells, price)))
    console.print(table)


def _parts(console: Console, title: str, parts: Mapping[str, int], limits: Mapping[str, str] | None = None) -> None:
    console.print()
    table = _table(title, right=("cost", *(("of",) if limits else ())))
    for name, part in parts.items():
        if part:
            table.add_row(escape(printable(name)), told(part), *([limits.get(name, "")] if limits else ()))
    console.print(table)


def _jobs(console: Console, result: CostResult) -> None:
    jobs = result.costs.jobs
    if not jobs:
        return
    console.print()
    table = _table("job", "user", "name", right=("cost",))
    for job in jobs[:ROWS]:
        table.add_row(*(escape(printable(cell)) for cell in (job.id, job.user, job.name)), told(job.micros))
    console.print(table)
    if len(jobs) > ROWS:
        rest = told(sum(job.micros for job in jobs[ROWS:]))
        console.print(f"and {len(jobs) - ROWS} more jobs for {rest}; --json shows all", highlight=False)


def _silent(console: Console, failures: Mapping[str, ShoalError]) -> None:
    """The providers that did not answer, each with what to do about it."""
    for name, error in failures.items():
        said = error.message.removeprefix(f"{name}: ")
        console.print(f"[red]✗[/] {name}: {escape(said)}", highlight=False, soft_wrap=True)
        if error.hint:
            console.print(f"    fix: {escape(error.hint)}", highlight=False, soft_wrap=True)


def _prices(offer: Offer) -> tuple[str, str]:
    if offer.usd_hour is None:
        return "?", "?"
    amount = micros(offer.usd_hour)
    return told(amount).removeprefix("$"), told(amount // offer.gpus).removeprefix("$") if offer.gpus else ""


def _of(limit: int | None) -> str:
    return "" if limit is None else told(limit)


def _limits(limit: Limit) -> dict[str, float]:
    return {name: dollars(value) for name, value in vars(limit).items() if value is not None}


def _table(*titles: str, right: Collection[str] = ()) -> Columns:
    return Columns(*titles, *right, right=right, wraps=("type", "machine", "region", "where", "name"))
