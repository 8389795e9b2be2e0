"""What rented hosts cost: the controller and login hosts, which `shoal up` rents and only `shoal down` ends.

The service writes into the ledger when they run, so that budgets count them and `shoal cost` shows them. It never
changes them.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from shoal.cloud.providers.api import Billing, Offer, RentedInstance
from shoal.cloud.providers.prices import prices
from shoal.cloud.rental import Rental
from shoal.cloud.service.ledger import Ledger
from shoal.cloud.service.provider_account import InstanceListing
from shoal.spec.members import members, provider_accounts
from shoal.spec.model import Spec


@dataclass(frozen=True)
class HostPrices:
    """How the prices of rented hosts are found."""

    by_name: Mapping[str, float] = field(default_factory=dict)
    """The prices in the file, by host."""
    kinds: Mapping[str, str] = field(default_factory=dict)
    """The kind of each provider account."""

    def of(self, machine: RentedInstance, account: str) -> float | None:
        """The price of a machine: the file's, the provider's, or that of our table."""
        price = self.by_name.get(machine.node, machine.usd_hour)
        if price is not None:
            return price
        row = prices().find(self.kinds.get(account, account), machine.type, machine.region, machine.market)
        return row.usd_hour if row else None


def host_prices(spec: Spec) -> HostPrices:
    """The prices that the file gives for rented hosts."""
    by_set = {"controller": spec.controller.usd_hour, "login": spec.login.usd_hour if spec.login else None}
    found = {member.name: by_set.get(member.nodeset) for member in members(spec)}
    in_file = {name: price for name, price in found.items() if price is not None}
    return HostPrices(in_file, {name: account.kind or name for name, account in provider_accounts(spec).items()})


def host_rental(machine: RentedInstance, account: str, found: HostPrices, billing: Billing, at: float) -> Rental:
    """A running rented host, as a rental since its last start."""
    price = found.of(machine, account)
    begun = min(at, machine.started or machine.created or at)
    offer = Offer(account, machine.type, machine.region, machine.zone, machine.market, price)
    return Rental(
        machine.token,
        machine.node,
        "",
        account,
        offer,
        "joined",
        machine.id,
        price,
        intended_at=begun,
        made_at=begun,
        joined_at=begun,
        billing=billing,
    )


def record_hosts(ledger: Ledger, account: str, listing: InstanceListing, found: HostPrices, billing: Billing) -> None:
    """Write down which hosts of an account ran when it was listed."""
    running = [machine for machine in listing.permanent if machine.state != "stopped"]
    for machine in running:
        ledger.record_host(host_rental(machine, account, found, billing, listing.at), listing.at)
    ledger.record_stopped_hosts(account, {machine.token for machine in running}, listing.at)
