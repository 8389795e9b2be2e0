"""Providers in memory, for verbs that query all of them."""

import asyncio
import json
from collections.abc import Sequence
from dataclasses import dataclass, field, replace

from tests.support.fake_world import LAB, spec_of

from shoal.cloud.providers.api import (
    Abilities,
    FailureKind,
    Offer,
    ProviderLogin,
    Query,
    RentalOrder,
    RentedInstance,
    RequestOutcome,
)
from shoal.errors import ProviderError
from shoal.hosts.api import Result
from shoal.remote import python_command
from shoal.remote.rental_ledger import NO_LEDGER
from shoal.verbs.context import Context
from shoal.verbs.rentals import LedgerRental
from shoal_simulators.fake_host import FakeConnector, FakeHost

READ_LEDGER = python_command("rental_ledger")
RENTING = (
    LAB.replace(
        "partitions:\n",
        "  burst: {offers: [{provider: lambda, type: gpu_1x_a10, image: debian-12}, "
        "{provider: cloud, type: g2-standard-4, image: debian-12}], max: 4}\n"
        "partitions:\n  burst: {nodesets: [burst]}\n",
    )
    + """
providers:
  lambda: {key: env:PATH}
  cloud: {kind: gcp, key: env:PATH, project: p}
budget: {per_hour: 20, per_month: 500}
"""
)
"""The keys are in a variable that is always set. No provider gets them."""


def context(text: str = RENTING, ledger: FakeHost | None = None) -> Context:
    """A cluster with those accounts. Its ledger is empty by default."""
    return Context(spec_of(text), connector=FakeConnector(ledger or controller(())))


def ledger_row(rental: LedgerRental) -> dict[str, object]:
    """A rental as `rental_ledger.py` prints it."""
    names = ("token", "node", "account", "id", "state", "age", "of_now")
    return {name: getattr(rental, name) for name in names}


def controller(held: Sequence[LedgerRental] | None) -> FakeHost:
    """A controller whose ledger holds these machines; with None, one that has none."""
    told = json.dumps({"machines": [ledger_row(one) for one in held or ()]}).encode()
    return FakeHost("c1", {READ_LEDGER: Result(NO_LEDGER) if held is None else told})


def machine(id: str, node: str = "burst1", **values: object) -> RentedInstance:
    made = RentedInstance(
        id, "reef", node, f"token-{id}", "up", "active", type="gpu_1x_a10", region="us-west-1", usd_hour=1.29
    )
    return replace(made, **values)  # type: ignore[arg-type]


@dataclass
class FakeRenter:
    """One provider: what it offers, what it has, and how it misbehaves."""

    listed: list[Offer] = field(default_factory=list)
    machines: list[RentedInstance] = field(default_factory=list)
    down: bool = False
    slow: bool = False
    lists_that_fail: int = 0
    deletes_that_fail: int = 0
    lag: int = 0
    """A machine that was deleted is listed so often still."""
    hidden: int = 0
    """The first lists do not show anything."""
    refuses: FailureKind | None = None
    abilities: Abilities = field(default_factory=Abilities)
    deleted: list[str] = field(default_factory=list)
    closed: int = 0
    _going: dict[str, int] = field(default_factory=dict)

    async def offers(self, query: Query) -> list[Offer]:
        await self._answer()
        return self.listed

    async def create(self, orders: Sequence[RentalOrder]) -> list[RequestOutcome]:
        raise NotImplementedError("nothing here orders")

    async def instances(self, cluster: str) -> list[RentedInstance]:
        await self._answer()
        if self.lists_that_fail:
            self.lists_that_fail -= 1
            raise ProviderError("lambda: GET /instances: 503", hint="wait")
        if self.hidden:
            self.hidden -= 1
            return []
        for id, left in list(self._going.items()):
            self._going[id] = left - 1
            if left <= 0:
                self.machines = [one for one in self.machines if one.id != id]
        return [one for one in self.machines if one.cluster == cluster]

    async def delete(self, instances: Sequence[RentedInstance]) -> list[RequestOutcome]:
        await self._answer()
        if self.refuses:
            return [RequestOutcome(one.id, self.refuses, message="you may not delete") for one in instances]
        if self.deletes_that_fail:
            self.deletes_that_fail -= 1
            return [RequestOutcome(one.id, FailureKind.TRANSIENT, message="try again") for one in instances]
        for one in instances:
            self.deleted.append(one.id)
            self._going.setdefault(one.id, self.lag)
            stopping = replace(one, state="stopping", raw_state="terminating")
            self.machines = [stopping if other.id == one.id else other for other in self.machines]
        return [RequestOutcome(one.id) for one in instances]

    async def ensure_key(self, cluster: str, public_key: str) -> str:
        return ""

    async def close(self) -> None:
        self.closed += 1

    async def _answer(self) -> None:
        if self.slow:
            await asyncio.sleep(3600)
        if self.down:
            raise ProviderError("cloud: cannot be reached: connection refused", hint="see that it is up")


def opener(**renters: FakeRenter):  # type: ignore[no-untyped-def]
    """Makes the fake renter of an account, by the account's name."""

    def opened(account: ProviderLogin) -> FakeRenter:
        return renters[account.name]

    return opened


@dataclass
class NoSleep:
    """Time passes at once, and is counted."""

    slept: float = 0.0

    async def __call__(self, seconds: float) -> None:
        self.slept += seconds
        await asyncio.sleep(0)
