"""gRPC in front of a simulator: calls become requests to its routes, `POST /SERVICE/METHOD`, with messages as JSON.

One port has both: a connection that begins as HTTP/2 goes to gRPC, any other to the web server with the control routes.
The messages are those of the provider's own library.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import socket
import tempfile
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any, Protocol

import grpc
import httpx
from starlette.types import ASGIApp

PREFACE = b"PRI "
"""How an HTTP/2 connection begins."""
CHUNK_BYTES = 65536
FIRST_BYTES_TIMEOUT_S = 10.0


class Messages(Protocol):
    """The messages of a provider's API. A method is `SERVICE/METHOD`."""

    def to_json(self, method: str, request: bytes) -> str:
        """A request as JSON. Raises LookupError for an unknown method."""

    def from_json(self, method: str, answer: str) -> bytes:
        """The answer of a method, from JSON."""

    def status(self, error: dict[str, Any]) -> bytes:
        """An error `{"code", "message", "errors"}` as a google.rpc.Status."""


@asynccontextmanager
async def serve_grpc(
    app: ASGIApp, messages: Messages, listeners: Sequence[socket.socket], web: tuple[str, int]
) -> AsyncIterator[None]:
    """Answer gRPC on these listeners, and pass any other connection on to the web server."""
    with tempfile.TemporaryDirectory() as directory:
        path = str(Path(directory) / "grpc")
        server = grpc.aio.server()
        async with httpx.AsyncClient(transport=httpx.ASGITransport(app), base_url="http://grpc") as client:
            server.add_generic_rpc_handlers((_Calls(client, messages),))
            server.add_insecure_port(f"unix:{path}")
            await server.start()
            fronts = [await asyncio.start_server(_Splitter(path, web), sock=listener) for listener in listeners]
            try:
                yield
            finally:
                for front in fronts:
                    front.close()
                await server.stop(0)


class _Calls(grpc.GenericRpcHandler):  # type: ignore[misc]
    """Every method of every service, as a request to the simulator."""

    def __init__(self, client: httpx.AsyncClient, messages: Messages) -> None:
        self._client, self._messages = client, messages

    def service(self, details: Any) -> Any:
        method = details.method.removeprefix("/")

        async def answer(request: bytes, context: Any) -> bytes:
            try:
                body = self._messages.to_json(method, request)
            except LookupError:
                await context.abort(grpc.StatusCode.UNIMPLEMENTED, method)
            headers = {name: value for name, value in context.invocation_metadata() if isinstance(value, str)}
            headers = {name: value for name, value in headers.items() if name in ("authorization", "x-idempotency-key")}
            response = await self._client.post(details.method, content=body, headers=headers)
            if response.is_success:
                return self._messages.from_json(method, response.text)
            if response.status_code == 404 and not response.text.startswith("{"):
                await context.abort(grpc.StatusCode.UNIMPLEMENTED, method)
            error = json.loads(response.text)
            code = next(code for code in grpc.StatusCode if code.value[0] == error["code"])
            details_bin = (("grpc-status-details-bin", self._messages.status(error)),)
            await context.abort(code, error["message"], details_bin)
            raise AssertionError("abort raises")

        return grpc.unary_unary_rpc_method_handler(answer)


class _Splitter:
    """Connects each connection to the server for its protocol."""

    def __init__(self, path: str, web: tuple[str, int]) -> None:
        self._path, self._web = path, web

    async def __call__(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        with contextlib.suppress(OSError, TimeoutError, asyncio.IncompleteReadError):
            async with asyncio.timeout(FIRST_BYTES_TIMEOUT_S):
                start = await reader.readexactly(len(PREFACE))
            if start == PREFACE:
                answers, asks = await asyncio.open_unix_connection(self._path)
            else:
                answers, asks = await asyncio.open_connection(*self._web)
            asks.write(start)
            await asyncio.gather(_copy(reader, asks), _copy(answers, writer))
        writer.close()


async def _copy(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
    with contextlib.suppress(OSError):
        while data := await reader.read(CHUNK_BYTES):
            writer.write(data)
            await writer.drain()
    writer.close()
