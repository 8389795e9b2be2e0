"""Simulated clouds: HTTP servers that keep to the shapes, delays and errors of the providers, for tests and trials."""

from __future__ import annotations

from typing import TYPE_CHECKING

from shoal.errors import UsageError
from shoal.providers.table import find, names

if TYPE_CHECKING:
    from shoal.simulators.server import Cloud

SIMULATORS = {
    "gcp": "shoal.simulators.gcp:GoogleCompute",
    "lambda": "shoal.simulators.lambda_cloud:LambdaCloud",
    "paperspace": "shoal.simulators.paperspace:Paperspace",
    "runpod": "shoal.simulators.runpod:RunPod",
    "sandbox": "shoal.simulators.sandbox:ElasticSandbox",
}
"""Kind -> `module:class`, a `server.Cloud`."""

GROUP = "shoal.simulators"
"""The entry point group by which an installed package adds a kind."""


def cloud(kind: str) -> type[Cloud]:
    """The simulated cloud of a kind of provider. Raises UsageError with the kinds there are."""
    found: type[Cloud] | None = find(kind, SIMULATORS, GROUP)
    if found is None:
        known = ", ".join(names(SIMULATORS, GROUP))
        raise UsageError(f"there is no simulator of {kind!r}", hint=f"use one of: {known}")
    return found
