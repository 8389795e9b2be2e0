"""Providers: what makes hosts. One table names those that come with Shoal; others join by entry point."""

from __future__ import annotations

from importlib import import_module
from importlib.metadata import entry_points

from shoal.errors import ProviderError
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
    return tuple(sorted({*PROVIDERS, *(entry.name for entry in entry_points(group=GROUP))} - {"fake"}))


def provider(name: str) -> Provider:
    """The provider of that name. Raises ProviderError with the names there are."""
    if name in PROVIDERS:
        module, _, attribute = PROVIDERS[name].partition(":")
        made: Provider = getattr(import_module(module), attribute)()
        return made
    # Looking through all installed packages takes a while.
    others = {entry.name: entry for entry in entry_points(group=GROUP)}
    if name in others:
        try:
            made = others[name].load()()
        except Exception as error:  # somebody else's package may fail in any way
            raise ProviderError(
                f"provider {name} cannot be loaded: {error}", hint=f"mend or remove {others[name].value}"
            ) from error
        return made
    known = ", ".join(sorted({*PROVIDERS, *others}))
    raise ProviderError(f"no provider is called {name!r}", hint=f"use one of: {known}")
