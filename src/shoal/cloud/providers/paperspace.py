"""Paperspace, API version 1: virtual machines without tags, which get their keys from a startup script.

Only a machine's name, `c-<cluster>--<node>--<epoch>-<token>`, marks it as ours. Its startup script is a resource of the
same name that is deleted with it. Failures are reported by events, not by a machine's state.
"""

from __future__ import annotations

import base64
import contextlib
import math
import re
import time
from collections.abc import AsyncIterator, Sequence
from dataclasses import replace
from typing import Any

from shoal.cloud.providers import api
from shoal.cloud.providers.api import FailureKind
from shoal.cloud.providers.http import ApiClient, HttpProvider, map_concurrently
from shoal.cloud.providers.prices import prices
from shoal.cloud.providers.responses import ApiError, Body, Refusal, drop_none, refusal_by_message

BASE = "https://api.paperspace.com/v1"
USER = "paperspace"
PAGE = 120
FOLLOW_TIMEOUT_S = 20.0
"""How long an order is polled until Paperspace has started it, or has failed."""
FAILED = ("error", "cancelled")
"""The states of the event of a failed order."""
SCRIPT_GRACE_S = 900.0
"""A startup script without a machine is kept for this time: its machine may be starting."""
EVENT_SLACK_S = 60.0
"""An order's event may be a little older than its machine."""
DISKS = (50, 100, 250, 500, 1000, 2000)
REGIONS = {"NY2": "East Coast (NY2)", "CA1": "West Coast (CA1)", "AMS1": "Europe (AMS1)"}
"""Region code -> the API's name of it."""
TEMPLATES = {"H100x8": "t7vp562h", "H100": "tilqt47t", "A100-80Gx8": "tvimtol9", "A100-80G": "tqqsxr6b"}
"""Ubuntu with the driver, by GPU family."""
TEMPLATE_ID = r"t[a-z0-9]{7}"
"""What looks like one is an id; anything else is part of a label."""
NVLINK_TYPES = ("H100x8", "A100-80Gx8")
GPU_TEMPLATE, CPU_TEMPLATE = "twnlo3zj", "t0nspur5"
STATES: dict[str, api.InstanceState] = {"serviceready": "up", "ready": "up", "stopping": "stopping", "off": "stopped"}
REFUSALS_BY_MESSAGE = {
    r"out of capacity": Refusal(FailureKind.CAPACITY),
    r"quota|(machine|account|team)\b.*\blimit|limit\b.*\b(reached|exceeded)": Refusal(
        FailureKind.QUOTA, "provider", hint="ask Paperspace to raise the account's limit"
    ),
    r"payment|balance|credit card": Refusal(
        FailureKind.BALANCE, "provider", hint="check the account's payment in Paperspace's console"
    ),
}
"""Errors that Paperspace reports only by message."""


class PaperspaceProvider(HttpProvider):
    """Implements `shoal.cloud.providers.api.RentalProvider`."""

    abilities = api.Abilities(
        user=USER,
        system=api.System("ubuntu", "22.04"),  # its templates are Ubuntu 20.04 and 22.04 (openapi of 2026-02)
        billing=api.Billing(step=3600),
        boots_with="script",
        boot_s=1200,
    )

    def __init__(self, account: api.ProviderLogin) -> None:
        super().__init__(account, ApiClient(account, BASE, read_error=read_error))

    async def offers(self, query: api.Query) -> list[api.Offer]:
        """The machine types of our table, with their availability: Paperspace lists none itself."""
        # each region has two names; keep the one that was requested
        regions = [one for one in query.regions if code_of(one) in REGIONS] if query.regions else sorted(REGIONS)
        types = sorted(set(query.types) or {row.type for row in prices() if row.provider == self._account.kind})
        blank = [api.Offer(self._account.name, name, region) for name in types for region in regions]
        request = [offer for offer in prices().fill(self._account.kind, blank) if query.admits(offer)]
        return await map_concurrently(self._with_availability, request)

    async def instances(self, cluster: str) -> list[api.RentedInstance]:
        every = [_instance(one) async for one in self._all("/machines") if not one.has("dtDeleted")]
        machines = [one for one in every if one.cluster == cluster]
        failures = await self._failures(machines)
        return [
            replace(one, state="error", raw_state=f"{one.raw_state}: {failures[one.id]}") if one.id in failures else one
            for one in machines
        ]

    async def delete(self, instances: Sequence[api.RentedInstance]) -> list[api.RequestOutcome]:
        outcomes = [await self._api.remove(f"/machines/{one.id}", one.id) for one in instances]
        for cluster in sorted({one.cluster for one in instances if one.cluster}):
            with contextlib.suppress(ApiError):  # a script costs nothing; the next delete retries
                await self._sweep(
                    cluster, {one.token for one, done in zip(instances, outcomes, strict=True) if done.ok}
                )
        return outcomes

    async def _create(self, order: api.RentalOrder) -> api.RequestOutcome:
        if "--" in order.node or "--" in order.token:
            return api.RequestOutcome(
                "", FailureKind.INVALID, message=f"{order.node}: two hyphens in a row separate the fields of the name"
            )
        name = f"c-{order.cluster}--{order.node}--{int(time.time())}-{order.token}"
        script = {"name": name, "script": startup_script(order), "isRunOnce": True}
        # a lost script costs nothing, and is swept like any other without a machine
        script_id = (await self._api.request("POST", "/startup-scripts", json=script)).text("id")
        outcome = await self._order(order, name, script_id)
        if outcome.failure not in (None, FailureKind.AMBIGUOUS):
            await self._api.remove(f"/startup-scripts/{script_id}")
        return outcome

    async def _order(self, order: api.RentalOrder, name: str, script_id: str) -> api.RequestOutcome:
        try:
            template = await self._template(order)
            request = machine_order(order, name, script_id, template, self._account.settings.get("network"))
            answer = await self._api.request("POST", "/machines", json=request, creates=True)
            machine = answer.object("data")
            id, usd_hour = machine.text("id"), machine.price_or_none("usageRate")
            event = answer.object("event")
            # an event that stays new counts as started: the list shows the rest
            path = f"/machine-events/{event.text('id')}"
            event = await self._api.poll(event, path, lambda it: it.text("state") != "new", FOLLOW_TIMEOUT_S)
        except ApiError as error:
            return error.outcome()
        if event.text("state") in FAILED:
            await self._api.remove(f"/machines/{id}")
            message = event.text("error", "") or f"the order ended as {event.text('state')}"
            refusal = refusal_by_message(REFUSALS_BY_MESSAGE, message) or Refusal(FailureKind.AMBIGUOUS)
            return replace(refusal, message=f"{self._account.name}: {message}").outcome()
        return api.RequestOutcome(id, usd_hour=usd_hour)

    async def _template(self, order: api.RentalOrder) -> str:
        """The id of the template: one that is named, one whose label is named, or the default for the machine type."""
        asked = order.image or self._account.settings.get("template", "")
        if not asked or re.fullmatch(TEMPLATE_ID, asked):
            return asked or template_of(order.offer)
        fitting: dict[str, str] = {}
        async for one in self._all("/os-templates"):
            types = [row for row in one.rows_or_empty("availableMachineTypes") if row.flag("isAvailable", True)]
            if order.offer.type in [row.text("machineTypeLabel", "") for row in types]:
                fitting[f"{one.text('operatingSystemLabel', '')} {one.text('name', '')}".strip()] = one.text("id")
        found = [id for label, id in fitting.items() if asked.lower() in label.lower()]
        if not found:
            known = ", ".join(sorted(fitting)) or "none"
            raise ApiError(
                f"{self._account.name}: no template for {order.offer.type} is labelled {asked!r}; there are: {known}",
                FailureKind.INVALID,
            )
        return found[0]

    async def _failures(self, machines: Sequence[api.RentedInstance]) -> dict[str, str]:
        """Errors by machine, from events: a machine whose creation failed stays in its first state forever."""
        pending = {one.id for one in machines if one.raw_state == "provisioning"}
        since = min((one.created or 0.0 for one in machines if one.id in pending), default=0.0) - EVENT_SLACK_S
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
        """Delete the startup scripts of machines that are gone, and old ones whose machine never came."""
        there = {one.token for one in await self.instances(cluster)} - gone
        for script in [one async for one in self._all("/startup-scripts")]:  # deletes shift the pages
            owner, _, token, created = read_name(script.text("name"))
            if owner != cluster or token in there:
                continue
            if token in gone or time.time() - (created or 0.0) > SCRIPT_GRACE_S:
                await self._api.remove(f"/startup-scripts/{script.text('id')}")

    async def _with_availability(self, offer: api.Offer) -> api.Offer:
        params = {"machineType": offer.type, "region": REGIONS[code_of(offer.region)]}
        there = (await self._api.request("GET", "/machine-availability", params=params)).flag("available")
        return replace(offer, available="yes" if there else "no")

    async def _all(self, path: str, **more: str) -> AsyncIterator[Body]:
        async for page in self._api.pages(path, "after", _next_page, limit=PAGE, **more):
            for one in page.rows("items"):
                yield one


def machine_order(order: api.RentalOrder, name: str, script_id: str, template: str, network: str | None = None) -> Any:
    """The request that orders a machine. Paperspace itself switches it off at the end of its lifetime."""
    hours = math.ceil(order.lifetime / 3600) if order.lifetime else None
    request = {
        "name": name,
        "machineType": order.offer.type,
        "templateId": template,
        "region": REGIONS.get(code_of(order.offer.region), order.offer.region),
        "diskSize": next((size for size in DISKS if size >= order.disk_gb), DISKS[-1]),
        "publicIpType": "dynamic",
        "startupScriptId": script_id,
        "startOnCreate": True,
        "emailPassword": False,
        "takeInitialSnapshot": False,
        "networkId": network,
        "enableNvlink": True if order.offer.type in NVLINK_TYPES else None,
        "autoShutdownEnabled": True if hours else None,
        "autoShutdownTimeout": hours,
    }
    return drop_none(request)


def startup_script(order: api.RentalOrder) -> str:
    """Authorizes the controller's key, then runs the order's script."""
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


def template_of(offer: api.Offer) -> str:
    """The default template of a machine type."""
    return CPU_TEMPLATE if re.fullmatch(r"C\d+", offer.type) else TEMPLATES.get(offer.type, GPU_TEMPLATE)


def code_of(region: str) -> str:
    """`NY2` of `East Coast (NY2)`, as in some answers, and of `NY2`."""
    match = re.search(r"\((\w+)\)", region)
    return match[1] if match else region


def read_name(name: str) -> tuple[str, str, str, float | None]:
    """Cluster, node, token and creation time from one of our names; empty for another name."""
    match = re.fullmatch(r"c-(.+)--(.+)--([0-9]{1,12})-(.+)", name)
    return (match[1], match[2], match[4], float(match[3])) if match else ("", "", "", None)


def read_error(status: int, answer: Body) -> Refusal | None:
    """What an error answer means: by its message, else by its status."""
    code, message = answer.text("code", ""), answer.text("message")
    refusal = refusal_by_message(REFUSALS_BY_MESSAGE, message) if status < 500 and status not in (401, 429) else None
    return replace(refusal or Refusal(), message=f"{code}: {message}" if code else message)


def _next_page(page: Body) -> str:
    return page.text("nextPage") if page.flag("hasMore") else ""


def _instance(one: Body) -> api.RentedInstance:
    cluster, node, token, created = read_name(one.text("name"))
    return api.RentedInstance.listed(
        one.text("id"),
        (cluster, node, token),
        one.text("state"),
        STATES,
        host=one.text("publicIp", ""),
        user=USER,
        type=one.text("machineType", ""),
        region=code_of(one.text("region", "")),
        usd_hour=one.price_or_none("usageRate"),
        created=one.time("dtCreated") or created,
    )
