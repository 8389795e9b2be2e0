"""The commands about rented machines and their money: offers, cost, reap."""

from __future__ import annotations

import sys
from typing import TYPE_CHECKING, Annotated

import typer

from shoal.cli.completion import words
from shoal.cli.options import Cluster, File, Json
from shoal.cli.session import PARTLY, Session
from shoal.errors import Interrupted, UsageError

if TYPE_CHECKING:
    from shoal.providers.rental import Market
    from shoal.verbs.reap import Look


def offers(
    gpu: Annotated[str, typer.Option(help="Only GPUs with this in their name, such as H100.")] = "",
    count: Annotated[int, typer.Option(help="At least this many GPUs in one machine.", min=0)] = 0,
    provider: Annotated[list[str] | None, typer.Option(help="Only this account or provider; may be repeated.")] = None,
    type_: Annotated[
        list[str] | None, typer.Option("--type", help="Only this type of machine; may be repeated.")
    ] = None,
    region: Annotated[list[str] | None, typer.Option(help="Only this region; may be repeated.")] = None,
    market: Annotated[
        str | None,
        typer.Option(help="on-demand or spot. Default: both.", autocompletion=words("on-demand", "spot")),
    ] = None,
    file: File = None,
    cluster: Cluster = None,
    json: Json = False,
) -> None:
    """Show which machines can be rented now, cheapest first.

    All accounts of the file are asked. A price that a provider does not tell comes from Shoal's table, with its day.
    """
    with Session(json) as session:
        from shoal.cli.render_money import show_offers
        from shoal.providers.rental import Query
        from shoal.verbs.offers import offers as verb

        query = Query(gpu, count, tuple(type_ or ()), tuple(region or ()), (), _market(market))
        result = session.run(verb(session.open(file, cluster), query, tuple(provider or ())))
        session.finish_value(result) if json else show_offers(session.console, result)
        if result.failures:
            session.status = PARTLY


def cost(
    month: Annotated[str | None, typer.Option(help="A month other than this one, such as 2026-10.")] = None,
    file: File = None,
    cluster: Cluster = None,
    json: Json = False,
) -> None:
    """Show what rented machines cost: now, today, this month.

    By nodeset, user and job, with what starting and idle machines cost.
    """
    with Session(json) as session:
        from shoal.cli.render_money import cost_json, show_cost
        from shoal.verbs.cost import cost as verb

        result = session.run(verb(session.open(file, cluster), month))
        session.finish_value(cost_json(result)) if json else show_cost(session.console, result)


def reap(
    yes: Annotated[bool, typer.Option("--yes", "-y", help="Do not ask.")] = False,
    force: Annotated[
        bool, typer.Option("--force", help="Also remove from the ledger what no provider's list ever showed.")
    ] = False,
    file: File = None,
    cluster: Cluster = None,
    json: Json = False,
) -> None:
    """Give back every rented machine of the cluster.

    For when the controller is gone: it needs the file and the keys, nothing else. A provider's list may lag behind an
    order, so without the controller's ledger it looks for some minutes before it says that there is nothing. While the
    controller runs, it rents again what jobs wait for; `shoal down` is the way then.
    """
    with Session(json) as session:
        from shoal.cli.render_money import holdings_json, show_look, show_reap
        from shoal.verbs.reap import look
        from shoal.verbs.reap import reap as verb

        context = session.open(file, cluster)
        seen = session.run(look(context))
        if not json:
            show_look(session.console, seen)
        if not seen.found and not (force and seen.unseen):
            if json:
                said = {"gone": [], "remaining": holdings_json(seen.unseen)}
                session.finish_value(
                    {"cluster": seen.cluster, **said, "failures": seen.failures, "findings": seen.findings}
                )
            session.status = PARTLY if seen.failures or seen.findings else 0
            return
        _confirm(seen, yes)
        result = session.run(verb(context, force=force))
        if json:
            said = {"gone": holdings_json(result.gone), "remaining": holdings_json(result.remaining)}
            session.finish_value(
                {"cluster": result.cluster, **said, "failures": result.failures, "findings": result.findings}
            )
        else:
            show_reap(session.console, result)
        if not result.clean:
            session.status = PARTLY


def _confirm(seen: Look, yes: bool) -> None:
    if yes:
        return
    if seen.found:
        what = f"deletes {len(seen.found)} rented machines of cluster {seen.cluster}, with what is on their disks"
    else:
        what = f"removes {len(seen.unseen)} machines of cluster {seen.cluster} from its ledger, unproved"
    if not sys.stdin.isatty():
        raise UsageError(f"this {what}", hint="use --yes")
    if not typer.confirm(f"This {what}. Go on?", err=True):
        raise Interrupted("nothing was changed")


def _market(word: str | None) -> Market | None:
    if word is None:
        return None
    if word == "spot":
        return "spot"
    if word == "on-demand":
        return "on-demand"
    raise UsageError(f"--market {word}: there is no such market", hint="use on-demand or spot")


def register(app: typer.Typer) -> None:
    """Add these commands."""
    app.command()(offers)
    app.command()(cost)
    app.command()(reap)
