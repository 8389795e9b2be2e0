"""Vast.ai: containers on other people's machines, each offered by its own id and rented once.

A type is a GPU's name, with `8x ` before it for eight in one container; a region is a country. An order takes the
cheapest machine that is on offer then, and the next one if somebody else was faster. A machine is offered under several
ids, for its parts: one of them is tried, and none of a machine that was bad. Names are not unique and nothing is
idempotent: the label has our marks. An outbid machine is paused without notice, and its disk is billed until it is
deleted.
"""

from __future__ import annotations

import base64
import gzip
import re
import shlex
import time
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from shoal.cloud.providers import api
from shoal.cloud.providers.api import FailureKind
from shoal.cloud.providers.http import ApiClient, HttpProvider
from shoal.cloud.providers.prices import gpu_model
from shoal.cloud.providers.responses import ApiError, Body, Refusal, known_price, refusal_by_message
from shoal.remote import program_text

BASE = "https://console.vast.ai"
IMAGE = "debian:12"
PAGE, MAX_ASKS = 25, 3000
CPUS_AT_LEAST, MEMORY_GB_AT_LEAST = 4, 16
"""The minimum for each GPU: machines with less are not offered."""
FILTERS = {
    **{name: {"eq": True} for name in ("verified", "rentable")},
    **{name: {"eq": False} for name in ("rented", "external")},
    "direct_port_count": {"gte": 1},
    "inet_down": {"gte": 200},
    "cuda_max_good": {"gte": 12.4},
}
"""Which machines are asked for; those without a direct port never answer SSH."""
RELIABILITY = "0.97"
BID_FACTOR = 1.2
"""A bid at the minimum is outbid soon."""
HOURS_A_MONTH = 730
ASKS_MAX_AGE_S = 60.0
"""Searches are counted per minute and per day."""
MAX_TRIES = 5
"""So many machines are tried for one order."""
SCRIPT_LENGTH = 4096
STATES: dict[str, api.InstanceState] = {
    "running": "up",
    "exited": "stopped",
    "stopped": "stopped",
    "offline": "error",
    "unknown": "error",
    "failed": "error",
}
NO_ASK, NO_INSTANCE = "no_such_ask", "no_such_instance"
REFUSALS_BY_MESSAGE = {
    rf"{NO_ASK}|no longer available|not available": Refusal(FailureKind.CAPACITY),
    r"credit|balance|payment": Refusal(FailureKind.BALANCE, "provider", hint="add credit in Vast's console"),
    r"limit (reached|exceeded)|maximum number": Refusal(FailureKind.QUOTA, "provider"),
    r"search_quota_exceeded": Refusal(FailureKind.RATE, "provider"),
    r"invalid_price": Refusal(FailureKind.CAPACITY),
}


@dataclass(frozen=True)
class Ask:
    """One piece of one machine on offer."""

    id: int
    offer: api.Offer
    bid: float | None
    """The price that an interruptible machine is ordered with."""
    machine_id: str

    @property
    def price(self) -> float:
        """For comparing: an unknown price comes last, and is above every limit."""
        return float("inf") if self.offer.usd_hour is None else self.offer.usd_hour


class VastProvider(HttpProvider):
    """Implements `shoal.cloud.providers.api.RentalProvider`."""

    abilities = api.Abilities(
        container=True,
        user="root",
        system=api.System("debian", "12"),  # of IMAGE
        boots_with="args",
        create_interval=4.5,
        boot_s=900,
        grace_s=180,
    )

    def __init__(self, account: api.ProviderLogin) -> None:
        super().__init__(
            account, ApiClient(account, BASE, read_error=read_error, interval=1.0, retry_after=lambda: 5.0)
        )
        self._disk_gb = int(account.settings.get("disk_gb", 100))
        self._reliability = float(account.settings.get("reliability", RELIABILITY))
        self._image = account.settings.get("image", IMAGE)
        self._asks: dict[tuple[str, ...], tuple[float, list[Ask]]] = {}
        """By the identity of an offer: when they were listed, and the asks, cheapest first."""

    async def offers(self, query: api.Query) -> list[api.Offer]:
        """The cheapest machine of each type in each country."""
        asks: list[Ask] = []
        for market in (query.market,) if query.market else ("on-demand", "spot"):
            asks += await self._search(market, query.types, query.gpus)
        first: dict[tuple[str, ...], api.Offer] = {}
        for ask in asks:
            if ask.machine_id in query.unfit_machines:
                continue
            first.setdefault(ask.offer.identity, ask.offer)
        return [offer for offer in first.values() if query.admits(offer)]

    async def instances(self, cluster: str) -> list[api.RentedInstance]:
        pages = self._api.pages("/api/v1/instances/", "after_token", _next_page, limit=PAGE)
        listed = [_instance(one) async for page in pages for one in page.rows("instances")]
        return [one for one in listed if one.cluster == cluster]

    async def delete(self, instances: Sequence[api.RentedInstance]) -> list[api.RequestOutcome]:
        return [await self._destroy(one.id) for one in instances]

    async def _destroy(self, id: str) -> api.RequestOutcome:
        try:
            answer = await self._api.request("DELETE", f"/api/v0/instances/{id}/")
            if not answer.flag("success") and NO_INSTANCE not in answer.text("error", ""):
                raise answer.error(f"not deleted: {answer.text('msg', '')}", hint="")
        except ApiError as error:
            if error.status != 404 and NO_INSTANCE not in error.message:
                return error.outcome(id)
        return api.RequestOutcome(id)

    async def _search(self, market: api.Market, types: Sequence[str], gpus: int = 1) -> list[Ask]:
        """All machines on offer, cheapest first, each once in its type."""
        wanted: dict[str, Any] = {
            **FILTERS,
            "reliability2": {"gte": self._reliability},
            "type": "bid" if market == "spot" else "ondemand",
            "allocated_storage": self._disk_gb,
            "num_gpus": {"gte": max(1, gpus)},
            "order": [["dph_total", "asc"]],
            "limit": MAX_ASKS,
        }
        if types:
            wanted["gpu_name"] = {"in": sorted({split_type(one)[0] for one in types})}
            wanted["num_gpus"] = {"in": sorted({split_type(one)[1] for one in types})}
        body = await self._api.request("POST", "/api/v0/bundles/", json=wanted)
        asks = [ask for ask in (self._ask(row, market) for row in body.rows("offers")) if ask is not None]
        by_machine: dict[tuple[str, ...], Ask] = {}
        for ask in sorted(asks, key=lambda ask: ask.price):
            by_machine.setdefault((*ask.offer.identity, ask.machine_id or str(ask.id)), ask)
        asks = list(by_machine.values())
        found: dict[tuple[str, ...], list[Ask]] = {}
        for ask in asks:
            found.setdefault(ask.offer.identity, []).append(ask)
        for key, some in found.items():
            self._asks[key] = (time.monotonic(), some)
        return asks

    def _ask(self, row: Body, market: api.Market) -> Ask | None:
        """None for less than the minimum of CPUs or memory. Their memory is told for the whole machine."""
        count, gpu = int(row.number("num_gpus")), row.text("gpu_name")
        cores, share = row.number("cpu_cores", 0.0), row.number("cpu_cores_effective", 0.0)
        memory_gb = row.number("cpu_ram", 0.0) / 1024 * (share / cores if cores else 0.0)
        if count < 1 or share < CPUS_AT_LEAST * count or memory_gb < MEMORY_GB_AT_LEAST * count:
            return None
        bid = None
        price = row.price("dph_total")
        if market == "spot":
            bid = round(row.number("min_bid") * BID_FACTOR, 4)
            price = known_price(bid) and bid + row.number("storage_cost", 0.0) * self._disk_gb / HOURS_A_MONTH
        offer = api.Offer(
            provider=self._account.name,
            type=joined_type(gpu, count),
            region=country(row.text("geolocation", "")),
            market=market,
            usd_hour=round(price, 6) if price else None,
            gpu=gpu_model(gpu)[0],
            gpus=count,
            gpu_memory_gb=round(row.number("gpu_ram", 0.0) / 1024),
            cpus=CPUS_AT_LEAST * count,
            memory_gb=MEMORY_GB_AT_LEAST * count,
            available="yes",
        )
        return Ask(int(row.number("id")), offer, bid, machine_id(row))

    async def _create(self, order: api.RentalOrder) -> api.RequestOutcome:
        """Order the cheapest machine that costs no more than the offer."""
        offer, args = order.offer, boot_args(order, self._api.base)
        if len(args) > SCRIPT_LENGTH:
            message = f"{self._account.name}: the boot script has {len(args)} characters, Vast takes {SCRIPT_LENGTH}"
            return api.RequestOutcome(failure=FailureKind.INVALID, message=message)
        asks = await self._asks_for(order)
        refused: ApiError | None = None
        for ask in asks[:MAX_TRIES]:
            asks.remove(ask)  # rented or not, it is not asked for again
            try:
                return await self._order(ask, order, args)
            except ApiError as error:
                if error.failure is not FailureKind.CAPACITY:
                    raise
                refused = error
        self._asks.pop(offer.identity, None)
        if refused is not None:
            raise refused
        limit = "" if offer.usd_hour is None else f" for ${offer.usd_hour:.4f} or less"
        message = f"{self._account.name}: no {offer.type} in {offer.region}{limit}"
        return api.RequestOutcome(failure=FailureKind.CAPACITY, message=message)

    async def _asks_for(self, order: api.RentalOrder) -> list[Ask]:
        """What is on offer for this price or less, cheapest first; searched for if nothing recent is left."""
        offer = order.offer
        at, asks = self._asks.get(offer.identity, (float("-inf"), []))
        asks[:] = [ask for ask in asks if _fits(ask, order)]
        if not asks or time.monotonic() - at > ASKS_MAX_AGE_S:
            self._asks.pop(offer.identity, None)
            await self._search(offer.market, (offer.type,))
            _, asks = self._asks.get(offer.identity, (0.0, []))
            asks[:] = [ask for ask in asks if _fits(ask, order)]
        return asks

    async def _order(self, ask: Ask, order: api.RentalOrder, args: str) -> api.RequestOutcome:
        request: dict[str, Any] = {
            "client_id": "me",
            "image": order.image or self._image,
            "disk": max(8, order.disk_gb),
            "label": f"{order.cluster}--{order.node}--{order.token}",
            "runtype": "args",
            "onstart": "/bin/sh",
            "args": ["-c", args],
            "env": {"-p 22:22": "1"},
            "cancel_unavail": True,
        }
        if ask.bid is not None:
            request["price"] = ask.bid
        body = await self._api.request("PUT", f"/api/v0/asks/{ask.id}/", json=request, creates=True)
        if not body.flag("success", True):
            refusal = read_error(400, body)
            failure = refusal.failure if refusal and refusal.failure else FailureKind.AMBIGUOUS
            raise ApiError(f"{body.where}: {refusal.message if refusal else ''}", failure)
        return api.RequestOutcome(str(int(body.number("new_contract"))))


def boot_args(order: api.RentalOrder, base: str) -> str:
    """The container's command: authorizes the key, runs the order's script, starts sshd and waits.

    On TERM, which the watchdog sends, it deletes itself with the key that Vast gives each container: an ended container
    is billed for its disk.
    """
    lines = [program_text("boot_vast.sh", API=base), f"PUBLIC_KEY={shlex.quote(order.public_key.strip())}"]
    if order.user_data:
        lines += ["(umask 077; cat > /run/user-data) <<'shoal-end'", order.user_data.rstrip("\n"), "shoal-end"]
        lines += ["setsid sh /run/user-data"]
    lines += [program_text("boot_pod.sh"), "while :; do sleep 3600 & wait $!; done"]
    packed = base64.b64encode(gzip.compress("\n".join(lines).encode(), mtime=0)).decode()
    return f"(umask 077; echo {packed} | base64 -d | gzip -d > /run/shoal-boot); exec bash /run/shoal-boot"


def split_type(type: str) -> tuple[str, int]:
    """A GPU's name and count: `8x H100 SXM` is eight of them."""
    match = re.fullmatch(r"(\d+)x (.+)", type)
    return (match[2], int(match[1])) if match else (type, 1)


def joined_type(gpu: str, count: int) -> str:
    return gpu if count == 1 else f"{count}x {gpu}"


def machine_id(row: Body) -> str:
    """Of an offer or a container: the machine that it is a part of."""
    number = row.number_or_none("machine_id")
    return "" if number is None else str(int(number))


def country(place: str) -> str:
    """`US` of `Texas, US`."""
    return place.rpartition(",")[2].strip() or "unknown"


def read_error(status: int, answer: Body) -> Refusal | None:
    """What an error answer means. With `new_contract` in it, there is a machine all the same."""
    code, message = answer.text("error", ""), answer.text("msg", "")
    words = ": ".join(filter(None, (code, message)))
    if answer.has("new_contract"):
        return Refusal(FailureKind.AMBIGUOUS, message=words)
    if status in (401, 403, 429) or status >= 500:
        limit = refusal_by_message(REFUSALS_BY_MESSAGE, words) if status in (403, 429) else None
        return limit or Refusal(message=words)
    return refusal_by_message(REFUSALS_BY_MESSAGE, words) or Refusal(message=words)


def _fits(ask: Ask, order: api.RentalOrder) -> bool:
    limit = order.offer.usd_hour
    return ask.machine_id not in order.unfit_machines and (limit is None or ask.price <= limit)


def _next_page(page: Body) -> str:
    return page.text("next_token", "")


def _instance(one: Body) -> api.RentedInstance:
    host, port = _ssh_address(one)
    count = int(one.number("num_gpus", 1))
    return api.RentedInstance.listed(
        str(int(one.number("id"))),
        api.marks_in_name(one.text("label", "")),
        _state(one),
        STATES if host else {**STATES, "running": "pending"},  # shown before SSH has a port
        host=host,
        port=port,
        type=joined_type(one.text("gpu_name", ""), count) if one.has("gpu_name") else "",
        region=country(one.text("geolocation", "")),
        market="spot" if one.flag("is_bid", False) else "on-demand",
        usd_hour=one.price_or_none("dph_total"),
        created=one.number_or_none("start_date"),
        machine_id=machine_id(one),
    )


def _state(one: Body) -> str:
    """Vast's state. A paused machine still has the last state of its container."""
    if {one.text(name, "") for name in ("cur_state", "intended_status", "next_state")} == {"stopped"}:
        return "stopped"
    if "OCI runtime create failed" in one.text("status_msg", ""):
        return "failed"
    return one.text("actual_status", "") or "created"


def _ssh_address(one: Body) -> tuple[str, int]:
    mapped = one.object_or_empty("ports").first("22/tcp")
    if not one.has("public_ipaddr") or not mapped.has("HostPort"):
        return "", 22
    text = mapped.text("HostPort")
    if not re.fullmatch(r"[1-9]\d{0,4}", text) or int(text) > 65535:
        raise mapped.error("HostPort is not a port")
    return one.text("public_ipaddr").strip(), int(text)
