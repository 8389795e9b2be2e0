"""The commands about rented machines and their money: offers, cost, try, reap."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping
from typing import TYPE_CHECKING, Annotated, Any, cast

import typer
from rich.console import Console
from rich.markup import escape

from shoal import __version__
from shoal.cli.options import Yes, suggest, with_session
from shoal.cli.output import plain
from shoal.cli.screen import Columns, count, escape_text, group_by, print_fix, show_findings
from shoal.cli.session import PARTLY, Session, confirm
from shoal.cloud.providers.api import Market, Offer, Query, RentedInstance
from shoal.cloud.rental import dollars, format_dollars, format_known_cost, micros
from shoal.errors import ShoalError, UsageError
from shoal.spec.rental import Budget
from shoal.verbs.cost import CostResult
from shoal.verbs.provider_accounts import OffersResult
from shoal.verbs.reap import ReapPreview, ReapResult

if TYPE_CHECKING:
    from shoal.verbs.provider_trial import TryResult  # it imports all of `up`

ROWS = 40
"""So many offers, and so many jobs, are shown; --json has all of them."""


@with_session
def offers(
    gpu: Annotated[str, typer.Option(metavar="NAME", help="Only GPUs with this in their name, such as H100.")] = "",
    count: Annotated[int, typer.Option(metavar="NUMBER", help="At least this many GPUs per machine.", min=0)] = 0,
    provider: Annotated[
        list[str] | None, typer.Option(metavar="NAME", help="Only this provider or provider account; may be repeated.")
    ] = None,
    type_: Annotated[
        list[str] | None, typer.Option("--type", metavar="NAME", help="Only this type of machine; may be repeated.")
    ] = None,
    region: Annotated[list[str] | None, typer.Option(metavar="NAME", help="Only this region; may be repeated.")] = None,
    market: Annotated[
        str | None,
        typer.Option(
            metavar="WORD", help="on-demand or spot. Default: both.", autocompletion=suggest("on-demand", "spot")
        ),
    ] = None,
    *,
    session: Session,
) -> None:
    """Show which machines can be rented now, cheapest first.

    It asks all provider accounts in the file. Where a provider gives no price, it is from Shoal's table, with its date.
    Ordinary users see what the cluster can rent, as its rental service last saw it.
    """
    from shoal.verbs.provider_accounts import offers as verb

    if market not in (None, "on-demand", "spot"):
        raise UsageError(f"there is no market {market!r}", hint="use --market on-demand or --market spot")
    query = Query(gpu, count, tuple(type_ or ()), tuple(region or ()), (), cast("Market | None", market))
    result = session.run(verb(session.open(), query, tuple(provider or ())))
    if not session.finish(result, PARTLY if result.failures else 0):
        show_offers(session.console, result)


@with_session
def cost(
    month: Annotated[
        str | None, typer.Option(metavar="MONTH", help="Another month, such as 2026-10. Default: this month.")
    ] = None,
    *,
    session: Session,
) -> None:
    """Show what rented machines cost: now, today, this month.

    By nodeset, user and job, and what machines cost while they start or idle. Ordinary users see the sums and their own
    jobs, of this month and the last.
    """
    from shoal.verbs.cost import cost as verb

    result = session.run(verb(session.open(), month))
    if not session.finish(cost_json(result)):
        show_cost(session.console, result)


@with_session
def try_(
    provider: Annotated[str, typer.Argument(metavar="PROVIDER", help="The provider or provider account of the file.")],
    max_cost: Annotated[
        float, typer.Option(metavar="DOLLARS", help="The most that the trial may cost, in US dollars.", min=0.01)
    ] = 1.0,
    type_: Annotated[
        str, typer.Option("--type", metavar="NAME", help="This type of machine. Default: the cheapest with a GPU.")
    ] = "",
    yes: Yes = False,
    *,
    session: Session,
) -> None:
    """Rent one machine of a provider for minutes, and report how every step went.

    It becomes a node of your running cluster, which gets a nodeset `try` meanwhile, runs a job and is released. Ctrl-C
    releases it, too. The report has no key and no address: you can paste it into an issue.
    """
    from shoal.verbs.provider_trial import plan_trial, try_provider

    context = session.open(operator=True)
    plan = session.run(plan_trial(context, provider, max_cost, type_))
    offer = plan.offer
    effect = f"rents {offer.type} in {offer.place} for ${offer.usd_hour:.2f} an hour, at most ${plan.most_usd:.2f}"
    confirm(effect, f"This {effect}. Continue?", yes)
    result = session.run(try_provider(context, plan))
    if not session.finish(result, 0 if result.passed else 1):
        show_trial(session.console, result)


@with_session
def reap(
    yes: Yes = False,
    force: Annotated[
        bool, typer.Option("--force", help="Also remove rentals from the ledger that no provider ever listed.")
    ] = False,
    *,
    session: Session,
) -> None:
    """Release every rented machine of the cluster.

    Use it when the controller is lost: it needs only the file and the keys. A provider may list a new machine late, so
    without the controller's ledger it watches for some minutes before it reports that there is none. While the
    controller runs, it rents again what jobs wait for; use `shoal down` then.
    """
    from shoal.verbs.reap import preview
    from shoal.verbs.reap import reap as verb

    context = session.open(operator=True)
    reap_plan = session.run(preview(context))
    if not session.json:
        show_preview(session.console, reap_plan)
    if reap_plan.found:
        machines = f"{len(reap_plan.found)} rented machines of cluster {reap_plan.cluster}"
        effect = f"deletes {machines}, with what is on their disks"
    elif force and reap_plan.unlisted:
        effect = f"removes {len(reap_plan.unlisted)} machines of cluster {reap_plan.cluster} from its ledger, unproven"
    else:
        session.finish(
            _reap_json(reap_plan, (), reap_plan.unlisted),
            PARTLY if reap_plan.failures or reap_plan.findings else 0,
        )
        return
    confirm(effect, f"This {effect}. Continue?", yes)
    result = session.run(verb(context, force=force))
    if not session.finish(_reap_json(result, result.gone, result.remaining), 0 if result.clean else PARTLY):
        show_reap(session.console, result)


def show_trial(console: Console, result: TryResult) -> None:
    """The report of a trial, as plain lines that can be pasted."""
    console.print(
        f"shoal {__version__} at {result.provider}: {result.type} in {result.place}, {result.market},"
        f" ${result.usd_hour:.4f} an hour",
        markup=False,
        soft_wrap=True,
    )
    for step in result.steps:
        mark, error = ("failed", f": {step.error}") if step.error else ("ok", "")
        console.print(f"{mark:7}{step.seconds:7.1f} s  {step.name}{error}", markup=False, soft_wrap=True)
    for name, value in result.node.items():
        console.print(f"{name}: {value}", markup=False, soft_wrap=True)
    cost = "unknown" if result.usd is None else f"${result.usd:.6f} by the ledger; compare it with the provider's bill"
    console.print(f"cost: {cost}", markup=False, soft_wrap=True)


def show_offers(console: Console, result: OffersResult) -> None:
    _show_provider_errors(console, result.failures)
    if not result.offers:
        console.print("no such offers" + " from the providers that answered" * bool(result.failures))
        return
    rows = group_by(result.offers, _offer_cells)
    titles = ("provider", "type", "market", "GPUs", "price of", "stock")
    table = Columns(*titles, "$/hour", "$/GPU", "where", right=("$/hour", "$/GPU"), wraps=("where",))
    for cells, offers in list(rows.items())[:ROWS]:
        texts = [escape_text(cell) for cell in (*cells, ", ".join(map(_place, offers)))]
        table.add_row(*texts, style="dim" if offers[0].available == "no" else "")
    constant = table.drop_constant(console, ("provider", "market", "price of", "stock"))
    if constant:
        console.print(f"all of them: {constant}\n")
    console.print(table)
    if len(rows) > ROWS:
        console.print(f"\nand {len(rows) - ROWS} more; --json shows all")
    if any(offers[0].usd_hour is None for offers in list(rows.values())[:ROWS]):
        console.print(f"\n{UNPRICED}", soft_wrap=True)


def _offer_cells(offer: Offer) -> tuple[str, ...]:
    gpus = f"{offer.gpus} × {offer.gpu}" if offer.gpus else "none"
    day = offer.as_of or ("now" if offer.usd_hour is not None else "")
    return offer.provider, offer.type, offer.market, gpus, day, AVAILABLE[offer.available], *_format_prices(offer)


def _place(offer: Offer) -> str:
    return offer.zone if offer.zone.startswith(offer.region) else f"{offer.region} {offer.zone}".strip()


UNPRICED = "?: neither the provider nor Shoal's table has a price. With a budget or a max_price it is not rented."
AVAILABLE = {"yes": "yes", "low": "few", "no": "none", "unknown": "unknown"}


def show_cost(console: Console, result: CostResult) -> None:
    costs, budget = result.costs, result.budget
    console.print(f"[bold]{result.cluster}[/]: {count(costs.machines, 'machine')}\n")
    table = _make_table("", right=("", "of"))
    for title, amount, unpriced, limit in (
        ("now, an hour", costs.per_hour, costs.unpriced_now, budget.per_hour),
        ("today (UTC)", costs.today, costs.unpriced_today, budget.per_day),
        (costs.month, costs.total, len(costs.unpriced), budget.per_month),
    ):
        style = "bold" if title == costs.month else ""
        table.add_row(title, format_known_cost(amount, unpriced), _limit_text(limit), style=style)
    console.print(table)
    if costs.total:
        limits = {name: _limit_text(limit.per_month) for name, limit in result.budgets.items()}
        _show_costs(console, "nodeset", costs.nodesets, limits)
        _show_costs(console, "host", costs.hosts)
        _show_costs(console, "user", {**costs.users, "(starting)": costs.starting, "(idle)": costs.idle})
        _show_jobs(console, result)
    if costs.unpriced:
        console.print(f"\nnot included, because the price is unknown: {', '.join(costs.unpriced)}")
    if costs.unattributed:
        console.print(f"\n[yellow]![/] cannot be split by user and job: {escape(costs.unattributed)}")


def cost_json(result: CostResult) -> dict[str, Any]:
    """The costs for scripts: dollars, to the millionth."""
    costs = result.costs
    return {
        "cluster": result.cluster,
        "month": costs.month,
        "machines": costs.machines,
        "per_hour": dollars(costs.per_hour),
        "today": dollars(costs.today),
        "total": dollars(costs.total),
        "nodesets": {name: dollars(cost_micros) for name, cost_micros in costs.nodesets.items()},
        "hosts": {name: dollars(cost_micros) for name, cost_micros in costs.hosts.items()},
        "users": {name: dollars(cost_micros) for name, cost_micros in costs.users.items()},
        "jobs": [{"id": job.id, "user": job.user, "name": job.name, "usd": dollars(job.micros)} for job in costs.jobs],
        "starting": dollars(costs.starting),
        "idle": dollars(costs.idle),
        "unpriced": list(costs.unpriced),
        "unattributed": costs.unattributed,
        "budget": _limits(result.budget),
        "budgets": {name: _limits(limit) for name, limit in result.budgets.items()},
    }


def show_preview(console: Console, preview: ReapPreview) -> None:
    """What `reap` is about to release."""
    _show_provider_errors(console, preview.failures)
    show_findings(console, preview.findings)
    if preview.hosts:
        console.print("rented hosts, which only `shoal down` releases:")
        _show_instances(console, preview.hosts)
    if not preview.found:
        if not preview.failures and not preview.findings:
            other = "other " if preview.hosts else ""
            console.print(f"{preview.cluster}: no provider lists a {other}machine of this cluster")
        return
    _show_instances(console, preview.found)


def show_reap(console: Console, result: ReapResult) -> None:
    _show_provider_errors(console, result.failures)
    show_findings(console, result.findings)
    if result.remaining:
        console.print("still there, or unknown:")
        _show_instances(console, result.remaining)
    count_text = count(len(result.gone), "machine")
    mark = "[green]✓[/]" if result.clean else "[yellow]![/]"
    next_step = "no provider lists any more" if result.clean else "run `shoal reap` again"
    console.print(f"{mark} {result.cluster}: {count_text} released; {next_step}")


def _reap_json(
    result: ReapPreview | ReapResult, released: Iterable[RentedInstance], remaining: Iterable[RentedInstance]
) -> dict[str, Any]:
    machines = {"gone": _instances_json(released), "remaining": _instances_json(remaining)}
    problems = {"failures": result.failures, "findings": result.findings}
    return {"cluster": result.cluster, **machines, "hosts": _instances_json(result.hosts), **problems}


def _instances_json(instances: Iterable[RentedInstance]) -> list[dict[str, Any]]:
    return [{"account": instance.account, **plain(instance)} for instance in instances]


def _show_instances(console: Console, instances: Iterable[RentedInstance]) -> None:
    table = _make_table("provider", "machine", "node", "type", "where", "state", right=("$/hour",))
    for instance in instances:
        price = "?" if instance.usd_hour is None else format_dollars(micros(instance.usd_hour))
        location = instance.zone or instance.region
        cells = (instance.account, instance.id, instance.node, instance.type, location, instance.raw_state, price)
        table.add_row(*map(escape_text, cells))
    console.print(table)


def _show_costs(
    console: Console, title: str, costs: Mapping[str, int], limits: Mapping[str, str] | None = None
) -> None:
    if not any(costs.values()):
        return
    console.print()
    table = _make_table(title, right=("cost", *(("of",) if limits else ())))
    for name, cost_micros in costs.items():
        if cost_micros:
            table.add_row(escape_text(name), format_dollars(cost_micros), *([limits.get(name, "")] if limits else ()))
    console.print(table)


def _show_jobs(console: Console, result: CostResult) -> None:
    jobs = result.costs.jobs
    if not jobs:
        return
    console.print()
    table = _make_table("job", "user", "name", right=("cost",))
    for job in jobs[:ROWS]:
        table.add_row(*(escape_text(cell) for cell in (job.id, job.user, job.name)), format_dollars(job.micros))
    console.print(table)
    if len(jobs) > ROWS:
        rest_text = format_dollars(sum(job.micros for job in jobs[ROWS:]))
        console.print(f"and {len(jobs) - ROWS} more jobs for {rest_text}; --json shows all")


def _show_provider_errors(console: Console, failures: Mapping[str, ShoalError]) -> None:
    for name, error in failures.items():
        message = error.message.removeprefix(f"{name}: ")
        console.print(f"[red]✗[/] {name}: {escape(message)}", soft_wrap=True)
        print_fix(console, error.hint)


def _format_prices(offer: Offer) -> tuple[str, str]:
    if offer.usd_hour is None:
        return "?", "?"
    amount = micros(offer.usd_hour)
    per_gpu = format_dollars(amount // offer.gpus) if offer.gpus else ""
    return format_dollars(amount).removeprefix("$"), per_gpu.removeprefix("$")


def _limit_text(limit: float | None) -> str:
    return "" if limit is None else format_dollars(micros(limit))


def _limits(budget: Budget) -> dict[str, float]:
    limits = {name: getattr(budget, name) for name in ("per_hour", "per_day", "per_month")}
    return {name: dollars(micros(limit)) for name, limit in limits.items() if limit is not None}


def _make_table(*titles: str, right: Collection[str] = ()) -> Columns:
    return Columns(*titles, *right, right=right, wraps=("type", "machine", "region", "where", "name"))
