"""The providers that rent machines out. One table names those that come with Shoal; others join by entry point."""

from __future__ import annotations

from shoal.providers.rental import Account, Renter
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
