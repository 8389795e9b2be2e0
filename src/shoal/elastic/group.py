"""The nodes of one job in one nodeset: they get machines in one place, or none of them does."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

from shoal.elastic.rentals import Rental
from shoal.elastic.source import Source
from shoal.providers.rental import Offer
from shoal.spec.rented import RentedSet


@dataclass
class Group:
    """The nodes of one job in one nodeset."""

    job: str
    """Empty where no job asks for the node: somebody has woken it by hand."""
    nodeset: RentedSet
    nodes: tuple[str, ...]
    kept: dict[str, Rental] = field(default_factory=dict)
    """What its nodes have already, or may have."""
    trouble: str = ""
    """What stood in the way of the last order."""

    @property
    def key(self) -> tuple[str, str]:
        """One job's group in one nodeset; or one node's, that was woken by hand."""
        return self.job or self.nodes[0], self.nodeset.name

    @property
    def wanting(self) -> list[str]:
        return [node for node in self.nodes if node not in self.kept]

    @property
    def serving(self) -> list[Rental]:
        return [rental for rental in self.kept.values() if rental.state == "joined"]

    @property
    def coming(self) -> list[Rental]:
        return [rental for rental in self.kept.values() if rental.state != "joined"]

    def begun_first(self, offers: Sequence[Offer]) -> list[Offer]:
        """The offer that the group has begun with comes first, as long as it may be had."""
        begun = {one.offer.identity for one in self.coming}
        return sorted(offers, key=lambda offer: offer.identity not in begun)

    def rental(self, token: str, node: str, offer: Offer, source: Source, now: float) -> Rental:
        """An order for one of its nodes, as it is written down."""
        return Rental(
            token=token,
            node=node,
            nodeset=self.nodeset.name,
            account=source.name,
            offer=offer,
            usd_hour=offer.usd_hour,
            intended_at=now,
            jobs=(self.job,) if self.job else (),
            billing=source.abilities.billing,
        )
