"""What each rented nodeset could get now, as its accounts tell: asked seldom, kept for a while."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from dataclasses import dataclass, field

from shoal.elastic import choose
from shoal.elastic.clock import due
from shoal.elastic.fleet import Fleet, log
from shoal.elastic.rentals import Block
from shoal.elastic.source import PATIENCE, SILENT_SECONDS, told
from shoal.providers.rental import Offer, Outcome, Query, Trouble
from shoal.providers.rented.http import ApiError
from shoal.spec.rented import OfferChoice, RentedSet

KEPT_SECONDS = 60.0
AGAIN_SECONDS = 5.0


@dataclass
class Catalog:
    """The offers of all nodesets, each as old as KEPT_SECONDS at most while its provider answers."""

    fleet: Fleet
    _known: dict[tuple[str, Query], tuple[float, tuple[Offer, ...]]] = field(default_factory=dict)
    _failed: dict[str, tuple[float, int]] = field(default_factory=dict)
    """When an account could last not be asked, and how often in a row."""
    _asking: dict[tuple[str, Query], asyncio.Lock] = field(default_factory=dict)

    async def offers(self, nodeset: RentedSet) -> tuple[tuple[OfferChoice, tuple[Offer, ...]], ...]:
        """What there is for each line of the nodeset, in their order. Nothing where a provider was never heard of."""
        found = await asyncio.gather(*(self._of(choice) for choice in nodeset.offers))
        return tuple(zip(nodeset.offers, found, strict=True))

    def unsure(self, nodeset: RentedSet, blocks: Sequence[Block]) -> bool:
        """Whether some account could not be asked just now, so that nothing is known of what it has."""
        shut = {block.account for block in blocks if not block.type}
        return any(account in self._failed for account in nodeset.accounts if account not in shut)

    async def _of(self, choice: OfferChoice) -> tuple[Offer, ...]:
        key = (choice.provider, choose.query(choice))
        source = self.fleet.sources.get(choice.provider)
        if source is None:
            return ()
        async with self._asking.setdefault(key, asyncio.Lock()):
            at, known = self._known.get(key, (float("-inf"), ()))
            now = self.fleet.clock.now()
            if not due(at + KEPT_SECONDS, now, KEPT_SECONDS):
                return known
            asked, failures = self._failed.get(choice.provider, (float("-inf"), 0))
            if not due(asked + AGAIN_SECONDS, now):
                return known
            try:
                known = tuple(await source.renter.offers(choose.query(choice)))
            except Exception as error:  # whatever it is: one provider's client must not hold up the others
                self._note_failure(choice, error, failures + 1)
                return known  # as it was told last: the order itself shows whether it still holds
            self._failed.pop(choice.provider, None)
            self._known[key] = (self.fleet.clock.now(), known)
            return known

    def _note_failure(self, choice: OfferChoice, error: Exception, failures: int) -> None:
        now, account = self.fleet.clock.now(), choice.provider
        log.warning("%s cannot be asked what can be had: %s", account, told(error))
        self._failed[account] = (now, failures)
        if isinstance(error, ApiError) and error.trouble is Trouble.RATE:
            self._failed[account] = (now + error.retry_after, failures - 1)  # it answers: only too often is too often
            return
        if isinstance(error, ApiError) and error.scope == "provider":
            offer = Offer(account, choice.type or "", choice.region or "")
            # Only what concerns the whole account says something here: nothing was ordered.
            block = choose.block(offer, Outcome(trouble=error.trouble, scope="provider", message=error.message), now)
            if block is not None and not block.type:
                self.fleet.ledger.block(account, "", "", "", block.until, block.why)
        if failures >= PATIENCE:
            self.fleet.ledger.block(account, "", "", "", now + SILENT_SECONDS, f"{account} cannot be asked")
            del self._failed[account]
