"""The shell around every simulated cloud: keys, rate limits, faults of any request, the control routes, a socket.

Control routes lie outside the provider's own paths and ask for no key:

    GET  /_simulator/bill              what each machine has cost, by the provider's rule
    GET  /_simulator/requests          method, path and status of every request
    GET  /_simulator/faults            PUT replaces them: [{"kind": "stockout", "times": -1, "region": "us-west-1"}]
    POST /_simulator/preempt/{id}      the provider takes the machine away, with its notice
    POST /_simulator/kill/{id}         the machine dies
"""

from __future__ import annotations

import asyncio
import contextlib
import hmac
import json
import logging
import re
import socket
from collections.abc import AsyncIterator, Callable, Iterable, Sequence
from contextlib import asynccontextmanager
from dataclasses import asdict, dataclass, field
from functools import partial
from typing import Any

import uvicorn
from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import JSONResponse, PlainTextResponse, Response
from starlette.routing import BaseRoute, Route
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from shoal.errors import ProviderError
from shoal.simulators.faults import read_faults
from shoal.simulators.machines import Machine, MachineType, Profile
from shoal.simulators.market import Market, Refused

log = logging.getLogger("shoal.simulators")

CONTROL = "/_simulator"
METADATA = "169.254.169.254"
"""Where machines of a cloud ask for what concerns themselves."""
TICK = 0.25
"""Time passes for machines so often when nobody asks."""


@dataclass
class Limit:
    """One request each `interval` seconds, of those whose `METHOD /path` matches."""

    interval: float
    match: str = r".*"
    slack: float = 0.0
    """So much earlier is still let through: a burst."""
    _next: float = field(default=0.0, repr=False)

    def admits(self, request: str, now: float) -> bool:
        if not re.fullmatch(self.match, request):
            return True
        if now < self._next - self.slack:
            return False
        self._next = max(now, self._next) + self.interval
        return True


class Cloud:
    """What a provider's simulator says of itself. See `shoal.simulators.market` for how one is written."""

    kind: str
    base: str = ""
    """The path that all its routes begin with."""
    profile: Profile
    types: Sequence[MachineType]
    creating: str
    """Which `METHOD /path` makes machines, as a regular expression."""
    listing: str
    """Which one lists them."""

    def __init__(self, market: Market) -> None:
        self.market = market

    def routes(self) -> list[BaseRoute]:
        raise NotImplementedError

    def refuse(self, why: str, detail: str = "") -> Response:
        """The provider's own error for a reason out of `market.REFUSALS`."""
        raise NotImplementedError

    def limits(self) -> list[Limit]:
        return []

    def metadata(self, request: Request, machine: Machine) -> Response | None:
        """What a machine is told that asks for itself at METADATA; None where there is nothing of that name."""
        return None

    def authorised(self, request: Request, key: str) -> bool:
        """Whether the request carries the key; where the simulator was given none, any will do."""
        given = request.headers.get("authorization", "").removeprefix("Bearer ").strip()
        return bool(given) and (not key or hmac.compare_digest(given.encode(), key.encode()))


@dataclass
class Simulation:
    """A simulated cloud as an ASGI application."""

    cloud: Cloud
    key: str = field(default="", repr=False)
    limited: bool = True
    """Whether rate limits are kept."""
    requests: list[dict[str, Any]] = field(default_factory=list)
    metadata_at: tuple[str, int] | None = None
    """The address and port where machines ask for themselves: what they ask METADATA arrives there."""
    rewrite: Callable[[str, Any], Any] | None = None
    """Lets a test change answers: given `METHOD /path` and the JSON, it returns what is sent instead."""

    def __post_init__(self) -> None:
        control = [
            Route(f"{CONTROL}/bill", self._bill),
            Route(f"{CONTROL}/requests", self._requests),
            Route(f"{CONTROL}/faults", self._faults, methods=["GET", "PUT"]),
            Route(f"{CONTROL}/preempt/{{id}}", self._preempt, methods=["POST"]),
            Route(f"{CONTROL}/kill/{{id}}", self._kill, methods=["POST"]),
        ]
        self._control: ASGIApp = Starlette(routes=control, exception_handlers={Refused: self._unknown})
        self._inner: ASGIApp = Starlette(routes=self.cloud.routes(), exception_handlers={Refused: self._refused})
        self._limits = self.cloud.limits()

    @property
    def market(self) -> Market:
        return self.cloud.market

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            raise RuntimeError(f"a simulator speaks HTTP, not {scope['type']}")
        if scope["path"].startswith(CONTROL):
            return await self._control(scope, receive, send)
        request = Request(scope, receive)
        if self.metadata_at and tuple(scope["server"]) == self.metadata_at:
            return await self._metadata(request)(scope, receive, send)
        seen = {"at": self.market.clock(), "method": request.method, "path": scope["path"], "status": 0}
        self.requests.append(seen)

        async def noting(message: Message) -> None:
            if message["type"] == "http.response.start":
                seen["status"] = message["status"]
            await send(message)

        app = self._stopped_at_the_door(request) or self._inner
        if self.rewrite is not None:
            app = _Rewritten(app, partial(self.rewrite, f"{request.method} {scope['path']}"))
        await app(scope, receive, noting)

    def _stopped_at_the_door(self, request: Request) -> Response | None:
        line = f"{request.method} {request.url.path}"
        if not self.cloud.authorised(request, self.key) or self.market.take("auth"):
            return self.cloud.refuse("auth")
        now = self.market.clock()
        if self.limited and not all(limit.admits(line, now) for limit in self._limits):
            return self.cloud.refuse("rate")
        if self.market.take("rate"):
            return self.cloud.refuse("rate")
        if re.fullmatch(self.cloud.listing, line) and self.market.take("list-fails"):
            return self.cloud.refuse("list-fails")
        return None

    def _metadata(self, request: Request) -> Response:
        """As clouds do it: who asks is known by its address."""
        asking = request.client.host if request.client else ""
        own = [one for one in self.market.machines.values() if one.live and asking in (one.host, one.private_address)]
        return (self.cloud.metadata(request, own[0]) if own else None) or PlainTextResponse("not found", 404)

    async def _refused(self, request: Request, error: Exception) -> Response:
        assert isinstance(error, Refused)
        return self.cloud.refuse(error.why, error.detail)

    async def _unknown(self, request: Request, error: Exception) -> Response:
        return JSONResponse({"error": f"no live machine {error}"}, 404)

    async def _bill(self, request: Request) -> Response:
        machines = self.market.bill()
        return JSONResponse({"machines": machines, "usd": round(sum(one["usd"] for one in machines), 6)})

    async def _requests(self, request: Request) -> Response:
        return JSONResponse(self.requests)

    async def _faults(self, request: Request) -> Response:
        if request.method == "PUT":
            try:
                self.market.faults = read_faults(json.loads(await request.body()))
            except ValueError as error:
                return JSONResponse({"error": str(error)}, 400)
        return JSONResponse([asdict(fault) for fault in self.market.faults])

    async def _preempt(self, request: Request) -> Response:
        return _told(self.market.preempt(request.path_params["id"]))

    async def _kill(self, request: Request) -> Response:
        return _told(self.market.kill(request.path_params["id"]))


@dataclass
class _Rewritten:
    """An application whose JSON is changed on its way out."""

    app: ASGIApp
    change: Callable[[Any], Any]

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        start: Message = {}
        body = b""

        async def collecting(message: Message) -> None:
            nonlocal start, body
            if message["type"] == "http.response.start":
                start = message
                return
            body += message.get("body", b"")
            if not message.get("more_body", False):
                whole = json.dumps(self.change(json.loads(body))).encode() if body else b""
                others = [pair for pair in start["headers"] if pair[0] != b"content-length"]
                length = (b"content-length", str(len(whole)).encode())
                await send({**start, "headers": [*others, length] if whole else others})
                await send({"type": "http.response.body", "body": whole})

        await self.app(scope, receive, collecting)


def _told(machine: Machine) -> Response:
    return JSONResponse({"id": machine.id, "phase": machine.phase, "takes_away": machine.takes_away})


async def read_json(request: Request) -> dict[str, Any]:
    """The object in a request's body. Raises Refused with `invalid`."""
    try:
        data = json.loads(await request.body())
    except ValueError:
        raise Refused("invalid", "the body is not JSON") from None
    if not isinstance(data, dict):
        raise Refused("invalid", "the body is not an object")
    return data


class _Server(uvicorn.Server):
    """Leaves signals to whoever runs it."""

    @contextlib.contextmanager
    def capture_signals(self) -> Any:
        yield


@asynccontextmanager
async def serving(
    simulation: Simulation,
    port: int = 0,
    addresses: Iterable[str] = ("127.0.0.1",),
    metadata: socket.socket | None = None,
) -> AsyncIterator[str]:
    """Answer on a port, by default one that is free. Gives the URL that the provider's API begins with.

    It is that of the last address. `metadata` is a socket that listens already, where machines ask for themselves.
    """
    listeners: list[socket.socket] = []
    try:
        for address in list(addresses):
            listeners.append(listen(address, port))
            port = listeners[-1].getsockname()[1]
    except ProviderError:
        for listener in listeners:
            listener.close()
        raise
    if metadata is not None:
        simulation.metadata_at = metadata.getsockname()
        listeners.append(metadata)
    config = uvicorn.Config(
        simulation, log_level="error", access_log=False, lifespan="off", timeout_graceful_shutdown=2
    )
    server = _Server(config)
    answering = asyncio.create_task(server.serve(sockets=listeners))
    ticking = asyncio.create_task(_tick(simulation.market))
    try:
        while not server.started:  # noqa: ASYNC110
            await asyncio.sleep(0.01)  # uvicorn has no event for it
        yield f"http://{address}:{port}{simulation.cloud.base}"
    finally:
        ticking.cancel()
        server.should_exit = True
        await answering
        for listener in listeners:
            listener.close()


def listen(address: str, port: int) -> socket.socket:
    """A socket there. Raises ProviderError."""
    # Named, the protocol lets asyncio send small pieces at once; else each answer waits 40 ms for an acknowledgement.
    listener = socket.socket(socket.AF_INET, socket.SOCK_STREAM, socket.IPPROTO_TCP)
    try:
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        listener.bind((address, port))
        listener.listen(2048)
    except OSError as error:
        listener.close()
        raise ProviderError(
            f"cannot listen on {address} port {port}: {error.strerror}", hint="name another port with --port"
        ) from None
    return listener


async def _tick(market: Market) -> None:
    while True:
        try:
            market.look()
        except OSError:  # a disk that is full now may not be later
            log.exception("the machines of this cloud stand still")
        await asyncio.sleep(TICK)
