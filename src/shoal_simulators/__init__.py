"""Test equipment: simulated clouds behind the providers' HTTP APIs, and fakes of hosts, agents, providers and Slurm.

The core does not import this package, except `shoal simulate` when it runs. The web servers need the extra `simulate`.
This package may import all of `shoal` but its command line.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from shoal.errors import UsageError
from shoal.registry import find, names

if TYPE_CHECKING:
    from shoal_simulators.server import Simulator

SIMULATORS = {
    "aws": "shoal_simulators.aws:AwsSimulator",
    "digitalocean": "shoal_simulators.digitalocean:DigitalOceanSimulator",
    "gcp": "shoal_simulators.gcp:GoogleComputeSimulator",
    "lambda": "shoal_simulators.lambda_cloud:LambdaSimulator",
    "nebius": "shoal_simulators.nebius:NebiusSimulator",
    "paperspace": "shoal_simulators.paperspace:PaperspaceSimulator",
    "runpod": "shoal_simulators.runpod:RunPodSimulator",
    "sandbox": "shoal_simulators.sandbox:SandboxSimulator",
    "vast": "shoal_simulators.vast:VastSimulator",
}
"""Kind -> `module:class`, a `server.Simulator`."""

GROUP = "shoal.simulators"
"""The entry point group by which an installed package adds a kind."""


def find_simulator(kind: str) -> type[Simulator]:
    """The simulator of a kind of provider. Raises UsageError with the known kinds."""
    simulator: type[Simulator] | None = find(kind, SIMULATORS, GROUP)
    if simulator is None:
        known = ", ".join(names(SIMULATORS, GROUP))
        raise UsageError(f"there is no simulator of {kind!r}", hint=f"use one of: {known}")
    return simulator
