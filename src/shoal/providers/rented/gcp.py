"""Google Compute Engine: whole virtual machines, ordered in bulk, which Google itself ends at their deadline.

An order is an operation that takes seconds to fail: out of stock and over quota are told by it, not by the answer to
the order. So `create` follows it for a while, and asks the list for what became of each machine.
"""

from __future__ import annotations

import asyncio
import time
from collections import Counter
from collections.abc import AsyncIterator, Iterator, Sequence
from dataclasses import replace
from itertools import groupby

from shoal.errors import ProviderError
from shoal.providers.prices import prices
from shoal.providers.rental import Abilities, Account, Billing, Offer, Order, Outcome, Query, Rented, Trouble
from shoal.providers.rented import gcp_words as words
from shoal.providers.rented.google_login import GoogleLogin
from shoal.providers.rented.http import Api, ApiError, Body

BASE = "https://compute.googleapis.com/compute/v1"
PAGE = 500
FOLLOW_SECONDS = 90.0
"""So long an order is followed. What is out of stock is told within half a minute."""
DELETES_AT_ONCE = 16
GPU_FAMILIES = "name eq (a2|a3|a4|a4x|g2|g4)-.*"


class GoogleCompute:
    """Rents from one project."""

    abilities = Abilities(
        user=words.USER,
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
        self._api = Api(account, BASE, understand=words.understand, bearer=login.bearer)
        self._failures: Counter[frozenset[str]] = Counter()
        """How often the order of these tokens has failed for good."""

    async def offers(self, query: Query) -> list[Offer]:
        """What Google has in its zones. It does not tell what is in stock."""
        filters = GPU_FAMILIES
        if query.types:
            machines = sorted({words.split_type(name)[0] for name in query.types})
            filters = " OR ".join(f'(name = "{name}")' for name in machines)
        offers: list[Offer] = []
        async for machine in self._everywhere("machineTypes", filters):
            zone = words.last_part(machine.text("zone"))
            name = machine.text("name")
            types = [one for one in query.types if words.split_type(one)[0] == name] or [name]
            for type_ in types:
                offer = words.offer_of(self._account.name, machine, zone, type_, "on-demand")
                offers += [one for one in (offer, replace(offer, market="spot")) if query.admits(one)]
        return prices().fill(self._account.kind, offers)

    async def create(self, orders: Sequence[Order]) -> list[Outcome]:
        outcomes: dict[str, Outcome] = {}
        for alike in _alike(orders):
            fitting = [order for order in alike if words.name_of(order)]
            outcomes |= {order.token: _unnameable(order) for order in alike}
            if fitting:
                outcomes |= await self._order(fitting)
        return [outcomes[order.token] for order in orders]

    async def rented(self, cluster: str) -> list[Rented]:
        mine = f"labels.{words.CLUSTER_LABEL}={cluster}"
        return [words.rented_of(one) async for one in self._everywhere("instances", mine)]

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
        offer, tokens = orders[0].offer, frozenset(order.token for order in orders)
        place = f"{self._project}/zones/{offer.zone}" if offer.zone else f"{self._project}/regions/{offer.region}"
        try:
            operation = await self._api.ask(
                "POST",
                f"{place}/instances/bulkInsert",
                params={"requestId": words.request_id(orders, self._failures[tokens])},
                json=words.bulk_insert(orders, self._account.settings),
                creates=True,
            )
            made, errors = await self._ended(place, operation, len(orders))
        except ApiError as error:
            if error.trouble is not Trouble.CONFLICT:
                return dict.fromkeys(tokens, replace(error.outcome(), retry_after=_until_next_minute(error)))
            made, errors = 0, [("alreadyExists", error.message)]
        if made >= len(orders):
            return {order.token: Outcome(words.name_of(order)) for order in orders}
        outcomes = await self._found(orders, made, errors)
        if all(outcome.trouble is not Trouble.AMBIGUOUS for outcome in outcomes.values()):
            self._failures[tokens] += 1
        return outcomes

    async def _ended(self, place: str, operation: Body, wanted: int) -> tuple[int, list[words.Error]]:
        """How many machines an order that was taken has made, and why not all of them."""
        try:
            operation = await self._followed(place, operation)
            made, errors = words.created_count(operation), words.operation_errors(operation)
            if made < wanted and not errors:
                errors = await self._errors_of_parts(operation)
            return made, errors
        except ApiError as error:  # there may be machines, whatever this says
            raise ApiError(error.message, Trouble.AMBIGUOUS, retry_after=error.retry_after) from error

    async def _followed(self, place: str, operation: Body) -> Body:
        """The operation when it has ended."""
        pause, ends = 0.1, time.monotonic() + FOLLOW_SECONDS
        while operation.text("status") != "DONE":
            if time.monotonic() > ends:
                raise operation.wrong("the order is still under way")
            await asyncio.sleep(pause)
            pause = min(2.0, pause * 2)
            operation = await self._api.ask("GET", f"{place}/operations/{operation.text('name')}")
        return operation

    async def _errors_of_parts(self, operation: Body) -> list[words.Error]:
        """Where some machines were made and some were not, the operations of these say why."""
        group = operation.text("operationGroupId", "")
        places = operation.piece_or_empty("instancesBulkInsertOperationMetadata").piece_or_empty("perLocationStatus")
        errors: list[words.Error] = []
        for place, _ in places.items() if group else []:
            path = f"{self._project}/{place}/operations"
            async for page in self._pages(path, f'operationGroupId="{group}"'):
                errors += [error for one in page.rows_or_none("items") for error in words.operation_errors(one)]
        return errors

    async def _found(self, orders: Sequence[Order], made: int, errors: list[words.Error]) -> dict[str, Outcome]:
        """Those of the orders whose machine is there are filled, whoever made it; the others failed of `errors`."""
        try:
            listed = {one.token for one in await self.rented(orders[0].cluster) if one.state in ("pending", "up")}
        except ProviderError as error:
            return {order.token: Outcome("", Trouble.AMBIGUOUS, message=error.message) for order in orders}
        there = [order for order in orders if order.token in listed]
        outcomes = {order.token: Outcome(words.name_of(order)) for order in there}
        for order in orders:
            failed = words.outcome_of(errors)
            if len(there) < made:
                failed = Outcome("", Trouble.AMBIGUOUS, message=f"of {made} that were made {len(there)} are listed")
            elif failed.trouble is Trouble.CONFLICT and words.name_of(order) not in failed.message:
                failed = replace(failed, trouble=Trouble.TRANSIENT)  # one name that is taken fails them all
            outcomes.setdefault(order.token, failed)
        return outcomes

    async def _delete(self, machine: Rented) -> Outcome:
        try:
            for zone in [machine.zone] if machine.zone else await self._zones(machine.region):
                await self._delete_in(zone, machine.id)
        except ApiError as error:
            return replace(error.outcome(machine.id), retry_after=_until_next_minute(error))
        return Outcome(machine.id)

    async def _delete_in(self, zone: str, name: str) -> None:
        try:
            await self._api.ask("DELETE", f"{self._project}/zones/{zone}/instances/{name}")
        except ApiError as error:
            if error.status != 404:
                raise

    async def _zones(self, region: str) -> list[str]:
        """Where in a region a machine may be that was ordered there, and that no list has shown yet."""
        found = await self._api.ask("GET", f"{self._project}/regions/{region}")
        return [words.last_part(str(zone.value)) for zone in found.rows("zones")]

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

    async def _pages(self, path: str, filters: str, **more: str) -> AsyncIterator[Body]:
        params: dict[str, str | int] = {"filter": filters, "maxResults": PAGE, **more}
        while True:
            page = await self._api.ask("GET", path, params=params)
            yield page
            if not page.text("nextPageToken", ""):
                return
            params["pageToken"] = page.text("nextPageToken")


def _alike(orders: Sequence[Order]) -> Iterator[list[Order]]:
    """Orders that one call can carry: alike in all but node and token."""

    def what(order: Order) -> str:
        return repr(replace(order, node="", token=""))

    for _, alike in groupby(sorted(orders, key=what), key=what):
        yield list(alike)


def _unnameable(order: Order) -> Outcome:
    name = f"{order.node}--{order.token}"
    return Outcome(
        "", Trouble.INVALID, message=f"Google takes no machine called {name!r}: lower case, digits, hyphens, at most 63"
    )


def _until_next_minute(error: ApiError) -> float:
    """Google counts calls by the minute."""
    if error.retry_after or error.trouble is not Trouble.RATE:
        return error.retry_after
    return 60 - time.time() % 60
