"""Providers: what makes hosts. One table names those that come with Shoal; others join by entry point."""

from __future__ import annotations

from shoal.providers import table
from shoal.providers.api import Capability, Faults, Instance, Progress, Provider, Request

__all__ = ["PROVIDERS", "Capability", "Faults", "Instance", "Progress", "Provider", "Request", "names", "provider"]

PROVIDERS = {
    "fake": "shoal.providers.fake:FakeProvider",
    "sandbox": "shoal.providers.sandbox.provider:SandboxProvider",
}
"""Name -> `module:class`. The module is imported when the provider is asked for."""

GROUP = "shoal.providers"
"""The entry point group by which an installed package adds a provider."""


def names() -> tuple[str, ...]:
    """Every provider that may have made hosts: those of the table, but for the one in memory, and those installed."""
    return tuple(name for name in table.names(PROVIDERS, GROUP) if name != "fake")


def provider(name: str) -> Provider:
    """The provider of that name. Raises ProviderError with the names there are."""
    made: Provider = table.make(name, PROVIDERS, GROUP)
    return made
