"""Lambda Cloud, v1 of its API: whole virtual machines with NVIDIA's driver, one for each launch.

Launches may be twelve seconds apart and no closer, names are not unique, nothing is idempotent, and an instance tells
no time of birth: all of that is in tags. A machine that shuts itself down is paid for until it is terminated.
"""

from __future__ import annotations

import hashlib
import re
import time
from collections.abc import Sequence
from dataclasses import replace

from shoal.providers.gpus import usual_gpu
from shoal.providers.rental import Abilities, Account, Billing, Offer, Order, Outcome, Query, Rented, State, Trouble
from shoal.providers.rented.body import ApiError, Body, without_none
from shoal.providers.rented.http import Api, ApiRenter
from shoal.providers.rented.refusals import Refusal, by_code

BASE = "https://cloud.lambda.ai/api/v1"
IMAGE = "lambda-stack-24-04"
"""Without a family the system differs from region to region."""
STATES: dict[str, State] = {
    "booting": "pending",
    "active": "up",
    "unhealthy": "error",
    "preempted": "error",
    "terminating": "stopping",
}
REFUSALS = {
    "instance-operations/launch/insufficient-capacity": Refusal(Trouble.CAPACITY),
    "instance-operations/launch/file-system-in-wrong-region": Refusal(Trouble.INVALID),
    "global/quota-exceeded": Refusal(Trouble.QUOTA),
    "global/invalid-parameters": Refusal(Trouble.INVALID),
    "global/object-does-not-exist": Refusal(Trouble.INVALID),
    "global/duplicate": Refusal(Trouble.CONFLICT),
    "global/invalid-api-key": Refusal(Trouble.AUTH, "provider", hint="make a key in Lambda's console"),
    "global/account-inactive": Refusal(Trouble.BALANCE, "provider", hint="see Lambda's console about the account"),
    "global/invalid-address": Refusal(Trouble.BALANCE, "provider", hint="correct the billing address at Lambda"),
    "global/internal-error": Refusal(Trouble.AMBIGUOUS),
}
"""Lambda's codes; its messages change."""
CLUSTER, NODE, TOKEN, EPOCH = "shoal-cluster", "shoal-node", "shoal-token", "shoal-epoch"
NAME_LENGTH = 64
LAUNCH_SECONDS = 12.0
"""Lambda asks for so long between two launches."""


class LambdaCloud(ApiRenter):
    """Implements `shoal.providers.rental.Renter`."""

    abilities = Abilities(
        user="ubuntu",
        idempotent="none",
        at_once=1,
        create_interval=LAUNCH_SECONDS,
        billing=Billing(step=60, from_up=True),
        boots_with="user_data",
        boot_seconds=1800,
        grace_seconds=300,
    )

    def __init__(self, account: Account) -> None:
        apart = float(account.settings.get("create_interval", self.abilities.create_interval))
        self.abilities = replace(self.abilities, create_interval=apart)
        api = Api(account, BASE, understand=understand, interval=1.0, retry_after=lambda: LAUNCH_SECONDS)
        super().__init__(account, api)

    async def offers(self, query: Query) -> list[Offer]:
        body = await self._api.ask("GET", "/instance-types")
        found = []
        for _, entry in body.piece("data").items():
            there = [region.text("name") for region in entry.rows("regions_with_capacity_available")]
            # Where there is none, Lambda names no region: only those that were asked for can be told.
            for region in sorted({*there, *query.regions}):
                offer = self._offer(entry.piece("instance_type"), region, region in there)
                if query.admits(offer):
                    found.append(offer)
        return found

    async def create(self, orders: Sequence[Order]) -> list[Outcome]:
        return [await self._launch(order) for order in orders]

    async def rented(self, cluster: str) -> list[Rented]:
        body = await self._api.ask("GET", "/instances")
        found = [_rented(one) for one in body.rows("data") if one.text("status") != "terminated"]
        return [one for one in found if one.cluster == cluster]

    async def delete(self, rented: Sequence[Rented]) -> list[Outcome]:
        if len(rented) > 1:
            together = await self._terminate([one.id for one in rented])
            # One unknown id among them, and Lambda terminates none: then each for itself.
            if together.trouble is not Trouble.INVALID:
                return [replace(together, id=one.id) for one in rented]
        return [await self._terminate([one.id]) for one in rented]

    async def ensure_key(self, cluster: str, public_key: str) -> str:
        material = " ".join(public_key.split()[:2])
        if known := await self._key_name(material):
            return known
        name = f"shoal-{cluster}-{hashlib.sha256(material.encode()).hexdigest()[:8]}"
        try:
            await self._api.ask("POST", "/ssh-keys", json={"name": name, "public_key": public_key.strip()})
        except ApiError as error:
            if error.trouble is Trouble.AUTH or not (known := await self._key_name(material)):
                raise
            return known  # another of us was faster
        return name

    async def _key_name(self, material: str) -> str:
        for key in (await self._api.ask("GET", "/ssh-keys")).rows("data"):
            if " ".join(key.text("public_key").split()[:2]) == material:
                return key.text("name")
        return ""

    async def _launch(self, order: Order) -> Outcome:
        if not order.key_name:
            return Outcome(trouble=Trouble.INVALID, message="Lambda takes an order only with the name of an SSH key")
        name = f"{order.cluster}--{order.node}--{order.token}"
        marks = {CLUSTER: order.cluster, NODE: order.node, TOKEN: order.token, EPOCH: str(int(time.time()))}
        wanted = {
            "region_name": order.offer.region,
            "instance_type_name": order.offer.type,
            "ssh_key_names": [order.key_name],
            "name": name[:NAME_LENGTH],
            "image": {"family": order.image or IMAGE},
            "tags": [{"key": key, "value": value} for key, value in marks.items()],
            "user_data": order.user_data or None,
            "hostname": order.node if re.fullmatch(r"[a-z0-9][0-9a-z-]{0,62}", order.node) else None,
        }
        try:
            launch = without_none(wanted)
            body = await self._api.ask("POST", "/instance-operations/launch", json=launch, creates=True)
            ids = body.piece("data").rows("instance_ids")
            if len(ids) != 1 or not isinstance(ids[0].value, str):
                raise body.wrong(f"data.instance_ids has {len(ids)} ids, not the one that was ordered")
        except ApiError as error:
            return error.outcome()
        return Outcome(ids[0].value)

    async def _terminate(self, ids: list[str]) -> Outcome:
        try:
            body = await self._api.ask("POST", "/instance-operations/terminate", json={"instance_ids": ids})
            done = {one.text("id") for one in body.piece("data").rows("terminated_instances")}
        except ApiError as error:
            if error.status == 404 and len(ids) == 1:
                return Outcome(ids[0])  # gone already
            return error.outcome(ids[0])
        missed = [one for one in ids if one not in done]
        if missed:
            return Outcome(ids[0], Trouble.TRANSIENT, message=f"Lambda did not terminate {', '.join(missed)}")
        return Outcome(ids[0])

    def _offer(self, kind: Body, region: str, available: bool) -> Offer:
        specs = kind.piece("specs")
        gpus = int(specs.number("gpus", 0))
        gpu, memory = usual_gpu(kind.text("gpu_description", "")) if gpus else ("", 0)
        return Offer(
            provider=self._account.name,
            type=kind.text("name"),
            region=region,
            usd_hour=kind.number("price_cents_per_hour") / 100,
            gpu=gpu,
            gpus=gpus,
            gpu_memory_gb=memory,
            cpus=int(specs.number("vcpus")),
            memory_gb=int(specs.number("memory_gib")),
            arch=kind.text("architecture", "x86_64"),
            available="yes" if available else "no",
        )


def understand(status: int, answer: Body) -> Refusal | None:
    """What an error of Lambda's means: its code decides, never its text."""
    error = answer.piece("error")
    code, message = error.text("code"), error.text("message", "")
    if code.startswith("provider/") and status < 500:
        return Refusal(Trouble.TRANSIENT, message=f"{code}: {message}")
    return by_code(REFUSALS, [(code, message)])


def _rented(one: Body) -> Rented:
    status, tags = one.text("status"), {tag.text("key"): tag.text("value") for tag in one.rows_or_none("tags")}
    kind, born = one.piece_or_empty("instance_type"), tags.get(EPOCH, "")
    cents = kind.maybe_number("price_cents_per_hour")
    cluster, node, token = (tags.get(key, "") for key in (CLUSTER, NODE, TOKEN))
    if not token and one.text("name", "").count("--") == 2:
        cluster, node, token = one.text("name").split("--")
    return Rented(
        id=one.text("id"),
        cluster=cluster,
        node=node,
        token=token,
        state=STATES.get(status, "pending"),  # a word that we do not know is no reason to give a machine back
        raw_state=status,
        host=one.text("ip", ""),
        user=LambdaCloud.abilities.user,
        type=kind.text("name", ""),
        region=one.piece_or_empty("region").text("name", ""),
        usd_hour=None if cents is None else cents / 100,
        created=float(born) if born.isdigit() else None,
        ending=status == "preempted",
    )
