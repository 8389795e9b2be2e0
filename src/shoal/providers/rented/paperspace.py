"""Paperspace, v1 of its API: whole virtual machines, which have no tags and get their keys from a startup script.

A machine's name, `c-<cluster>--<node>--<epoch>-<token>`, is all that marks it as ours. Its startup script is a thing of
its own: it has the machine's name and goes with it. What went wrong is told by events, not by a machine's state.
"""

from __future__ import annotations

import base64
import contextlib
import re
import time
from collections.abc import AsyncIterator, Mapping, Sequence
from dataclasses import replace
from typing import Any

from shoal.providers.prices import prices
from shoal.providers.rental import Abilities, Account, Billing, Offer, Order, Outcome, Query, Rented, State, Trouble
from shoal.providers.rented.body import ApiError, Body, without_none
from shoal.providers.rented.http import Api, ApiRenter, each
from shoal.providers.rented.refusals import Refusal, by_words

BASE = "https://api.paperspace.com/v1"
USER = "paperspace"
PAGE = 120
FOLLOW_SECONDS = 20.0
"""So long an order is followed until Paperspace has begun with it, or has failed."""
FAILED = ("error", "cancelled")
"""How the event of an order ends that came to nothing."""
SCRIPT_GRACE = 900.0
"""A startup script without a machine is left alone so long: its machine may be on its way."""
EVENT_SLACK = 60.0
"""An order's event may be a little older than its machine."""
DISKS = (50, 100, 250, 500, 1000, 2000)
REGIONS = {"NY2": "East Coast (NY2)", "CA1": "West Coast (CA1)", "AMS1": "Europe (AMS1)"}
"""The code by which a place is known -> what the API calls it."""
TEMPLATES = {"H100x8": "t7vp562h", "H100": "tilqt47t", "A100-80Gx8": "tvimtol9", "A100-80G": "tqqsxr6b"}
"""Ubuntu with the driver of a family of GPUs."""
GPU_TEMPLATE, CPU_TEMPLATE = "twnlo3zj", "t0nspur5"
STATES: dict[str, State] = {"serviceready": "up", "ready": "up", "stopping": "stopping", "off": "stopped"}
"""All others, those that we do not know too, are of a machine that is not up yet: no reason to give it back."""
WORDS = {
    r"out of capacity": Refusal(Trouble.CAPACITY),
    r"quota|(machine|account|team)\b.*\blimit|limit\b.*\b(reached|exceeded)": Refusal(
        Trouble.QUOTA, "provider", hint="ask Paperspace to raise the account's limit"
    ),
    r"payment|balance|credit card": Refusal(
        Trouble.BALANCE, "provider", hint="see to the account's payment in Paperspace's console"
    ),
}
"""What Paperspace says where it has no code of its own for it."""


class Paperspace(ApiRenter):
    """Implements `shoal.providers.rental.Renter`."""

    abilities = Abilities(
        user=USER,
        idempotent="none",
        at_once=1,
        billing=Billing(step=3600),
        boots_with="script",
        boot_seconds=1200,
        grace_seconds=300,
    )

    def __init__(self, account: Account) -> None:
        super().__init__(account, Api(account, BASE, understand=understand))

    async def offers(self, query: Query) -> list[Offer]:
        """What our table knows of Paperspace's machines, and which of them it has now: it lists none itself."""
        # A region goes by the name that it was asked for by, of the two that it has.
        regions = [one for one in query.regions if code_of(one) in REGIONS] if query.regions else sorted(REGIONS)
        types = sorted(set(query.types) or {row.type for row in prices() if row.kind == self._account.kind})
        blank = [Offer(self._account.name, name, region) for name in types for region in regions]
        wanted = [offer for offer in prices().fill(self._account.kind, blank) if query.admits(offer)]
        return await each(self._with_availability, wanted)

    async def create(self, orders: Sequence[Order]) -> list[Outcome]:
        return [await self._create(order) for order in orders]

    async def rented(self, cluster: str) -> list[Rented]:
        every = [_rented(one) async for one in self._all("/machines") if not one.has("dtDeleted")]
        found = [one for one in every if one.cluster == cluster]
        failures = await self._failures(found)
        return [
            replace(one, state="error", raw_state=f"{one.raw_state}: {failures[one.id]}") if one.id in failures else one
            for one in found
        ]

    async def delete(self, rented: Sequence[Rented]) -> list[Outcome]:
        outcomes = [await self._api.remove(f"/machines/{one.id}", one.id) for one in rented]
        for cluster in sorted({one.cluster for one in rented if one.cluster}):
            with contextlib.suppress(ApiError):  # a script costs nothing; the next delete sweeps again
                await self._sweep(cluster, {one.token for one, done in zip(rented, outcomes, strict=True) if done.ok})
        return outcomes

    async def _create(self, order: Order) -> Outcome:
        if "--" in order.node or "--" in order.token:
            return Outcome("", Trouble.INVALID, message=f"{order.node}: two hyphens in a row part the name's fields")
        name = f"c-{order.cluster}--{order.node}--{int(time.time())}-{order.token}"
        script = {"name": name, "script": startup_script(order), "isRunOnce": True}
        try:
            # A script that nobody knows of costs nothing, and is swept like any other without a machine.
            script_id = (await self._api.ask("POST", "/startup-scripts", json=script)).text("id")
        except ApiError as error:
            return error.outcome()
        outcome = await self._order(order, name, script_id)
        if outcome.trouble not in (None, Trouble.AMBIGUOUS):
            await self._api.remove(f"/startup-scripts/{script_id}")
        return outcome

    async def _order(self, order: Order, name: str, script_id: str) -> Outcome:
        wanted = machine_order(order, name, script_id, self._account.settings)
        try:
            answer = await self._api.ask("POST", "/machines", json=wanted, creates=True)
            machine = answer.piece("data")
            id, usd_hour = machine.text("id"), machine.maybe_number("usageRate")
            event = answer.piece("event")
            # One that stays new is as good as begun: lists tell.
            path = f"/machine-events/{event.text('id')}"
            event = await self._api.followed(event, path, lambda it: it.text("state") != "new", FOLLOW_SECONDS)
        except ApiError as error:
            return error.outcome()
        if event.text("state") in FAILED:
            await self._api.remove(f"/machines/{id}")
            message = event.text("error", "") or f"the order ended as {event.text('state')}"
            found = by_words(WORDS, message) or Refusal(Trouble.AMBIGUOUS)
            return replace(found, message=f"{self._account.name}: {message}").outcome()
        return Outcome(id, usd_hour=usd_hour)

    async def _failures(self, machines: Sequence[Rented]) -> dict[str, str]:
        """A machine whose making failed stays in its first state for ever; what is said of it is in its events."""
        pending = {one.id for one in machines if one.raw_state == "provisioning"}
        since = min((one.created or 0.0 for one in machines if one.id in pending), default=0.0) - EVENT_SLACK
        failures: dict[str, str] = {}
        if not pending:
            return failures
        async for event in self._all("/machine-events", orderBy="dtCreated", order="desc"):
            machine = event.text("machineId", "")
            if event.text("name") == "create" and machine in pending:
                pending.discard(machine)
                if event.text("state") in FAILED:
                    failures[machine] = event.text("error", "") or event.text("state")
            if not pending or (event.time("dtCreated") or since) < since:
                break
        return failures

    async def _sweep(self, cluster: str, gone: set[str]) -> None:
        """Remove the startup scripts of machines that are gone, and old ones whose machine never came."""
        there = {one.token for one in await self.rented(cluster)} - gone
        for script in [one async for one in self._all("/startup-scripts")]:  # pages shift under who deletes
            owner, _, token, born = read_name(script.text("name"))
            if owner != cluster or token in there:
                continue
            if token in gone or time.time() - (born or 0.0) > SCRIPT_GRACE:
                await self._api.remove(f"/startup-scripts/{script.text('id')}")

    async def _with_availability(self, offer: Offer) -> Offer:
        asked = {"machineType": offer.type, "region": REGIONS[code_of(offer.region)]}
        there = (await self._api.ask("GET", "/machine-availability", params=asked)).flag("available")
        return replace(offer, available="yes" if there else "no")

    async def _all(self, path: str, **more: str) -> AsyncIterator[Body]:
        async for page in self._api.pages(path, "after", _next_page, limit=PAGE, **more):
            for one in page.rows("items"):
                yield one


def machine_order(order: Order, name: str, script_id: str, settings: Mapping[str, str]) -> Any:
    """The body that orders a machine."""
    wanted = {
        "name": name,
        "machineType": order.offer.type,
        "templateId": order.image or settings.get("template") or template_of(order.offer),
        "region": REGIONS.get(code_of(order.offer.region), order.offer.region),
        "diskSize": next((size for size in DISKS if size >= order.disk_gb), DISKS[-1]),
        "publicIpType": "dynamic",
        "startupScriptId": script_id,
        "startOnCreate": True,
        "emailPassword": False,
        "takeInitialSnapshot": False,
        "networkId": settings.get("network"),
    }
    return without_none(wanted)


def startup_script(order: Order) -> str:
    """Lets the controller in, and then does what the order says."""
    key, home = order.public_key.strip().replace("'", ""), f"/home/{USER}/.ssh"
    lines = [
        "#!/bin/sh",
        f"install -d -m 0700 -o {USER} -g {USER} {home}",
        f"printf '%s\\n' '{key}' >> {home}/authorized_keys",
        f"chown {USER}:{USER} {home}/authorized_keys",
        f"chmod 0600 {home}/authorized_keys",
    ]
    if order.user_data:
        packed = base64.b64encode(order.user_data.encode()).decode()
        lines += ["script=$(mktemp)", f"echo {packed} | base64 -d > $script", "chmod 0700 $script", "exec $script"]
    return "\n".join(lines) + "\n"


def template_of(offer: Offer) -> str:
    """Which system suits a machine."""
    return CPU_TEMPLATE if re.fullmatch(r"C\d+", offer.type) else TEMPLATES.get(offer.type, GPU_TEMPLATE)


def code_of(region: str) -> str:
    """`NY2` of `East Coast (NY2)`, which is how some answers have it, and of `NY2`."""
    found = re.search(r"\((\w+)\)", region)
    return found[1] if found else region


def read_name(name: str) -> tuple[str, str, str, float | None]:
    """Cluster, node, token and time of birth that a name of ours tells; empty for a name that is not."""
    found = re.fullmatch(r"c-(.+)--(.+)--(\d+)-(.+)", name)
    return (found[1], found[2], found[4], float(found[3])) if found else ("", "", "", None)


def understand(status: int, answer: Body) -> Refusal | None:
    """What an error of Paperspace's means: by its words where its status says too little, else by its status."""
    code, message = answer.text("code", ""), answer.text("message")
    found = by_words(WORDS, message) if status < 500 and status not in (401, 429) else None
    return replace(found or Refusal(), message=f"{code}: {message}" if code else message)


def _next_page(page: Body) -> str:
    return page.text("nextPage") if page.flag("hasMore") else ""


def _rented(one: Body) -> Rented:
    state = one.text("state")
    cluster, node, token, born = read_name(one.text("name"))
    return Rented(
        id=one.text("id"),
        cluster=cluster,
        node=node,
        token=token,
        state=STATES.get(state, "pending"),
        raw_state=state,
        host=one.text("publicIp", ""),
        user=USER,
        type=one.text("machineType", ""),
        region=code_of(one.text("region", "")),
        usd_hour=one.maybe_number("usageRate"),
        created=one.time("dtCreated") or born,
    )
