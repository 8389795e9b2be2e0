"""`shoal simulate`: a simulated cloud on this machine, until the person leaves."""

from __future__ import annotations

import asyncio
import json
import socket
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path

from shoal.errors import ProviderError, ShoalError, UsageError
from shoal.simulators import cloud
from shoal.simulators.faults import Fault, read_faults
from shoal.simulators.ground import Ground, Nowhere
from shoal.simulators.machines import Profile

QUICK = 1.0
"""Seconds until the address is known and until a machine is gone, where hosts are real: their own time is enough."""


@dataclass(frozen=True)
class Simulated:
    """A simulated cloud that answers now."""

    kind: str
    url: str
    """For `url` of the account in shoal.yaml."""
    cluster: str
    """The sandbox cluster beside whose hosts its machines are; empty where there are no machines."""
    machines: int
    """How many were there already."""
    warning: str = ""


async def simulate(
    kind: str,
    opened: Callable[[Simulated], None],
    *,
    port: int = 0,
    cluster: str = "",
    image: str = "debian12",
    faults: Path | None = None,
    boot_seconds: float | None = None,
    limited: bool = True,
    keep: bool = False,
) -> None:
    """Run a provider's simulator until it is cancelled. Its machines go then, unless they are to be kept.

    A start that fails touches nothing that a former run left.
    """
    try:
        from shoal.simulators import sandbox_ground, server
        from shoal.simulators.market import Market
    except ModuleNotFoundError as error:
        raise ShoalError(
            f"simulators need {error.name}, which is not installed", hint="install Shoal as `shoal[simulate]`"
        ) from None
    wanted = _read(faults) if faults else []
    made = cloud(kind)
    hosts = sandbox_ground.SandboxGround(kind, cluster, image=image) if cluster else None
    ground: Ground = hosts or Nowhere()
    address, warning, started = "127.0.0.1", "", False
    metadata: socket.socket | None = None
    try:
        if hosts is not None:
            address = await hosts.open()
            if made.metadata is not server.Cloud.metadata:
                try:
                    metadata = await hosts.listen_for_metadata()
                except ProviderError as error:
                    warning = f"machines are not told that they will be taken away: {error.message}"
        profile = _profile(made.profile, bool(cluster), boot_seconds)
        market = Market(profile, made.types, ground, store=hosts.store if hosts else None)
        market.faults = wanted
        market.adopt()
        simulation = server.Simulation(made(market), limited=limited)
        async with server.serving(simulation, port, dict.fromkeys(("127.0.0.1", address)), metadata) as url:
            started = True
            alive = sum(one.phase != "gone" for one in market.machines.values())
            opened(Simulated(kind, url.removesuffix(made.base), cluster, alive, warning))
            await asyncio.Event().wait()
    finally:
        if metadata is not None:
            metadata.close()
        await ground.close(keep or (not started and hosts is not None and hosts.found))


def _profile(usual: Profile, real: bool, boot_seconds: float | None) -> Profile:
    """The provider's own delays; with real hosts, those hosts' own."""
    boots = boot_seconds if boot_seconds is not None else 0.0 if real else usual.boot_seconds
    quick = QUICK if real else usual.stop_seconds
    return replace(
        usual,
        boot_seconds=boots,
        address_seconds=min(usual.address_seconds, boots / 4),
        stop_seconds=min(usual.stop_seconds, quick),
    )


def _read(path: Path) -> list[Fault]:
    try:
        return read_faults(json.loads(path.read_text()))
    except OSError as error:
        raise UsageError(f"cannot read {path}: {error.strerror}") from None
    except ValueError as error:
        raise UsageError(f"{path}: {error}", hint='write it like [{"kind": "stockout", "times": -1}]') from None
