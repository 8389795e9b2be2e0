"""The providers that rent machines out. One table names those that come with Shoal; others join by entry point."""

from __future__ import annotations

from shoal.errors import ProviderError
from shoal.providers.rental import Abilities, Account, Renter
from shoal.providers.table import find, make

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
    made: Renter = make(account.kind, RENTERS, GROUP, account)
    return made


def abilities(kind: str) -> Abilities:
    """What a provider's machines and its API can do, without access to it. Raises LookupError where nobody can say."""
    try:
        renters = find(kind, RENTERS, GROUP)
    except ProviderError as error:
        raise LookupError(error.message) from error
    if renters is None:
        raise LookupError(f"no provider is called {kind!r}")
    found: Abilities = renters.abilities
    return found
