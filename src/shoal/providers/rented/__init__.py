"""The providers that rent machines out. One table names those that come with Shoal; others join by entry point."""

from __future__ import annotations

from importlib import import_module
from importlib.metadata import entry_points

from shoal.providers.rental import Abilities, Account, Renter
from shoal.providers.table import make

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
    """What a provider's machines and its API can do, without access to it. Raises LookupError for an unknown kind."""
    places = [RENTERS[kind]] if kind in RENTERS else [one.value for one in entry_points(group=GROUP, name=kind)]
    module, _, attribute = places[0].partition(":")
    found: Abilities = getattr(import_module(module), attribute).abilities
    return found
