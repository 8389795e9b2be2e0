"""The sandbox as a provider that rents machines out, through a `shoal simulate sandbox` server."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, get_args

from shoal.errors import ProviderError
from shoal.providers.rental import Abilities, Account, Market, Offer, Order, Outcome, Query, Rented, State, Trouble
from shoal.providers.rented.body import ApiError, Body
from shoal.providers.rented.http import Api, ApiRenter
from shoal.providers.rented.refusals import Refusal, by_code

STATES: dict[str, State] = {
    "booting": "pending",
    "running": "up",
    "failed": "error",
    "stopping": "stopping",
}
TROUBLES = {
    "capacity": Refusal(Trouble.CAPACITY),
    "quota": Refusal(Trouble.QUOTA),
    "balance": Refusal(Trouble.BALANCE, "provider"),
    "auth": Refusal(Trouble.AUTH, "provider"),
    "rate": Refusal(Trouble.RATE, "provider"),
    "conflict": Refusal(Trouble.CONFLICT),
    "invalid": Refusal(Trouble.INVALID),
}


class ElasticSandbox(ApiRenter):
    """Implements `shoal.providers.rental.Renter`."""

    abilities = Abilities(
        user="root",
        notice_seconds=30,
        idempotent="token",
        at_once=100,
        boots_with="user_data",
        boot_seconds=300,
        grace_seconds=30,
    )

    def __init__(self, account: Account) -> None:
        if not account.url:
            raise ProviderError(
                f"account {account.name} has no address", hint="start `shoal simulate sandbox`, and give its `url`"
            )
        api = Api(account, "http://localhost/v1", understand=understand, retry_after=lambda: 1.0)
        super().__init__(account, api)

    async def offers(self, query: Query) -> list[Offer]:
        body = await self._api.ask("GET", "/types")
        region = body.text("region")
        found = [
            self._offer(kind, region, zone, market)
            for kind in body.rows("types")
            for zone in kind.rows("zones")
            for market in get_args(Market)
            if kind.piece("usd_hour").has(market)
        ]
        return [offer for offer in found if query.admits(offer)]

    async def create(self, orders: Sequence[Order]) -> list[Outcome]:
        wanted = [_wanted(order) for order in orders]
        try:
            body = await self._api.ask("POST", "/machines", json={"machines": wanted}, creates=True)
            told = {one.text("token"): _outcome(one) for one in body.rows("machines")}
            return [told[order.token] for order in orders]
        except ApiError as error:
            return [error.outcome() for _ in orders]
        except KeyError as error:
            lost = body.wrong(f"the answer lacks the machine of token {error}")
            return [told.get(order.token, lost.outcome()) for order in orders]

    async def rented(self, cluster: str) -> list[Rented]:
        pages = self._api.pages("/machines", "after", lambda page: page.text("next", ""))
        found = [_rented(one) async for page in pages for one in page.rows("machines")]
        return [one for one in found if one.cluster == cluster]

    async def delete(self, rented: Sequence[Rented]) -> list[Outcome]:
        if not rented:
            return []
        try:
            body = await self._api.ask("POST", "/machines/delete", json={"ids": [one.id for one in rented]})
            done = {one.value for name in ("deleted", "unknown") for one in body.rows(name)}
        except ApiError as error:
            return [error.outcome(one.id) for one in rented]
        missed = Outcome(trouble=Trouble.TRANSIENT, message="the answer says nothing of this machine")
        return [Outcome(one.id) if one.id in done else missed for one in rented]

    def _offer(self, kind: Body, region: str, zone: Body, market: Market) -> Offer:
        return Offer(
            provider=self._account.name,
            type=kind.text("name"),
            region=region,
            zone=zone.text("name"),
            market=market,
            usd_hour=kind.piece("usd_hour").number(market),
            gpu=kind.text("gpu", ""),
            gpus=int(kind.number("gpus", 0)),
            gpu_memory_gb=int(kind.number("gpu_memory_gb", 0)),
            cpus=int(kind.number("cpus")),
            memory_gb=int(kind.number("memory_gb")),
            available="yes" if zone.number("free") > 0 else "no",
        )


def understand(status: int, answer: Body) -> Refusal | None:
    return _meaning(answer.piece("error"))


def _meaning(error: Body) -> Refusal | None:
    return by_code(TROUBLES, [(error.text("code"), error.text("message", ""))])


def _wanted(order: Order) -> dict[str, Any]:
    return {
        "token": order.token,
        "name": f"{order.cluster}-{order.node}-{order.token[:12]}",
        "type": order.offer.type,
        "zone": order.offer.zone,
        "market": order.offer.market,
        "public_key": order.public_key,
        "user_data": order.user_data,
        "lifetime": order.lifetime,
        "labels": {"cluster": order.cluster, "node": order.node},
    }


def _outcome(one: Body) -> Outcome:
    if not one.has("error"):
        return Outcome(one.text("id"), usd_hour=one.maybe_number("usd_hour"))
    known = _meaning(one.piece("error"))
    return (known or Refusal(Trouble.AMBIGUOUS, message=one.piece("error").text("code"))).outcome()


def _rented(one: Body) -> Rented:
    labels, state = one.piece_or_empty("labels"), one.text("state")
    return Rented(
        id=one.text("id"),
        cluster=labels.text("cluster", ""),
        node=labels.text("node", ""),
        token=one.text("token", ""),
        state=STATES.get(state, "pending"),
        raw_state=state,
        host=one.text("address", ""),
        port=int(one.number("port", 22)),
        user=one.text("user", "root"),
        type=one.text("type", ""),
        region="sandbox",
        zone=one.text("zone", ""),
        market="spot" if one.text("market", "") == "spot" else "on-demand",
        usd_hour=one.maybe_number("usd_hour"),
        created=one.maybe_number("created"),
        ending=one.flag("preempted", False),
    )
