"""What every user may know of renting: offers with their prices, and costs. A file that the service writes for them.

It has no secret in it, and of jobs nothing that Slurm does not show to users anyway: names and users. Providers are
asked once an hour; else the offers are those of the last order. Of one that does not answer, the report has the choices
of the spec, with the prices of our table.
"""

from __future__ import annotations

import asyncio
import json
import os
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any

from shoal.cloud.providers.api import Offer
from shoal.cloud.providers.prices import prices
from shoal.cloud.rental import known_fields
from shoal.cloud.service.context import ServiceContext, log
from shoal.cloud.service.costs import CostReport, collect_costs, decode, encode
from shoal.cloud.service.offers import OfferCatalog
from shoal.errors import ShoalError
from shoal.remote.agent.file_io import write_atomic
from shoal.spec.rental import Budget, OfferChoice, RentedSet

REPORT_INTERVAL_S = 60.0
"""While machines are rented."""
IDLE_REPORT_INTERVAL_S = 600.0

OFFERS_MAX_AGE_S = 3600.0

KnownOffers = Callable[[RentedSet], Sequence[tuple[OfferChoice, Sequence[Offer]]]]


@dataclass(frozen=True)
class PublicReport:
    """Offers and costs, as of a time."""

    at: float
    offers: tuple[Offer, ...] = ()
    """What the cluster can rent."""
    costs: Mapping[str, CostReport] = field(default_factory=dict)
    """Of this month and the last, by month: `2026-11`."""
    budget: Mapping[str, Any] = field(default_factory=dict)
    """Of the whole cluster, as the file has it."""
    budgets: Mapping[str, Mapping[str, Any]] = field(default_factory=dict)
    """Of nodesets."""

    def as_json(self) -> str:
        values = {"at": self.at, "budget": dict(self.budget), "budgets": {**self.budgets}}
        offers = [asdict(offer) for offer in self.offers]
        return json.dumps(
            {**values, "offers": offers, "costs": {k: json.loads(encode(v)) for k, v in self.costs.items()}}
        )


def parse_report(text: str) -> PublicReport:
    """The report in the file. Raises ValueError."""
    data = json.loads(text)
    if not isinstance(data, dict) or not isinstance(data.get("at"), int | float):
        raise ValueError("this is not a report of shoal-elastic.service")
    try:
        return PublicReport(
            at=data["at"],
            offers=tuple(Offer(**known_fields(Offer, offer)) for offer in data["offers"]),
            costs={month: decode(json.dumps(costs)) for month, costs in data["costs"].items()},
            budget=data["budget"],
            budgets=data["budgets"],
        )
    except (KeyError, TypeError, AttributeError) as error:
        raise ValueError(f"this is not a report of shoal-elastic.service: {error}") from None


def rentable_offers(
    sets: Mapping[str, RentedSet], kinds: Mapping[str, str], known_offers: KnownOffers
) -> tuple[Offer, ...]:
    """What the nodesets may be rented from, each offer once: as its provider listed it, else as the spec names it."""
    table = prices()
    offers: dict[tuple[str, ...], Offer] = {}
    for nodeset in sets.values():
        for choice, listed in known_offers(nodeset):
            named = Offer(choice.provider, choice.type or "", choice.region or "", choice.zone or "", choice.market)
            kind = kinds.get(choice.provider, choice.provider)
            for offer in table.fill(kind, listed or ([named] if choice.type else [])):
                offers.setdefault(offer.identity, offer)
    return tuple(offers.values())


def make_report(
    context: ServiceContext, kinds: Mapping[str, str], known_offers: KnownOffers, costs: Sequence[CostReport]
) -> PublicReport:
    return PublicReport(
        at=context.clock.now(),
        offers=rentable_offers(context.sets, kinds, known_offers),
        costs={report.month: report for report in costs},
        budget=_limits(context.budget),
        budgets={name: _limits(nodeset.budget) for name, nodeset in context.sets.items() if nodeset.budget},
    )


def _limits(budget: Budget | None) -> dict[str, Any]:
    return budget.model_dump(exclude_defaults=True) if budget else {}


def last_month(now: float) -> str:
    first = datetime.fromtimestamp(now, UTC).replace(day=1)
    return f"{first - timedelta(days=1):%Y-%m}"


async def publish_reports(
    context: ServiceContext, kinds: Mapping[str, str], catalog: OfferCatalog, paths: Sequence[Path]
) -> None:
    """Write the files again and again, forever."""
    problem = ""
    while True:
        try:
            now = context.clock.now()
            # In a thread: Slurm's record of ended jobs may be long.
            costs = await asyncio.to_thread(collect_costs, ("", last_month(now)), now)
            for nodeset in context.sets.values():
                await catalog.refresh(nodeset, OFFERS_MAX_AGE_S)
            report = make_report(context, kinds, catalog.known, costs).as_json().encode()
            for path in paths:
                write_atomic(str(path), report, 0o644, os.geteuid(), os.getegid())
            problem = ""
        except (ShoalError, OSError, ValueError) as error:  # retried, and nothing else waits for it
            if problem != str(error):
                log.warning("cannot publish costs and offers: %s", error)
            problem = str(error)
        waited_s = 0.0
        while waited_s < (REPORT_INTERVAL_S if context.ledger.live() else IDLE_REPORT_INTERVAL_S):
            await asyncio.sleep(REPORT_INTERVAL_S)
            waited_s += REPORT_INTERVAL_S
