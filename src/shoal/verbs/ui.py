"""`shoal ui`: a web page of the cluster in your browser, through SSH."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Protocol, runtime_checkable
from urllib.parse import urlsplit

from shoal.errors import ConnectionLost, ShoalError, UsageError
from shoal.hosts.api import Host
from shoal.roles.tracking import server_host
from shoal.tracking import login, mlflow
from shoal.verbs.context import Context

PAGES = ("mlflow",)
PAGE_TIMEOUT_S = 30.0


@runtime_checkable
class PortForwarder(Protocol):
    """A host that forwards ports."""

    async def forward(self, address: str, port: int, local_port: int = 0) -> int: ...

    async def wait_closed(self) -> None: ...


@dataclass(frozen=True)
class WebPage:
    """A web page that can be opened now."""

    name: str
    url: str
    user: str = ""
    password: str = ""
    """Only with --show-password."""


async def ui(
    context: Context, name: str, opened: Callable[[WebPage], None], *, port: int = 0, show_password: bool = False
) -> None:
    """Forward a local port to the page, report it, and keep it open until the connection or the command ends."""
    if name not in PAGES:
        raise UsageError(f"there is no page {name!r}", hint=f"use one of {', '.join(PAGES)}")
    if context.joined is not None:
        return await _open_as_user(context, name, opened, port, show_password)
    tracking = context.spec.tracking
    if tracking is None:
        raise UsageError("the spec has no tracking server", hint="add `tracking: mlflow`, then run `shoal up`")
    if tracking.url:
        return opened(WebPage(name, tracking.url))
    member = context.choose_one(server_host(context.spec))
    async with await context.connections([member]) as fleet:
        host = await fleet.host(member.name)
        address, server_port = await _read_listen_address(host)
        await _require_answer(host, mlflow.uri_of(address, server_port))
        user, password = await _read_login(host)
        page = WebPage(name, "", user, password if show_password else "")
        await _forward(host, page, address, server_port, port, opened)


async def _open_as_user(
    context: Context, name: str, opened: Callable[[WebPage], None], port: int, show_password: bool
) -> None:
    """The page through the user's own login, for the user's own account at the server."""
    assert context.joined is not None
    async with context.controller_host() as host:
        result = await host.run(login.ADDRESS_COMMAND, timeout=PAGE_TIMEOUT_S, root=False)
        variables = login.job_variables(result.text)
        if not context.joined.record.tracking:
            raise UsageError(f"cluster {context.cluster} has no tracking server", hint="ask the operator for one")
        if not variables:
            raise ShoalError(
                f"{host.name} does not know the tracking server yet", hint="ask the operator to run `shoal up`"
            )
        uri = variables["MLFLOW_TRACKING_URI"]
        if "MLFLOW_TRACKING_USERNAME" not in variables:
            return opened(WebPage(name, uri))
        if result.status != 0:
            raise ShoalError(
                f"you have no login to the tracking server of cluster {context.cluster}",
                hint="ask the operator to add you to `users` in the file and to run `shoal up`",
            )
        await _require_answer(host, uri)
        password = variables["MLFLOW_TRACKING_PASSWORD"] if show_password else ""
        page = WebPage(name, uri, variables["MLFLOW_TRACKING_USERNAME"], password)
        if not isinstance(host, PortForwarder):
            return opened(page)  # this machine belongs to the cluster, and reaches the server itself
        server = urlsplit(uri)
        assert server.hostname is not None and server.port is not None
        await _forward(host, page, server.hostname, server.port, port, opened)


async def _forward(
    host: Host, page: WebPage, address: str, server_port: int, port: int, opened: Callable[[WebPage], None]
) -> None:
    """Show the page at a port of this machine until the connection is lost."""
    assert isinstance(host, PortForwarder)
    local_port = await host.forward(address, server_port, port)
    opened(replace(page, url=f"http://127.0.0.1:{local_port}"))
    await host.wait_closed()
    raise ConnectionLost(host.name, "the connection was lost, and the tunnel with it", hint="run the command again")


async def _read_listen_address(host: Host) -> tuple[str, int]:
    """The address and port in the server's unit."""
    result = await host.run(("cat", mlflow.UNIT), timeout=PAGE_TIMEOUT_S)
    arguments = result.text.split()
    if result.status != 0 or "--host" not in arguments:
        raise ShoalError(f"{host.name} has no tracking server yet", hint="run `shoal up`")
    return arguments[arguments.index("--host") + 1], int(arguments[arguments.index("--port") + 1])


async def _require_answer(host: Host, uri: str) -> None:
    """Check first: through a tunnel, the browser would show a server that is down as an empty page."""
    answer = (await host.run(mlflow.health_command(uri, ours=True), timeout=PAGE_TIMEOUT_S)).text.strip()
    if answer != "200":
        hint = f"run `shoal up`; `shoal ssh {host.name} journalctl -u {mlflow.SERVICE}` shows why"
        raise ShoalError(f"the tracking server on {host.name} does not answer: {answer}", hint=hint)


async def _read_login(host: Host) -> tuple[str, str]:
    """The administrator's login for root, else the login of the user that the command runs as."""
    result = await host.run(login.LOGIN_COMMAND, timeout=PAGE_TIMEOUT_S)
    if result.status != 0:
        raise ShoalError(f"{host.name} has no password for the tracking server yet", hint="run `shoal up`")
    return login.read_user_login(result.text) or (mlflow.ADMIN, result.text.strip())
