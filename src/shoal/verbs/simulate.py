"""`shoal simulate`: a simulated cloud on this machine, until Ctrl-C."""

from __future__ import annotations

import asyncio
import socket
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from shoal.errors import ProviderError, ShoalError
from shoal.registry import install_command


@dataclass(frozen=True)
class Simulated:
    """A simulated cloud that answers now."""

    kind: str
    url: str
    """For `url` of the account in shoal.yaml."""
    cluster: str
    """The sandbox cluster that its machines are in; empty without machines."""
    machines: int
    """How many machines it has from an earlier run."""
    warning: str = ""


async def simulate(
    kind: str,
    opened: Callable[[Simulated], None],
    port: int = 0,
    cluster: str = "",
    image: str = "",
    faults: Path | None = None,
    boot_s: float | None = None,
    limited: bool = True,
    keep: bool = False,
) -> None:
    """Run a provider's simulator until it is cancelled. Then its machines are removed, unless `keep`.

    A start that fails leaves the machines of an earlier run alone.
    """
    try:  # the simulators and their web server are an optional part
        from shoal_simulators import backend, find_simulator, instances, sandbox_backend, server
        from shoal_simulators.market import Market

        simulator = find_simulator(kind)
    except ModuleNotFoundError as error:
        extra = kind if (error.name or "").partition(".")[0] in (kind, "grpc") else "simulate"
        raise ShoalError(
            f"cannot simulate {kind}: the package {error.name} is not installed",
            hint=f"run `{install_command(extra)}`",
        ) from None
    fault_list = instances.read_fault_file(faults) if faults else []
    hosts = sandbox_backend.SandboxBackend(kind, cluster, image=image) if cluster else None
    machines: backend.HostBackend = hosts or backend.NoHosts()
    address, warning, is_started = "127.0.0.1", "", False
    metadata: socket.socket | None = None
    try:
        if hosts is not None:
            address = await hosts.open()
            if simulator.metadata is not server.Simulator.metadata:
                try:
                    metadata = await hosts.listen_for_metadata()
                except ProviderError as error:
                    warning = f"machines get no notice of preemption: {error.message}"
        profile = simulator.profile.adjusted(real_hosts=bool(cluster), boot_s=boot_s)
        market = Market(profile, simulator.types, machines, store=hosts.store if hosts else None)
        market.faults = fault_list
        market.adopt()
        app = server.SimulatorApp(simulator(market), limited=limited)
        async with server.serve(app, port, dict.fromkeys(("127.0.0.1", address)), metadata) as url:
            is_started = True
            live_machines = sum(machine.phase != "gone" for machine in market.instances.values())
            opened(Simulated(kind, url.removesuffix(simulator.base), cluster, live_machines, warning))
            await asyncio.Event().wait()
    finally:
        if metadata is not None:
            metadata.close()
        await machines.close(keep or (not is_started and hosts is not None and hosts.has_state))
