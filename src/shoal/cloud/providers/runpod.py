"""RunPod, REST API version 2: containers with GPUs, each behind one mapped TCP port.

A pod has no tags and no idempotent create, and names are not unique. Lists include its environment, so our marks are
there. There is no cloud-init: the container's command is our script, which starts sshd. A 400 may mean missing
capacity or a wrong order; only its text tells. A type is a GPU's id, with `8x ` before it for eight in one pod.
"""

from __future__ import annotations

import base64
import math
import re
from collections.abc import Iterator, Sequence
from dataclasses import replace

from shoal.cloud.providers import api
from shoal.cloud.providers.api import FailureKind
from shoal.cloud.providers.http import ApiClient, HttpProvider, excerpt, map_concurrently
from shoal.cloud.providers.prices import gpu_model
from shoal.cloud.providers.responses import Body, Refusal, drop_none, refusal_by_message
from shoal.remote import program_text

BASE = "https://api.runpod.io/v2"
IMAGE = "debian:12"
"""A bare system: the host provides the driver's libraries, and joining installs everything else."""
CLUSTER, NODE, TOKEN = "SHOAL_CLUSTER", "SHOAL_NODE", "SHOAL_TOKEN"
ANYWHERE = "any"
"""The region of the community cloud, whose machines are in no data centre."""
COUNTS = (1, 2, 4, 8)
CPUS_AT_LEAST, MEMORY_GB_AT_LEAST = 2, 8
"""The minimum per GPU that is requested, where the spec does not request more. Catalogs do not tell what a pod has."""
CUDA_AT_LEAST = "12.8"
"""The CUDA version that the host's driver must support; `settings: {cuda: "12.4"}` changes it."""
ADDRESS_TIMEOUT_S = 180
"""After this time a pod of the community cloud that has no public address gets none."""
STATES: dict[str, api.InstanceState] = {
    "PROVISIONING": "pending",
    "STARTING": "pending",
    "RUNNING": "up",
    "EXITED": "stopped",
    "ERROR": "error",
}
GONE = "TERMINATED"
AVAILABLE = {"NONE": "no", "LOW": "low", "MEDIUM": "yes", "HIGH": "yes"}
REFUSALS_BY_MESSAGE = {
    r"no longer any instances available|does not have the resources|no instances|no (gpu|machine)s? available|"
    r"(out of|insufficient|not enough) (capacity|stock|resources)": Refusal(FailureKind.CAPACITY),
    r"spend(ing)? limit|quota|limit (reached|exceeded)|maximum number": Refusal(
        FailureKind.QUOTA, "provider", hint="raise the limit in RunPod's console"
    ),
}
"""Messages of a 400 that do not concern the order itself."""
TRAP = "trap exit TERM\n"
"""Lets `kill 1` restart the container, which RunPod bills on: process 1 only gets signals that it traps."""
BOOT = program_text("boot_pod.sh")
"""Starts sshd with the controller's key, on every start of the pod.

The shell waits for slow commands in the background, so that it handles signals meanwhile.
"""
WAIT = "while :; do sleep 3600 & wait $!; done\n"
"""Then waits for the signal to end."""


class RunPodProvider(HttpProvider):
    """Implements `shoal.cloud.providers.api.RentalProvider`."""

    abilities = api.Abilities(
        container=True,
        user="root",
        system=api.System("debian", "12"),  # of IMAGE
        end_program=("end_pod", BASE, "/proc/1/environ"),
        boots_with="args",
        boot_s=1200,
    )

    def __init__(self, account: api.ProviderLogin) -> None:
        super().__init__(account, ApiClient(account, BASE, read_error=read_error, interval=0.5))
        program, _, *arguments = self.abilities.end_program
        self.abilities = replace(self.abilities, end_program=(program, self._api.base, *arguments))
        self._cloud = account.settings.get("cloud", "SECURE").upper()
        if self._cloud == "COMMUNITY":  # some of its hosts have no public address, and bill all the same
            self.abilities = replace(self.abilities, address_timeout_s=ADDRESS_TIMEOUT_S)

    async def offers(self, query: api.Query) -> list[api.Offer]:
        counts = sorted({split_type(one)[1] for one in query.types} or set(COUNTS))
        offers: list[api.Offer] = []
        for count in counts:
            if count >= query.gpus:
                params: dict[str, str | int] = {"include": "AVAILABILITY", "product": "POD", "count": count}
                params["cloud"] = self._cloud
                body = await self._api.request("GET", "/catalog/gpus", params=params)
                offers += [one for gpu in body.rows("gpus") for one in self._offers(gpu, count)]
        return [one for one in offers if query.admits(one)]

    async def instances(self, cluster: str) -> list[api.RentedInstance]:
        pages = self._api.pages("/pods", "cursor", _next_page, includeClusterPods="true")
        pods = [pod async for page in pages for pod in page.rows("pods")]
        return [one for one in (_instance(pod) for pod in pods if pod.text("status") != GONE) if one.cluster == cluster]

    async def delete(self, instances: Sequence[api.RentedInstance]) -> list[api.RequestOutcome]:
        return await map_concurrently(lambda one: self._api.remove(f"/pods/{one.id}", one.id), instances)

    async def _create(self, order: api.RentalOrder) -> api.RequestOutcome:
        gpu, count = split_type(order.offer.type)
        cpus = max(CPUS_AT_LEAST, math.ceil(order.cpus / count))
        memory_gb = max(MEMORY_GB_AT_LEAST, math.ceil(order.memory_mb / 1024 / count))
        placement = {
            "minVcpuCountPerGpu": cpus,
            "minRamPerGpu": memory_gb,
            "minCudaVersion": self._account.settings.get("cuda", CUDA_AT_LEAST),
        }
        request = {
            "name": f"{order.cluster}--{order.node}--{order.token}",
            "image": order.image or self._account.settings.get("image", IMAGE),
            "gpu": {"id": gpu, "count": count, **placement},
            "cloud": self._cloud,
            "disk": order.disk_gb,
            "ports": ["22/tcp"],
            "env": {
                CLUSTER: order.cluster,
                NODE: order.node,
                TOKEN: order.token,
                "PUBLIC_KEY": order.public_key.strip(),
            },
            "entrypoint": ["bash", "-c"],
            "cmd": [boot_command(order.user_data)],
            "dataCenterIds": None if order.offer.region in ("", ANYWHERE) else [order.offer.region],
        }
        body = await self._api.request("POST", "/pods", json=drop_none(request), creates=True)
        id = body.text("id")
        lacks = _missing_resources(body.object_or_empty("gpu"), cpus * count, memory_gb * count)
        if lacks and (await self._api.remove(f"/pods/{id}", id)).ok:
            return api.RequestOutcome(failure=FailureKind.CAPACITY, message=f"RunPod granted {lacks}")
        return api.RequestOutcome(id, usd_hour=body.price_or_none("cost"))

    def _offers(self, gpu: Body, count: int) -> Iterator[api.Offer]:
        cloud = self._cloud.lower()
        if int(gpu.object("maxCount").number(cloud, 0)) < count:
            return
        price = gpu.object("price").price_or_none(cloud)
        places = [(one.text("id"), one.text("availability")) for one in gpu.rows_or_empty("dataCenters")]
        for place, level in places if cloud == "secure" else [(ANYWHERE, gpu.text("availability", ""))]:
            yield api.Offer(
                provider=self._account.name,
                type=joined_type(gpu.text("id"), count),
                region=place,
                usd_hour=round(price * count, 4) if price else None,
                gpu=gpu_model(gpu.text("name"))[0],
                gpus=count,
                gpu_memory_gb=int(gpu.number("memory")),
                cpus=CPUS_AT_LEAST * count,
                memory_gb=MEMORY_GB_AT_LEAST * count,
                available=AVAILABLE.get(level, "unknown"),  # type: ignore[arg-type]
            )


def split_type(type: str) -> tuple[str, int]:
    """A GPU's id and count: `8x NVIDIA H200` is eight of them."""
    match = re.fullmatch(r"(\d+)x (.+)", type)
    return (match[2], int(match[1])) if match else (type, 1)


def joined_type(gpu: str, count: int) -> str:
    return gpu if count == 1 else f"{count}x {gpu}"


def _missing_resources(granted: Body, cpus: int, memory_gb: int) -> str:
    """What a pod has less than requested, as text. The minimums choose a host; the answer tells what the pod got."""
    has_cpus, has_memory = granted.number_or_none("vcpuCount"), granted.number_or_none("memory")
    lacks = [f"{has_cpus:.0f} CPUs of {cpus}"] if has_cpus is not None and has_cpus < cpus else []
    if has_memory is not None and has_memory < memory_gb:
        lacks.append(f"{has_memory:.0f} GB of memory of {memory_gb}")
    return " and ".join(lacks)


def boot_command(user_data: str) -> str:
    """The container's command: runs the order's script, then ours, then waits. An image's own entrypoint is not run.

    The order's script comes first: it installs the host key before sshd makes one, and leaves a process that ends a pod
    that never joins, such as one that cannot install sshd. It has a secret, so only root may read it.
    """
    encoded = base64.b64encode(user_data.encode()).decode()
    background = (
        f"(umask 077; echo {encoded} | base64 -d > /run/user-data) && setsid sh /run/user-data\n" if user_data else ""
    )
    script = base64.b64encode(f"{TRAP}{background}{BOOT}{WAIT}".encode()).decode()
    return f"(umask 077; echo {script} | base64 -d > /run/shoal-boot); exec bash /run/shoal-boot"


def read_error(status: int, answer: Body) -> Refusal | None:
    """What an error answer means: `application/problem+json` without error codes."""
    if status == 410:
        message = "RunPod has retired this version of its API"
        return Refusal(FailureKind.INVALID, "provider", message, "install a newer Shoal")
    detail = answer.text("detail")
    words = "; ".join([detail, *filter(None, map(_error_text, answer.rows_or_empty("errors")))])
    if status == 401:
        return Refusal(FailureKind.AUTH, "provider", words, "make a key in RunPod's console")
    if status == 402:
        return Refusal(FailureKind.BALANCE, "provider", words, "add credit in RunPod's console")
    if status == 403 and "access denied" not in detail:
        return Refusal(FailureKind.QUOTA, message=words)  # this pool is closed to us; others may not be
    if status == 400 and (refusal := refusal_by_message(REFUSALS_BY_MESSAGE, detail)):
        return replace(refusal, message=words)
    return Refusal(FailureKind.INVALID, message=words) if status in (400, 404, 422) else None


def _error_text(row: Body) -> str:
    """What one of several errors says, and of which field: a row may quote the order, whose command has a host key."""
    text = row.value if isinstance(row.value, str) else ""
    if isinstance(row.value, dict):
        path, message = (str(row.value.get(name) or "") for name in ("path", "message"))
        text = ": ".join(filter(None, (path, message)))
    return excerpt(text)


def _next_page(page: Body) -> str:
    """The documented list has one page; newer answers may have more."""
    paging = page.object_or_empty("pagination")
    return paging.text("nextCursor") if paging.flag("hasNextPage", False) else ""


def _instance(pod: Body) -> api.RentedInstance:
    status, env, gpu = pod.text("status"), pod.object_or_empty("env"), pod.object_or_empty("gpu")
    marks = env.text(CLUSTER, ""), env.text(NODE, ""), env.text(TOKEN, "")
    host, port = _ssh_address(pod)
    return api.RentedInstance.listed(
        pod.text("id"),
        marks if marks[2] else api.marks_in_name(pod.text("name", "")),
        status,
        STATES if host else {**STATES, "RUNNING": "pending"},  # RUNNING is reported before SSH has an address
        host=host,
        port=port,
        type=joined_type(gpu.text("id", ""), int(gpu.number("count", 1))) if gpu.has("id") else "",
        region=pod.text("dataCenterId", ANYWHERE),
        usd_hour=pod.price_or_none("cost"),  # a stopped pod reports 0
        created=pod.time("createdAt"),
    )


def _ssh_address(pod: Body) -> tuple[str, int]:
    """The direct SSH address. RunPod's proxy does not forward ports."""
    direct = pod.object_or_empty("ssh").object_or_empty("direct")
    if direct.has("host"):
        return direct.text("host"), direct.port("port")
    for port in pod.object_or_empty("runtime").rows_or_empty("ports"):
        if port.has("ip") and port.has("public") and int(port.number("private", 0)) == 22:
            return port.text("ip"), port.port("public")
    return "", 22
