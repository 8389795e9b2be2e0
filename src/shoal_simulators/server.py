"""The HTTP server of every simulated cloud: keys, rate limits, faults of any request, control routes.

Control routes are outside the provider's paths and need no key. docs/adding-a-provider.md has them all.
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
from datetime import UTC, datetime
from typing import TYPE_CHECKING, Any

import httpx
import uvicorn
from starlette.applications import Starlette
from starlette.requests import ClientDisconnect, Request
from starlette.responses import JSONResponse, PlainTextResponse, Response
from starlette.routing import BaseRoute, Route
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from shoal.errors import ProviderError
from shoal_simulators.instances import MachineType, Profile, SimulatedInstance, read_faults
from shoal_simulators.market import ApiRejection, Market

if TYPE_CHECKING:
    from shoal_simulators.grpc_front import Messages

log = logging.getLogger("shoal_simulators")

CONTROL = "/_simulator"
METADATA = "169.254.169.254"
"""The address of a cloud's metadata service."""
TICK_S = 0.25
"""Seconds between two updates of the market."""


@dataclass
class RateLimit:
    """One request each `interval` seconds, of those whose `METHOD /path` matches."""

    interval: float
    match: str = r".*"
    slack: float = 0.0
    """Seconds of burst: a request this much too early still passes."""
    _next: float = field(default=0.0, repr=False)

    def admits(self, request: str, now: float) -> bool:
        if not re.fullmatch(self.match, request):
            return True
        if now < self._next - self.slack:
            return False
        self._next = max(now, self._next) + self.interval
        return True


class Simulator:
    """A provider's simulator. `shoal_simulators.market` shows how to write one."""

    kind: str
    base: str = ""
    """The prefix of all its routes."""
    profile: Profile
    types: Sequence[MachineType]
    creating: str
    """The `METHOD /path` that makes machines, as a regular expression."""
    listing: str
    """The `METHOD /path` that lists them."""
    grpc: Messages | None = None
    """The messages of a provider whose API is gRPC; its routes are `POST /SERVICE/METHOD`."""

    def __init__(self, market: Market) -> None:
        self.market = market

    def routes(self) -> list[BaseRoute]:
        raise NotImplementedError

    def error_response(self, reason: str, detail: str = "") -> Response:
        """The provider's error response for a reason out of `market.REJECTIONS`."""
        raise NotImplementedError

    def limits(self) -> list[RateLimit]:
        return []

    def metadata(self, request: Request, machine: SimulatedInstance) -> Response | None:
        """The answer of the metadata service to a machine; None for an unknown path."""
        return None

    def stored(self, what: str) -> dict[str, dict[str, Any]]:
        """Other resources than machines, by id. `market.save` writes them."""
        resources: dict[str, dict[str, Any]] = self.market.notes.setdefault(what, {})
        return resources

    def call_name(self, request: Request, body: bytes) -> str:
        """The call as `creating` and `listing` name it."""
        return f"{request.method} {request.url.path}"

    def decode(self, content: bytes) -> Any:
        """The data of one of its answers."""
        return json.loads(content)

    def encode(self, data: Any, status: int) -> Response:
        """An answer with such data."""
        return JSONResponse(data, status)

    def authorised(self, request: Request, key: str) -> bool:
        """Whether the request has the key; without a configured key, any key."""
        given = request.headers.get("authorization", "").removeprefix("Bearer ").strip()
        return bool(given) and (not key or hmac.compare_digest(given.encode(), key.encode()))


@dataclass
class SimulatorApp:
    """A simulated cloud as an ASGI application."""

    simulator: Simulator
    key: str = field(default="", repr=False)
    limited: bool = True
    """Whether to enforce rate limits."""
    requests: list[dict[str, Any]] = field(default_factory=list)
    metadata_at: tuple[str, int] | None = None
    """The address and port that receives the machines' requests to METADATA."""
    rewrite: Callable[[str, Any], Any] | None = None
    """A test's hook: takes the name of a call and the data of its answer, returns the data to send."""

    def __post_init__(self) -> None:
        control = [
            Route(f"{CONTROL}/bill", self._bill),
            Route(f"{CONTROL}/requests", self._requests),
            Route(f"{CONTROL}/faults", self._faults, methods=["GET", "PUT"]),
            Route(f"{CONTROL}/{{event:str}}/{{id}}", self._fail_machine, methods=["POST"]),
        ]
        self._control: ASGIApp = Starlette(routes=control, exception_handlers={ApiRejection: self._respond_unknown})
        self._inner: ASGIApp = Starlette(
            routes=self.simulator.routes(), exception_handlers={ApiRejection: self._respond_rejected}
        )
        self._limits = self.simulator.limits()

    @property
    def market(self) -> Market:
        return self.simulator.market

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

        try:
            body = request.state.body = await request.body()
        except ClientDisconnect:
            return None
        unread: list[Message] = [{"type": "http.request", "body": body, "more_body": False}]

        async def receive_again() -> Message:
            return unread.pop() if unread else await receive()

        call = self.simulator.call_name(request, body)
        app = self._early_rejection(request, call) or self._inner
        if self.rewrite is not None:
            app = await self._rewritten(app, request, call, self.rewrite)
        await app(scope, receive_again, noting)

    async def _rewritten(
        self, app: ASGIApp, request: Request, call: str, rewrite: Callable[[str, Any], Any]
    ) -> Response:
        """The response of an application with its data changed."""

        async def stateful(scope: Scope, receive: Receive, send: Send) -> None:
            await app({**scope, "state": request.scope["state"]}, receive, send)

        async with httpx.AsyncClient(transport=httpx.ASGITransport(stateful)) as client:
            url, body = str(request.url), await request.body()
            response = await client.request(request.method, url, headers=request.headers.raw, content=body)
        headers = {name: value for name, value in response.headers.items() if name != "content-length"}
        if not response.content:
            return Response(status_code=response.status_code, headers=headers)
        answer = self.simulator.encode(rewrite(call, self.simulator.decode(response.content)), response.status_code)
        answer.headers.update({name: value for name, value in headers.items() if name != "content-type"})
        return answer

    def _early_rejection(self, request: Request, line: str) -> Response | None:
        if not self.simulator.authorised(request, self.key) or self.market.take_fault("auth"):
            return self.simulator.error_response("auth")
        now = self.market.clock()
        if self.limited and not all(limit.admits(line, now) for limit in self._limits):
            return self.simulator.error_response("rate")
        if self.market.take_fault("rate"):
            return self.simulator.error_response("rate")
        if re.fullmatch(self.simulator.listing, line) and self.market.take_fault("list-fails"):
            return self.simulator.error_response("list-fails")
        return None

    def _metadata(self, request: Request) -> Response:
        """The address of the client identifies the machine, as in real clouds."""
        asking = request.client.host if request.client else ""
        own = [
            machine
            for machine in self.market.instances.values()
            if machine.live and asking in (machine.host, machine.private_address)
        ]
        return (self.simulator.metadata(request, own[0]) if own else None) or PlainTextResponse("not found", 404)

    async def _respond_rejected(self, request: Request, error: Exception) -> Response:
        assert isinstance(error, ApiRejection)
        return self.simulator.error_response(error.reason, error.detail)

    async def _respond_unknown(self, request: Request, error: Exception) -> Response:
        return JSONResponse({"error": f"no live machine {error}"}, 404)

    async def _bill(self, request: Request) -> Response:
        machines = self.market.bill()
        return JSONResponse({"machines": machines, "usd": round(sum(machine["usd"] for machine in machines), 6)})

    async def _requests(self, request: Request) -> Response:
        return JSONResponse(self.requests)

    async def _faults(self, request: Request) -> Response:
        if request.method == "PUT":
            try:
                self.market.faults = read_faults(json.loads(await request.body()))
            except ValueError as error:
                return JSONResponse({"error": str(error)}, 400)
        return JSONResponse([asdict(fault) for fault in self.market.faults])

    async def _fail_machine(self, request: Request) -> Response:
        events = {"preempt": self.market.preempt, "kill": self.market.kill, "stop": self.market.stop}
        if request.path_params["event"] not in events:
            return PlainTextResponse("not found", 404)
        machine = events[request.path_params["event"]](request.path_params["id"])
        return JSONResponse({"id": machine.id, "phase": machine.phase, "takes_away": machine.takes_away})


async def read_json(request: Request) -> dict[str, Any]:
    """The object in a request's body. Raises ApiRejection with `invalid`."""
    try:
        data = json.loads(await request.body())
    except ValueError:
        raise ApiRejection("invalid", "the body is not JSON") from None
    if not isinstance(data, dict):
        raise ApiRejection("invalid", "the body is not an object")
    return data


def iso_time(seconds: float | None) -> str | None:
    """A time as most APIs write it: `2026-11-16T18:30:00.000Z`."""
    if seconds is None:
        return None
    return datetime.fromtimestamp(seconds, UTC).isoformat(timespec="milliseconds").replace("+00:00", "Z")


@asynccontextmanager
async def serve(
    simulation: SimulatorApp,
    port: int = 0,
    addresses: Iterable[str] = ("127.0.0.1",),
    metadata: socket.socket | None = None,
) -> AsyncIterator[str]:
    """Serve on a port, by default a free one. Yields the base URL of the provider's API.

    The URL has the last address. `metadata` is a listening socket for the metadata service.
    """
    with contextlib.ExitStack() as opened:
        listeners: list[socket.socket] = []
        for address in addresses:
            listeners.append(opened.enter_context(listen(address, port)))
            port = listeners[-1].getsockname()[1]
        public = listeners
        if simulation.simulator.grpc is not None:
            listeners = [opened.enter_context(listen("127.0.0.1", 0))]
        if metadata is not None:
            simulation.metadata_at = metadata.getsockname()
            listeners.append(opened.enter_context(metadata))
        config = uvicorn.Config(
            simulation, log_level="error", access_log=False, lifespan="off", timeout_graceful_shutdown=2
        )
        server = uvicorn.Server(config)
        server.capture_signals = contextlib.nullcontext  # type: ignore[assignment,method-assign]  # the caller has its own
        answering = asyncio.create_task(server.serve(sockets=listeners))
        ticking = asyncio.create_task(_tick(simulation.market))
        try:
            while not server.started:  # noqa: ASYNC110
                await asyncio.sleep(0.01)  # uvicorn has no event for it
            async with _grpc(simulation, public, listeners[0]):
                yield f"http://{address}:{port}{simulation.simulator.base}"
        finally:
            ticking.cancel()
            server.should_exit = True
            await answering


def _grpc(
    simulation: SimulatorApp, listeners: Sequence[socket.socket], web: socket.socket
) -> contextlib.AbstractAsyncContextManager[None]:
    if simulation.simulator.grpc is None:
        return contextlib.nullcontext()
    from shoal_simulators.grpc_front import serve_grpc  # it needs a provider's library

    return serve_grpc(simulation, simulation.simulator.grpc, listeners, web.getsockname())


def listen(address: str, port: int) -> socket.socket:
    """A listening socket. Raises ProviderError."""
    # asyncio sets TCP_NODELAY only if the protocol is named; without it each answer waits 40 ms.
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
            market.update()
        except OSError:  # a full disk may have space later
            log.exception("cannot save the state of the machines")
        await asyncio.sleep(TICK_S)
