"""`shoal ui`: a page of the cluster in the browser of whoever runs it, through SSH."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Protocol, runtime_checkable

from shoal.errors import ConnectionLost, ShoalError, UsageError
from shoal.hosts.api import Host
from shoal.roles.tracking import server_host
from shoal.tracking import mlflow
from shoal.verbs.context import Context

PAGES = ("mlflow",)
PATIENCE = 30.0


@runtime_checkable
class Tunnels(Protocol):
    """A host through which others can be reached."""

    async def forward(self, address: str, port: int, near: int = 0) -> int: ...

    async def gone(self) -> None: ...


@dataclass(frozen=True)
class Page:
    """A page that can be opened now."""

    name: str
    url: str
    user: str = ""
    password: str = ""
    """Only where it was asked for."""


async def ui(
    context: Context, name: str, opened: Callable[[Page], None], *, port: int = 0, show_password: bool = False
) -> None:
    """Open a tunnel, say where it begins, and keep it until the connection ends or the person leaves."""
    if name not in PAGES:
        raise UsageError(f"there is no page {name!r}", hint=f"use one of {', '.join(PAGES)}")
    tracking = context.spec.tracking
    if tracking is None:
        raise UsageError("the spec has no tracking server", hint="add `tracking: mlflow`, then run `shoal up`")
    if tracking.url:
        return opened(Page(name, tracking.url))
    member = context.choose_one(server_host(context.spec))
    async with await context.connections([member]) as fleet:
        host = await fleet.host(member.name)
        assert isinstance(host, Tunnels)
        address, where = await _listening(host)
        await _expect_answer(host, mlflow.uri_of(address, where))
        near = await host.forward(address, where, port)
        password = await _password(host) if show_password else ""
        opened(Page(name, f"http://127.0.0.1:{near}", mlflow.ADMIN, password))
        await host.gone()
        raise ConnectionLost(member.name, "the connection was lost, and the tunnel with it", hint="run it again")


async def _listening(host: Host) -> tuple[str, int]:
    """Where the server listens, as its unit says."""
    result = await host.run(("cat", mlflow.UNIT), timeout=PATIENCE)
    words = result.text.split()
    if result.status != 0 or "--host" not in words:
        raise ShoalError(f"{host.name} has no tracking server yet", hint="run `shoal up`")
    return words[words.index("--host") + 1], int(words[words.index("--port") + 1])


async def _expect_answer(host: Host, uri: str) -> None:
    """A tunnel to a server that is down would only be told by the browser, and badly."""
    said = (await host.run(mlflow.health_command(uri, ours=True), timeout=PATIENCE)).text.strip()
    if said != "200":
        hint = f"run `shoal up`; `shoal ssh {host.name} journalctl -u {mlflow.SERVICE}` shows why"
        raise ShoalError(f"the tracking server on {host.name} does not answer: {said}", hint=hint)


async def _password(host: Host) -> str:
    result = await host.run(("cat", mlflow.ADMIN_PASSWORD), timeout=PATIENCE)
    if result.status != 0:
        raise ShoalError(f"{host.name} has no password of the tracking server yet", hint="run `shoal up`")
    return result.text.strip()
