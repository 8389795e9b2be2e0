"""Clients for providers that rent machines, one module each, found by kind in a table or by entry point.

A client knows its API and nothing of Slurm, the ledger or budgets. It imports `shoal.errors`, `shoal.registry`
and this package only; `prices` also uses the cache directory of `sandbox`.
"""

from __future__ import annotations

from shoal.cloud.providers.api import Abilities, ProviderLogin, RentalProvider
from shoal.errors import ProviderError
from shoal.registry import find, make

RENTAL_PROVIDERS = {
    "aws": "shoal.cloud.providers.aws:AwsProvider",
    "digitalocean": "shoal.cloud.providers.digitalocean:DigitalOceanProvider",
    "gcp": "shoal.cloud.providers.gcp:GoogleProvider",
    "lambda": "shoal.cloud.providers.lambda_cloud:LambdaProvider",
    "nebius": "shoal.cloud.providers.nebius:NebiusProvider",
    "paperspace": "shoal.cloud.providers.paperspace:PaperspaceProvider",
    "runpod": "shoal.cloud.providers.runpod:RunPodProvider",
    "sandbox": "shoal.cloud.providers.sandbox:SandboxRentalProvider",
    "vast": "shoal.cloud.providers.vast:VastProvider",
}
"""Kind -> `module:class`. The class is made with a ProviderLogin, once per process."""

GROUP = "shoal.renters"
"""The entry point group by which an installed package adds a kind."""


def rental_provider(account: ProviderLogin) -> RentalProvider:
    """The client of a provider account. Raises ProviderError with the known kinds."""
    made: RentalProvider = make(account.kind, RENTAL_PROVIDERS, GROUP, account)
    return made


def abilities(kind: str) -> Abilities:
    """What a provider's machines and its API can do, without a login. Raises LookupError for an unknown kind."""
    try:
        provider = find(kind, RENTAL_PROVIDERS, GROUP)
    except ProviderError as error:
        raise LookupError(error.message) from error
    if provider is None:
        raise LookupError(f"no provider is called {kind!r}")
    able: Abilities = provider.abilities
    return able
