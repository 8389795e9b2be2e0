"""RunPod, v2 of its REST API: containers with GPUs, behind one mapped TCP port each.

A pod has neither tags nor an idempotent create, and names are not unique; its environment comes back with every list,
so that is where our marks are. There is no cloud-init: the container's command is a script of ours that starts sshd.
A 400 may mean that nothing is left or that the order is wrong; only its text tells. A type is a GPU's id, `8x ` before
it for eight of them in one pod.
"""

from __future__ import annotations

import base64
import re
import shlex
from collections.abc import Iterator, Sequence
from dataclasses import replace

from shoal.providers.gpus import usual_gpu
from shoal.providers.rental import Abilities, Account, Billing, Offer, Order, Outcome, Query, Rented, State, Trouble
from shoal.providers.rented.body import ApiError, Body, without_none
from shoal.providers.rented.http import Api, ApiRenter, each
from shoal.providers.rented.refusals import Refusal, by_words

BASE = "https://api.runpod.io/v2"
IMAGE = "debian:12"
"""A bare system: the driver's libraries come from the machine, all else is installed when the node joins."""
CLUSTER, NODE, TOKEN = "SHOAL_CLUSTER", "SHOAL_NODE", "SHOAL_TOKEN"
ANYWHERE = "any"
"""The region of the community cloud, whose machines are nobody's data centre."""
COUNTS = (1, 2, 4, 8)
CPUS_AT_LEAST, MEMORY_GB_AT_LEAST = 2, 8
"""What every pod has for each of its GPUs. The API does not tell how much more."""
STATES: dict[str, State] = {
    "PROVISIONING": "pending",
    "STARTING": "pending",
    "RUNNING": "up",
    "EXITED": "stopped",
    "ERROR": "error",
}
GONE = "TERMINATED"
AVAILABLE = {"NONE": "no", "LOW": "low", "MEDIUM": "yes", "HIGH": "yes"}
WORDS = {
    r"no longer any instances available|does not have the resources|no instances|no (gpu|machine)s? available|"
    r"(out of|insufficient|not enough) (capacity|stock|resources)": Refusal(Trouble.CAPACITY),
    r"spend(ing)? limit|quota|limit (reached|exceeded)|maximum number": Refusal(
        Trouble.QUOTA, "provider", hint="raise the limit in RunPod's console"
    ),
}
"""What a 400 says that is not about the order itself."""
ENDS = "trap exit TERM\n"
"""`kill 1` inside ends the container, as its watchdog may: the first process hears only what it has a trap for."""
BOOT = """\
export DEBIAN_FRONTEND=noninteractive
for program in /usr/sbin/sshd /usr/bin/python3 /usr/bin/sudo; do
    [ -x $program ] && continue
    until apt-get update && apt-get install -y --no-install-recommends openssh-server python3 sudo ca-certificates
    do sleep 5; done & wait $!
done
mkdir -p /run/sshd
install -d -m 0700 /root/.ssh
printf '%s\\n' "$PUBLIC_KEY" >> /root/.ssh/authorized_keys
chmod 0600 /root/.ssh/authorized_keys
ssh-keygen -A
pgrep -x sshd > /dev/null || /usr/sbin/sshd -o ClientAliveInterval=15 -o PermitRootLogin=prohibit-password
"""
"""How a container lets us in. It outlives nothing: a pod that is restarted does it again.

For what may take for ever the shell waits, so that it hears a signal meanwhile.
"""
WAIT = "while :; do sleep 3600 & wait $!; done\n"
"""And then, until it is told to end."""


class RunPod(ApiRenter):
    """Implements `shoal.providers.rental.Renter`."""

    abilities = Abilities(
        container=True,
        user="root",
        idempotent="none",
        at_once=1,
        boots_with="args",
        boot_seconds=1200,
        grace_seconds=300,
        billing=Billing(step=1),
    )

    def __init__(self, account: Account) -> None:
        super().__init__(account, Api(account, BASE, understand=understand, interval=0.5))
        self._cloud = account.settings.get("cloud", "SECURE").upper()

    async def offers(self, query: Query) -> list[Offer]:
        counts = sorted({split_type(one)[1] for one in query.types} or set(COUNTS))
        found: list[Offer] = []
        for count in counts:
            if count >= query.gpus:
                params: dict[str, str | int] = {"include": "AVAILABILITY", "product": "POD", "count": count}
                params["cloud"] = self._cloud
                body = await self._api.ask("GET", "/catalog/gpus", params=params)
                found += [one for gpu in body.rows("gpus") for one in self._offers(gpu, count)]
        return [one for one in found if query.admits(one)]

    async def create(self, orders: Sequence[Order]) -> list[Outcome]:
        return [await self._order(order) for order in orders]

    async def rented(self, cluster: str) -> list[Rented]:
        pages = self._api.pages("/pods", "cursor", _next_page, includeClusterPods="true")
        pods = [pod async for page in pages for pod in page.rows("pods")]
        return [one for one in (_rented(pod) for pod in pods if pod.text("status") != GONE) if one.cluster == cluster]

    async def delete(self, rented: Sequence[Rented]) -> list[Outcome]:
        return await each(lambda one: self._api.remove(f"/pods/{one.id}", one.id), rented)

    async def _order(self, order: Order) -> Outcome:
        gpu, count = split_type(order.offer.type)
        wanted = {
            "name": f"{order.cluster}--{order.node}--{order.token}",
            "image": order.image or self._account.settings.get("image", IMAGE),
            "gpu": {"id": gpu, "count": count},
            "cloud": self._cloud,
            "disk": order.disk_gb,
            "ports": ["22/tcp"],
            "env": {
                CLUSTER: order.cluster,
                NODE: order.node,
                TOKEN: order.token,
                "PUBLIC_KEY": order.public_key.strip(),
            },
            "args": boot_args(order.user_data),
            "dataCenterIds": None if order.offer.region in ("", ANYWHERE) else [order.offer.region],
        }
        try:
            body = await self._api.ask("POST", "/pods", json=without_none(wanted), creates=True)
            return Outcome(body.text("id"), usd_hour=body.maybe_number("cost") or None)  # 0 is no price
        except ApiError as error:
            return error.outcome()

    def _offers(self, gpu: Body, count: int) -> Iterator[Offer]:
        cloud = self._cloud.lower()
        if int(gpu.piece("maxCount").number(cloud, 0)) < count:
            return
        price = gpu.piece("price").maybe_number(cloud)
        places = [(one.text("id"), one.text("availability")) for one in gpu.rows_or_none("dataCenters")]
        for place, level in places if cloud == "secure" else [(ANYWHERE, gpu.text("availability", ""))]:
            yield Offer(
                provider=self._account.name,
                type=joined_type(gpu.text("id"), count),
                region=place,
                usd_hour=round(price * count, 4) if price else None,
                gpu=usual_gpu(gpu.text("name"))[0],
                gpus=count,
                gpu_memory_gb=int(gpu.number("memory")),
                cpus=CPUS_AT_LEAST * count,
                memory_gb=MEMORY_GB_AT_LEAST * count,
                available=AVAILABLE.get(level, "unknown"),  # type: ignore[arg-type]
            )


def split_type(type: str) -> tuple[str, int]:
    """A GPU's id and how many: `8x NVIDIA H200` is eight of them."""
    found = re.fullmatch(r"(\d+)x (.+)", type)
    return (found[2], int(found[1])) if found else (type, 1)


def joined_type(gpu: str, count: int) -> str:
    return gpu if count == 1 else f"{count}x {gpu}"


def boot_args(user_data: str) -> str:
    """The container's command: the order's own script beside ours, and then nothing more until the pod goes.

    The order's own is first: it ends a pod that nobody comes for, such as one that finds no mirror for sshd.
    """
    own = base64.b64encode(user_data.encode()).decode()
    beside = f"echo {own} | base64 -d > /run/user-data && {{ setsid sh /run/user-data & }}\n" if user_data else ""
    script = base64.b64encode(f"{ENDS}{beside}{BOOT}{WAIT}".encode()).decode()
    return shlex.join(["bash", "-c", f"echo {script} | base64 -d > /run/shoal-boot; exec bash /run/shoal-boot"])


def understand(status: int, answer: Body) -> Refusal | None:
    """What an error of RunPod's means: `application/problem+json`, without any code of a machine's."""
    if status == 410:
        gone = "RunPod has retired this version of its API"
        return Refusal(Trouble.INVALID, "provider", gone, "install a newer Shoal")
    detail = answer.text("detail")
    words = "; ".join([detail, *(str(one.value) for one in answer.rows_or_none("errors"))])
    if status == 401:
        return Refusal(Trouble.AUTH, "provider", words, "make a key in RunPod's console")
    if status == 402:
        return Refusal(Trouble.BALANCE, "provider", words, "add credit in RunPod's console")
    if status == 403 and "access denied" not in detail:
        return Refusal(Trouble.QUOTA, message=words)  # this pool is not for us; others may be
    if status == 400 and (known := by_words(WORDS, detail)):
        return replace(known, message=words)
    return Refusal(Trouble.INVALID, message=words) if status in (400, 404, 422) else None


def _next_page(page: Body) -> str:
    """The documented list has one page; newer answers say that there are more."""
    paging = page.piece_or_empty("pagination")
    return paging.text("nextCursor") if paging.flag("hasNextPage", False) else ""


def _rented(pod: Body) -> Rented:
    status, env, gpu = pod.text("status"), pod.piece_or_empty("env"), pod.piece_or_empty("gpu")
    cluster, node, token = (env.text(name, "") for name in (CLUSTER, NODE, TOKEN))
    if not token and pod.text("name", "").count("--") == 2:
        cluster, node, token = pod.text("name").split("--")
    host, port = _door(pod)
    state = STATES.get(status, "pending")  # a word that we do not know is no reason to give a machine back
    return Rented(
        id=pod.text("id"),
        cluster=cluster,
        node=node,
        token=token,
        # RUNNING is said before there is a way in.
        state="pending" if state == "up" and not host else state,
        raw_state=status,
        host=host,
        port=port,
        user="root",
        type=joined_type(gpu.text("id", ""), int(gpu.number("count", 1))) if gpu.has("id") else "",
        region=pod.text("dataCenterId", ANYWHERE),
        usd_hour=pod.maybe_number("cost") or None,  # a pod that has stopped says 0
        created=pod.time("createdAt"),
    )


def _door(pod: Body) -> tuple[str, int]:
    """Where SSH is let in. The other way, through RunPod's own host, forwards nothing."""
    direct = pod.piece_or_empty("ssh").piece_or_empty("direct")
    if direct.has("host"):
        return direct.text("host"), int(direct.number("port"))
    for port in pod.piece_or_empty("runtime").rows_or_none("ports"):
        if port.has("ip") and port.has("public") and int(port.number("private", 0)) == 22:
            return port.text("ip"), int(port.number("public"))
    return "", 22
