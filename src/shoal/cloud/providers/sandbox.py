"""The sandbox as a rental provider, through a `shoal simulate sandbox` server."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, get_args

from shoal.cloud.providers import api
from shoal.cloud.providers.api import FailureKind
from shoal.cloud.providers.http import ApiClient, HttpProvider
from shoal.cloud.providers.responses import ApiError, Body, Refusal, refusal_by_code
from shoal.errors import ProviderError

STATES: dict[str, api.InstanceState] = {
    "booting": "pending",
    "running": "up",
    "failed": "error",
    "stopping": "stopping",
}
REFUSALS_BY_CODE = {
    "capacity": Refusal(FailureKind.CAPACITY),
    "quota": Refusal(FailureKind.QUOTA),
    "balance": Refusal(FailureKind.BALANCE, "provider"),
    "auth": Refusal(FailureKind.AUTH, "provider"),
    "rate": Refusal(FailureKind.RATE, "provider"),
    "conflict": Refusal(FailureKind.CONFLICT),
    "invalid": Refusal(FailureKind.INVALID),
}


class SandboxRentalProvider(HttpProvider):
    """Implements `shoal.cloud.providers.api.RentalProvider`."""

    abilities = api.Abilities(
        user="root",
        notice_s=30,
        idempotent="token",
        at_once=100,
        boot_s=300,
        grace_s=30,
    )

    def __init__(self, account: api.ProviderLogin) -> None:
        if not account.url:
            raise ProviderError(
                f"provider account {account.name} has no url", hint="start `shoal simulate sandbox`, and set its `url`"
            )
        api = ApiClient(account, "http://localhost/v1", read_error=read_error, retry_after=lambda: 1.0)
        super().__init__(account, api)

    async def offers(self, query: api.Query) -> list[api.Offer]:
        body = await self._api.request("GET", "/types")
        region = body.text("region")
        offers = [
            self._offer(kind, region, zone, market)
            for kind in body.rows("types")
            for zone in kind.rows("zones")
            for market in get_args(api.Market)
            if kind.object("usd_hour").has(market)
        ]
        return [offer for offer in offers if query.admits(offer)]

    async def create(self, orders: Sequence[api.RentalOrder]) -> list[api.RequestOutcome]:
        machines = [_order_body(order) for order in orders]
        try:
            body = await self._api.request("POST", "/machines", json={"machines": machines}, creates=True)
            outcomes = {one.text("token"): _outcome(one) for one in body.rows("machines")}
        except ApiError as error:
            return [error.outcome() for _ in orders]
        for order in orders:
            lost = body.error(f"the answer lacks the machine with token {order.token!r}")
            outcomes.setdefault(order.token, lost.outcome())
        return [outcomes[order.token] for order in orders]

    async def instances(self, cluster: str) -> list[api.RentedInstance]:
        pages = self._api.pages("/machines", "after", lambda page: page.text("next", ""))
        machines = [_instance(one) async for page in pages for one in page.rows("machines")]
        return [one for one in machines if one.cluster == cluster]

    async def delete(self, instances: Sequence[api.RentedInstance]) -> list[api.RequestOutcome]:
        if not instances:
            return []
        try:
            body = await self._api.request("POST", "/machines/delete", json={"ids": [one.id for one in instances]})
            done = {one.value for name in ("deleted", "unknown") for one in body.rows(name)}
        except ApiError as error:
            return [error.outcome(one.id) for one in instances]
        missing = api.RequestOutcome(failure=FailureKind.TRANSIENT, message="the answer does not mention this machine")
        return [api.RequestOutcome(one.id) if one.id in done else missing for one in instances]

    def _offer(self, kind: Body, region: str, zone: Body, market: api.Market) -> api.Offer:
        return api.Offer(
            provider=self._account.name,
            type=kind.text("name"),
            region=region,
            zone=zone.text("name"),
            market=market,
            usd_hour=kind.object("usd_hour").price(market),
            gpu=kind.text("gpu", ""),
            gpus=int(kind.number("gpus", 0)),
            gpu_memory_gb=int(kind.number("gpu_memory_gb", 0)),
            cpus=int(kind.number("cpus")),
            memory_gb=int(kind.number("memory_gb")),
            available="yes" if zone.number("free") > 0 else "no",
        )


def read_error(status: int, answer: Body) -> Refusal | None:
    return _refusal(answer.object("error"))


def _refusal(error: Body) -> Refusal | None:
    return refusal_by_code(REFUSALS_BY_CODE, [(error.text("code"), error.text("message", ""))])


def _order_body(order: api.RentalOrder) -> dict[str, Any]:
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


def _outcome(one: Body) -> api.RequestOutcome:
    if not one.has("error"):
        return api.RequestOutcome(one.text("id"), usd_hour=one.price_or_none("usd_hour"))
    refusal = _refusal(one.object("error"))
    return (refusal or Refusal(FailureKind.AMBIGUOUS, message=one.object("error").text("code"))).outcome()


def _instance(one: Body) -> api.RentedInstance:
    labels = one.object_or_empty("labels")
    return api.RentedInstance.listed(
        one.text("id"),
        (labels.text("cluster", ""), labels.text("node", ""), one.text("token", "")),
        one.text("state"),
        STATES,
        host=one.text("address", ""),
        port=one.port("port", 22),
        user=one.text("user", "root"),
        type=one.text("type", ""),
        region="sandbox",
        zone=one.text("zone", ""),
        market="spot" if one.text("market", "") == "spot" else "on-demand",
        usd_hour=one.price_or_none("usd_hour"),
        created=one.number_or_none("created"),
        ending=one.flag("preempted", False),
    )
