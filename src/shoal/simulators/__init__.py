"""Simulated clouds: HTTP servers that keep to the shapes, delays and errors of the providers, for tests and trials."""

from __future__ import annotations

from importlib import import_module
from importlib.metadata import entry_points
from typing import TYPE_CHECKING

from shoal.errors import UsageError

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
    known = {**{one.name: one.value for one in entry_points(group=GROUP)}, **SIMULATORS}
    if kind not in known:
        raise UsageError(f"there is no simulator of {kind!r}", hint=f"use one of: {', '.join(sorted(known))}")
    module, _, attribute = known[kind].partition(":")
    found: type[Cloud] = getattr(import_module(module), attribute)
    return found
