"""The rental providers that the contract tests run against. A new provider adds its Case to CASES."""

import asyncio
import contextlib
import re
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping
from contextlib import asynccontextmanager
from dataclasses import dataclass, field, replace
from typing import Any
from urllib.parse import urlsplit

from shoal.cloud.providers import rental_provider
from shoal.cloud.providers.api import (
    FailureKind,
    Offer,
    ProviderLogin,
    RentalOrder,
    RentalProvider,
    RentedInstance,
    RequestOutcome,
)
from shoal_simulators import find_simulator
from shoal_simulators.backend import NoHosts
from shoal_simulators.instances import Fault
from shoal_simulators.market import Market
from shoal_simulators.server import SimulatorApp, serve

CLUSTER = "reef"
KEY = "sk-contract-0123456789abcdef"
PUBLIC_KEY = "ssh-ed25519 AAAAC3NzaC1lZDI1NTE5AAAAIFyC2Ek5rVqbJ4s0JDmUI7jH9pO7Vt5vYb0Kqk4m8zqF controller"


REFUSALS = {
    "stockout": FailureKind.CAPACITY,
    "quota": FailureKind.QUOTA,
    "balance": FailureKind.BALANCE,
    "auth": FailureKind.AUTH,
    "rate": FailureKind.RATE,
}
"""The failure that a rejected order is mapped to, by fault."""


@dataclass(frozen=True)
class Case:
    """One provider, as far as the tests have to know it."""

    kind: str
    offer: Offer
    """Something that its simulator has plenty of."""
    required: Mapping[str, tuple[str, ...]]
    """By call: required fields of its answers. The test removes each, and the error must name it."""
    settings: Mapping[str, str] = field(default_factory=dict)
    secret: str = KEY
    maps: frozenset[str] = frozenset()
    """Fields whose value is an object with names that are data: no unknown field is put there."""
    dead_state: str = "error"
    """The state of a machine that failed."""
    price_from: str = "list"
    """Which answer has the true price of a machine: `list`, `create` or none."""
    prices: tuple[str, ...] = ()
    """Fields of its answers that hold a price, or the prices of a thing by name."""
    http: bool = True
    """Its calls are HTTP/1 requests: a single one of them can be answered badly."""


CASES = {
    case.kind: case
    for case in (
        Case(
            kind="aws",
            prices=("spotPrice",),
            offer=Offer("acme", "g6.xlarge", "us-east-1", "us-east-1b", "spot", usd_hour=0.77),
            required={
                "offers": ("instanceTypeSet", "instanceType", "location", "spotPrice", "vCpuInfo", "memoryInfo"),
                "create": ("instancesSet", "instanceId"),
                "rented": ("reservationSet", "instancesSet", "instanceId", "instanceState", "name"),
                "delete": ("instancesSet", "instanceId"),
            },
            settings={"regions": "us-east-1 us-west-2"},
            secret=f"AKIDEXAMPLE:{KEY}",
            dead_state="stopped",
            price_from="nowhere",
        ),
        Case(
            kind="lambda",
            prices=("price_cents_per_hour",),
            offer=Offer("acme", "gpu_1x_a10", "us-west-1", usd_hour=1.29),
            required={
                "offers": ("data", "instance_type", "specs", "name", "price_cents_per_hour", "vcpus", "memory_gib"),
                "create": ("data", "instance_ids"),
                "rented": ("data", "id", "status"),
                "delete": ("data", "terminated_instances", "id"),
                "ensure_key": ("data", "name", "public_key"),
            },
            maps=frozenset({"data"}),
        ),
        Case(
            kind="sandbox",
            prices=("usd_hour",),
            offer=Offer("acme", "gpu-2", "sandbox", "sandbox-a", "spot", usd_hour=0.40),
            required={
                "offers": ("region", "types", "name", "zones", "usd_hour", "cpus", "memory_gb", "free"),
                "create": ("machines", "token", "id"),
                "rented": ("machines", "id", "state"),
                "delete": ("deleted", "unknown"),
            },
        ),
        Case(
            kind="gcp",
            offer=Offer("acme", "a3-highgpu-1g", "us-central1", "us-central1-b", "spot", usd_hour=6.58739),
            required={
                "offers": ("kind", "name", "zone", "guestCpus", "memoryMb"),
                "create": ("name", "status"),
                "rented": ("kind", "name", "status", "zone", "machineType"),
            },
            settings={"project": "reefs"},
            dead_state="stopped",
            price_from="nowhere",
        ),
        Case(
            kind="runpod",
            prices=("price", "cost"),
            offer=Offer("acme", "NVIDIA A40", "EU-RO-1", usd_hour=0.44),
            required={
                "offers": ("gpus", "id", "name", "memory", "maxCount", "price"),
                "create": ("id",),
                "rented": ("pods", "id", "status"),
            },
            maps=frozenset({"env"}),
            price_from="create",
        ),
        Case(
            kind="vast",
            prices=("dph_total", "min_bid"),
            offer=Offer("acme", "RTX 4090", "DE", usd_hour=0.420548),
            required={
                "offers": ("offers", "id", "gpu_name", "num_gpus", "dph_total"),
                "create": ("new_contract",),
                "rented": ("instances", "id"),
                "delete": ("success",),
            },
            dead_state="stopped",
        ),
        Case(
            kind="digitalocean",
            prices=("price_hourly",),
            offer=Offer("acme", "gpu-l40sx1-48gb", "tor1", usd_hour=1.57),
            required={
                "offers": ("sizes", "slug", "regions", "price_hourly", "vcpus", "memory"),
                "create": ("droplet", "id"),
                "rented": ("droplets", "id", "name", "status"),
                "ensure_key": ("ssh_keys", "public_key", "fingerprint"),
            },
            dead_state="stopped",
        ),
        Case(
            kind="nebius",
            prices=("cost",),
            offer=Offer("acme", "gpu-l40s-a 1gpu-8vcpu-32gb", "eu-north1", usd_hour=1.55),
            required={
                "offers": ("presets", "resources", "vcpuCount", "memoryGibibytes"),
                "create": ("resourceId",),
                "rented": ("status", "state", "id"),
            },
            maps=frozenset({"labels"}),
            dead_state="stopped",
            price_from="nowhere",
            http=False,
        ),
        Case(
            kind="paperspace",
            prices=("usageRate",),
            offer=Offer("acme", "A4000", "NY2", usd_hour=0.76),
            required={
                "offers": ("available",),
                "create": ("data", "event", "id"),
                "rented": ("items", "hasMore", "id", "name", "state"),
            },
            dead_state="stopped",
        ),
    )
}


@dataclass
class Clock:
    """A clock that stands still until it is moved."""

    now: float = 1_800_000_000.0

    def __call__(self) -> float:
        return self.now


@dataclass
class Trial:
    """A renter, and the simulated cloud that it rents from."""

    case: Case
    renter: RentalProvider
    simulation: SimulatorApp
    clock: Clock
    url: str

    @property
    def market(self) -> Market:
        return self.simulation.market

    def fault(self, kind: str, times: int = 1, **more: Any) -> None:
        self.market.faults.append(Fault(kind, times, **more))

    async def order(self, node: str = "gpu1", token: str = "t0ken1", cluster: str = CLUSTER) -> RentalOrder:
        name = await self.renter.ensure_key(cluster, PUBLIC_KEY)
        return RentalOrder(cluster, node, token, self.case.offer, PUBLIC_KEY, name, "#!/bin/sh\ntrue\n", lifetime=86400)

    async def create(self, node: str = "gpu1", token: str = "t0ken1", cluster: str = CLUSTER) -> RequestOutcome:
        [outcome] = await self.renter.create([await self.order(node, token, cluster)])
        return outcome

    async def listed(self, cluster: str = CLUSTER) -> list[RentedInstance]:
        return await self.renter.instances(cluster)

    def boot(self) -> None:
        """Let so much time pass that whatever boots is up."""
        self.clock.now += self.market.profile.boot_s + 1

    @property
    def made(self) -> int:
        """How many machines were ever made, by the cloud's own bill."""
        return len(self.market.bill())


@asynccontextmanager
async def trial(case: Case, *, limited: bool = False) -> AsyncIterator[Trial]:
    """Run the case's simulator on its own port, with a client for it."""
    clock = Clock()
    kind = find_simulator(case.kind)
    market = Market(kind.profile, kind.types, NoHosts(), clock=clock)
    simulation = SimulatorApp(kind(market), limited=limited)
    async with serve(simulation) as url, renting(case, url) as rents:
        yield Trial(case, rents, simulation, clock, url)


@asynccontextmanager
async def renting(case: Case, url: str, *, secret: str = "", **settings: str) -> AsyncIterator[RentalProvider]:
    """A client of the case for that address, by default with the case's key."""
    login = account(case, url, **settings)
    rents = rental_provider(replace(login, secret=secret) if secret else login)
    try:
        yield rents
    finally:
        await rents.close()


def account(case: Case, url: str, **settings: str) -> ProviderLogin:
    unhurried = {"request_interval": "0", "create_interval": "0", "timeout": "5"}
    return ProviderLogin("acme", case.kind, case.secret, url, {**unhurried, **case.settings, **settings})


@asynccontextmanager
async def answering(
    answer: Callable[[asyncio.StreamReader, asyncio.StreamWriter], Awaitable[None]],
) -> AsyncIterator[str]:
    """A server that calls this for each connection, and then hangs up."""
    tasks: set[asyncio.Task[Any] | None] = set()

    async def serve_once(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        tasks.add(asyncio.current_task())
        with contextlib.suppress(ConnectionError, asyncio.IncompleteReadError):
            await answer(reader, writer)
        writer.close()
        with contextlib.suppress(ConnectionError):
            await writer.wait_closed()

    server = await asyncio.start_server(serve_once, "127.0.0.1", 0)
    try:
        yield f"http://127.0.0.1:{server.sockets[0].getsockname()[1]}"
    finally:
        server.close()
        await asyncio.gather(*(task for task in tasks if task))


@asynccontextmanager
async def saying(reply: bytes | None, to: str = ".*", otherwise: str = "") -> AsyncIterator[str]:
    """A server that answers with these bytes and hangs up; with None, it does not answer at all.

    So it does to every request, or to those whose `METHOD /path` matches: all others are passed on to another server.
    """

    async def answer(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        head = await reader.readuntil(b"\r\n\r\n")
        length = [line for line in head.lower().split(b"\r\n") if line.startswith(b"content-length:")]
        body = await reader.readexactly(int(length[0].partition(b":")[2])) if length else b""
        asked = head.split(b"\r\n")[0].decode().rpartition(" ")[0].partition("?")[0]
        if body.startswith(b"Action="):  # Amazon's calls differ by the first field of their form alone
            asked += body.partition(b"&")[0].removeprefix(b"Action=").decode()
        if not re.fullmatch(to, asked):
            await _pass_on(head, body, otherwise, writer)
        elif reply is None:
            await reader.read()  # until the client times out
        else:
            writer.write(reply)
            await writer.drain()

    async with answering(answer) as url:
        yield url


async def _pass_on(head: bytes, body: bytes, url: str, writer: asyncio.StreamWriter) -> None:
    """Ask another server the same, and hand its answer over."""
    there = urlsplit(url)
    lines = [line for line in head.rstrip().split(b"\r\n") if not line.lower().startswith(b"connection:")]
    answers, asks = await asyncio.open_connection(there.hostname, there.port)
    asks.write(b"\r\n".join([*lines, b"Connection: close", b"", b""]) + body)
    writer.write(await answers.read())
    await writer.drain()
    asks.close()


def http(status: str, body: bytes, kind: str = "application/json") -> bytes:
    head = f"HTTP/1.1 {status}\r\nContent-Type: {kind}\r\nContent-Length: {len(body)}\r\nConnection: close\r\n\r\n"
    return head.encode() + body


BAD_ANSWERS = {
    "html": http("200 OK", b"<html><body>Scheduled maintenance</body></html>", "text/html"),
    "empty": http("200 OK", b""),
    "truncated": http("200 OK", b'{"data": [{"id": "1", "jupyter_token": "s3cret-of-theirs'),
    "null": http("200 OK", b"null"),
    "number": http("200 OK", b"17"),
    "empty object": http("200 OK", b"{}"),
    "empty list": http("200 OK", b"[]"),
    "list of nulls": http("200 OK", b'{"data": [null], "items": [null], "pods": [null], "machines": [null]}'),
    "wrong types": http("200 OK", b'{"data": 5, "items": "x", "pods": {}, "machines": 7}'),
    "not utf-8": http("200 OK", b"\xff\xfe\x00"),
    "cut off": b"HTTP/1.1 200 OK\r\nContent-Type: application/json\r\nContent-Length: 4000\r\n\r\n{",
    "no answer": b"",
    "no http": b"SSH-2.0-OpenSSH_9.2\r\n",
    "bad gateway": http("502 Bad Gateway", b"<html>502</html>", "text/html"),
    "empty 500": http("500 Internal Server Error", b""),
    "redirect": b"HTTP/1.1 301 Moved Permanently\r\nLocation: http://192.0.2.1/\r\nContent-Length: 0\r\n\r\n",
}
"""What comes where an answer should."""
JSON_ANSWERS = ("null", "number", "empty object", "empty list", "list of nulls", "wrong types")
"""Those that are whole and no error: where nothing of an answer is needed, it may be anything."""
