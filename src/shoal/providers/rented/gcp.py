"""Google Compute Engine: whole virtual machines, ordered in bulk, which Google itself ends at their deadline.

An order is an operation that takes seconds to fail: out of stock and over quota are told by it, not by the answer to
the order. So `create` follows it for a while, and asks the list for what became of each machine. All machines of one
`bulkInsert` get the same labels; only their names differ. So the label `shoal-cluster` says whose a machine is, and its
name, `<node>--<token>`, which one.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator, Sequence
from dataclasses import replace

from shoal.errors import ProviderError
from shoal.providers.prices import prices
from shoal.providers.rental import Abilities, Account, Billing, Offer, Order, Outcome, Query, Rented, Trouble
from shoal.providers.rented.gcp_words import (
    CLUSTER_LABEL,
    USER,
    Error,
    bulk_insert,
    created_count,
    last_part,
    name_of,
    offer_of,
    operation_errors,
    outcome_of,
    places,
    rented_of,
    request_id,
    split_type,
    understand,
    unnameable,
)
from shoal.providers.rented.google_login import GoogleLogin
from shoal.providers.rented.http import Api, ApiError, Body

BASE = "https://compute.googleapis.com/compute/v1"
PAGE = 500
FOLLOW_SECONDS = 90.0
"""So long an order is followed. What is out of stock is told within half a minute."""
DELETES_AT_ONCE = 16
GPU_FAMILIES = "name eq (a2|a3|a4|a4x|g2|g4)-.*"


class GoogleCompute:
    """Rents from one project. Implements `shoal.providers.rental.Renter`."""

    abilities = Abilities(
        user=USER,
        spot=True,
        notice_seconds=30,
        idempotent="token",
        at_once=1000,
        deadline=True,
        stopped_bills=False,  # its disk does, a few cents a day
        billing=Billing(step=1, least=60, from_up=True),
        boots_with="user_data",
        boot_seconds=600,
        grace_seconds=90,
    )

    def __init__(self, account: Account) -> None:
        login = GoogleLogin(account)
        self._account = account
        self._project = f"/projects/{login.project}"
        self._api = Api(account, BASE, understand=understand, bearer=login.bearer, retry_after=_until_next_minute)

    async def offers(self, query: Query) -> list[Offer]:
        """What Google has in its zones. It does not tell what is in stock."""
        filters = GPU_FAMILIES
        if query.types:
            machines = sorted({split_type(name)[0] for name in query.types})
            filters = " OR ".join(f'(name = "{name}")' for name in machines)
        offers: list[Offer] = []
        async for machine in self._everywhere("machineTypes", filters):
            name = machine.text("name")
            for type_ in [one for one in query.types if split_type(one)[0] == name] or [name]:
                offer = offer_of(self._account.name, machine, type_)
                offers += [one for one in (offer, replace(offer, market="spot")) if query.admits(one)]
        return prices().fill(self._account.kind, offers)

    async def create(self, orders: Sequence[Order]) -> list[Outcome]:
        fitting = [order for order in orders if name_of(order)]
        outcomes = await self._order(fitting) if fitting else {}
        return [outcomes.get(order.token) or unnameable(order) for order in orders]

    async def rented(self, cluster: str) -> list[Rented]:
        return [rented_of(one) async for one in self._everywhere("instances", f"labels.{CLUSTER_LABEL}={cluster}")]

    async def delete(self, rented: Sequence[Rented]) -> list[Outcome]:
        at_once = asyncio.Semaphore(DELETES_AT_ONCE)

        async def one(machine: Rented) -> Outcome:
            async with at_once:
                return await self._delete(machine)

        return list(await asyncio.gather(*(one(machine) for machine in rented)))

    async def ensure_key(self, cluster: str, public_key: str) -> str:
        return ""

    async def close(self) -> None:
        await self._api.close()

    async def _order(self, orders: Sequence[Order]) -> dict[str, Outcome]:
        """One bulkInsert, and what became of each of its machines."""
        offer = orders[0].offer
        place = f"{self._project}/zones/{offer.zone}" if offer.zone else f"{self._project}/regions/{offer.region}"
        path, params = f"{place}/instances/bulkInsert", {"requestId": request_id(orders)}
        body = bulk_insert(orders, self._account.settings)
        try:
            operation = await self._api.ask("POST", path, params=params, json=body, creates=True)
            made, errors = await self._ended(place, operation, len(orders))
        except ApiError as error:
            if error.trouble is not Trouble.CONFLICT:
                return {order.token: error.outcome() for order in orders}
            made, errors = 0, [("alreadyExists", error.message)]
        if made >= len(orders):
            return {order.token: Outcome(name_of(order)) for order in orders}
        return await self._found(orders, made, errors)

    async def _ended(self, place: str, operation: Body, wanted: int) -> tuple[int, list[Error]]:
        """How many machines an order that was taken has made, and why not all of them."""
        path = f"{place}/operations/{operation.text('name')}"
        try:
            operation = await self._api.followed(
                operation, path, lambda it: it.text("status") == "DONE", FOLLOW_SECONDS
            )
            if operation.text("status") != "DONE":
                raise operation.wrong("the order is still under way")
            made, errors = created_count(operation), operation_errors(operation)
            if made < wanted and not errors:
                errors = await self._errors_of_parts(operation)
            return made, errors
        except ApiError as error:
            raise error.left_open() from error

    async def _errors_of_parts(self, operation: Body) -> list[Error]:
        """Where some machines were made and some were not, the operations of these say why."""
        group = operation.text("operationGroupId", "")
        errors: list[Error] = []
        for place, _ in places(operation) if group else []:
            async for page in self._pages(f"{self._project}/{place}/operations", f'operationGroupId="{group}"'):
                errors += [error for one in page.rows_or_none("items") for error in operation_errors(one)]
        return errors

    async def _found(self, orders: Sequence[Order], made: int, errors: list[Error]) -> dict[str, Outcome]:
        """Those of the orders whose machine is there are filled, whoever made it; the others failed of `errors`."""
        try:
            listed = {one.token for one in await self.rented(orders[0].cluster) if one.state in ("pending", "up")}
        except ProviderError as error:
            return {order.token: Outcome("", Trouble.AMBIGUOUS, message=error.message) for order in orders}
        there = [order for order in orders if order.token in listed]
        outcomes = {order.token: Outcome(name_of(order)) for order in there}
        for order in orders:
            failed = outcome_of(errors)
            if len(there) < made:
                failed = Outcome("", Trouble.AMBIGUOUS, message=f"of {made} that were made {len(there)} are listed")
            elif failed.trouble is Trouble.CONFLICT and name_of(order) not in failed.message:
                failed = replace(failed, trouble=Trouble.TRANSIENT)  # one name that is taken fails them all
            outcomes.setdefault(order.token, failed)
        return outcomes

    async def _delete(self, machine: Rented) -> Outcome:
        zones = [machine.zone]
        if not machine.zone:  # ordered in a region, and no list has shown yet where it is
            try:
                region = await self._api.ask("GET", f"{self._project}/regions/{machine.region}")
                zones = [last_part(str(zone.value)) for zone in region.rows("zones")]
            except ApiError as error:
                return error.outcome(machine.id)
        paths = [f"{self._project}/zones/{zone}/instances/{machine.id}" for zone in zones]
        outcomes = [await self._api.remove(path, machine.id) for path in paths]
        return next((one for one in outcomes if not one.ok), Outcome(machine.id))

    async def _everywhere(self, what: str, filters: str) -> AsyncIterator[Body]:
        """All there is of something, in all zones. A zone that did not answer makes the whole unknown."""
        async for page in self._pages(f"{self._project}/aggregated/{what}", filters, returnPartialSuccess="true"):
            page.text("kind")  # an answer without it is not Google's
            silent = [str(one.value) for one in page.rows_or_none("unreachables")]
            for zone, items in page.piece_or_empty("items").items():
                code = items.piece_or_empty("warning").text("code", "NO_RESULTS_ON_PAGE")
                if code != "NO_RESULTS_ON_PAGE":
                    silent.append(f"{zone} ({code})")
                for one in items.rows_or_none(what):
                    yield one
            if silent:
                raise ProviderError(
                    f"{self._account.name}: {', '.join(silent)} did not say what is there",
                    hint="Google's status page tells of outages; ask again later",
                )

    def _pages(self, path: str, filters: str, **more: str) -> AsyncIterator[Body]:
        return self._api.pages(path, "pageToken", _next_page, filter=filters, maxResults=PAGE, **more)


def _next_page(page: Body) -> str:
    return page.text("nextPageToken", "")


def _until_next_minute() -> float:
    """Google counts calls by the minute."""
    return 60 - time.time() % 60
