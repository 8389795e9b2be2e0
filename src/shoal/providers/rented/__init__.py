"""The providers that rent machines out. One table names those that come with Shoal; others join by entry point."""

from __future__ import annotations

from importlib import import_module
from importlib.metadata import entry_points

from shoal.errors import ProviderError
from shoal.providers.rental import Account, Renter

RENTERS = {
    "gcp": "shoal.providers.rented.gcp:GoogleCompute",
    "lambda": "shoal.providers.rented.lambda_cloud:LambdaCloud",
    "paperspace": "shoal.providers.rented.paperspace:Paperspace",
    "runpod": "shoal.providers.rented.runpod:RunPod",
    "sandbox": "shoal.providers.rented.sandbox:ElasticSandbox",
}
"""Kind -> `module:class`. The class is made with an Account, once for a process."""

GROUP = "shoal.renters"
"""The entry point group by which an installed package adds a kind."""


def renter(account: Account) -> Renter:
    """The renter for an account. Raises ProviderError with the kinds there are."""
    if account.kind in RENTERS:
        module, _, attribute = RENTERS[account.kind].partition(":")
        made: Renter = getattr(import_module(module), attribute)(account)
        return made
    others = {one.name: one for one in entry_points(group=GROUP)}
    if account.kind in others:
        entry = others[account.kind]
        try:
            made = entry.load()(account)
        except Exception as error:  # somebody else's package may fail in any way
            raise ProviderError(
                f"provider {account.kind} cannot be loaded: {error}", hint=f"mend or remove {entry.value}"
            ) from error
        return made
    known = ", ".join(sorted({*RENTERS, *others}))
    raise ProviderError(f"no provider is called {account.kind!r}", hint=f"use one of: {known}")
