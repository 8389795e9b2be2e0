"""The provider accounts of a file, as providers of hosts that stay."""

from __future__ import annotations

from collections.abc import Callable

from shoal.cloud.providers.api import ProviderLogin
from shoal.hosts.api import Connector
from shoal.roles.rented import rented_ports
from shoal.spec.local_files import resolve_secret
from shoal.spec.members import members, provider_accounts
from shoal.spec.model import Spec
from shoal.spec.rental import account_settings
from shoal.verbs.rented_hosts import RentedHosts


def open_rented_hosts(spec: Spec, name: str, connect: Callable[[], Connector]) -> RentedHosts:
    """The hosts that stay of one provider account. Its key is read when it is needed."""
    account = provider_accounts(spec)[name]

    def login() -> ProviderLogin:
        secret = resolve_secret(account.key, f"providers.{name}.key").decode() if account.key else ""
        return ProviderLogin(name, account.kind or name, secret, account.url or "", account_settings(account))

    identities = {member.name: member.identity for member in members(spec) if member.provider == name}
    return RentedHosts(spec.cluster, name, login, connect, rented_ports(spec), identities)
