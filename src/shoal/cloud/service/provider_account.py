"""A provider account as the service uses it: what it lists, how often it may be called, and which machines are gone.

A list that fails keeps the previous one, with its age: no machine counts as gone because a provider did not answer. A
machine counts as gone when lists that came after it no longer show it.
"""

from __future__ import annotations

import logging
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from shoal.cloud.providers.api import (
    Abilities,
    FailureKind,
    Offer,
    Query,
    RentalOrder,
    RentalProvider,
    RentedInstance,
    RequestOutcome,
)
from shoal.cloud.rental import Rental
from shoal.cloud.service.ledger import Ledger
from shoal.cloud.service.scheduling import Clock, is_due
from shoal.errors import ProviderError

log = logging.getLogger("shoal.elastic")

LOST_ORDER_SEARCH_S = 120.0
"""How long the machine of an order whose answer was lost is searched for before ordering again."""
MISSING_LISTINGS = 2
"""A machine counts as gone after this many lists in a row without it."""
DELETE_RETRY_S = 30.0
"""How long after a delete a machine that is still listed is deleted again."""
MAX_FAILURES = 3
UNREACHABLE_PAUSE_S = 60.0
"""How long a provider is left alone after MAX_FAILURES failed calls in a row."""
_FIRST_WAIT, _LONGEST_WAIT = 5.0, 60.0


def error_text(error: Exception) -> str:
    """The message of a failed call. For a bug in the client only its type: the text may contain secrets."""
    return error.message if isinstance(error, ProviderError) else f"its client failed: {type(error).__name__}"


@dataclass(frozen=True)
class InstanceListing:
    """One list of an account's machines."""

    at: float
    """When it was requested: later changes are not in it."""
    instances: Mapping[str, tuple[RentedInstance, ...]]
    """The machines of our cluster, by token. More than one per token is an error of the provider."""
    permanent: tuple[RentedInstance, ...] = ()
    """Its rented hosts: the operator's, the controller itself among them."""


@dataclass
class AccountClient:
    """One provider account, with its state while the service runs."""

    name: str
    provider: RentalProvider
    cluster: str
    ledger: Ledger
    clock: Clock
    listing: InstanceListing | None = None
    problem: str = ""
    """Why the last list failed; empty if it did not."""
    not_before: float = 0.0
    """No order before this time, at the provider's request."""
    refusals: int = 0
    """The number of orders in a row that failed because the provider did not answer."""
    ordering: set[str] = field(default_factory=set)
    """The tokens of orders that are in progress."""
    _asked_at: float = float("-inf")
    _failures: int = 0
    _absences: dict[str, int] = field(default_factory=dict)
    _first_seen: dict[str, float] = field(default_factory=dict)
    _orphans: dict[str, float] = field(default_factory=dict)
    _key_name: str | None = None
    _answered: dict[str, float] = field(default_factory=dict)
    """When orders were answered or timed out, by token."""
    _started_at: float = field(init=False)

    def __post_init__(self) -> None:
        self._started_at = self.clock.now()

    @property
    def abilities(self) -> Abilities:
        return self.provider.abilities

    def next_listing(self, age: float) -> float:
        """When to list again, so that the list is at most `age` old; later if the provider does not answer."""
        if self._asked_at > self.clock.now():
            return self.clock.now()  # the clock was set back
        wait = min(_LONGEST_WAIT, _FIRST_WAIT * 2 ** (self._failures - 1)) if self._failures else 0.0
        return self._asked_at + max(age, wait)

    async def list_instances(self) -> None:
        """List the machines of the cluster."""
        self._asked_at = self.clock.now()
        self._started_at = min(self._started_at, self._asked_at)  # the clock may be set back
        machines: dict[str, tuple[RentedInstance, ...]] = {}
        permanent: list[RentedInstance] = []
        try:
            for machine in await self.provider.instances(self.cluster):
                if machine.cluster != self.cluster or not machine.token:
                    continue  # a machine without our mark is not ours
                if machine.permanent:
                    permanent.append(machine)
                else:
                    machines[machine.token] = (*machines.get(machine.token, ()), machine)
        except Exception as error:  # any error: one provider's client must not block the others
            return self._not_listed(error_text(error))
        if self.problem:
            log.info("%s answers again", self.name)
        self._failures, self.problem = 0, ""
        self.listing = InstanceListing(self._asked_at, machines, tuple(permanent))
        for token in machines:
            self._first_seen[token] = min(self._first_seen.get(token, self._asked_at), self._asked_at)
            self._absences[token] = 0
        for token in self._absences.keys() - machines.keys():
            self._absences[token] += 1

    def _not_listed(self, why: str) -> None:
        self._failures += 1
        if not self.problem:
            log.warning("%s: cannot list machines: %s", self.name, why)
        self.problem = why
        if self.listing is None and self._failures >= MAX_FAILURES:
            until = self.clock.now() + UNREACHABLE_PAUSE_S
            self.ledger.block(self.name, "", "", "", until, f"{self.name} does not list its machines")

    def machine(self, rental: Rental) -> RentedInstance | None:
        """The machine of a rental, as last listed."""
        listed = self._listed(rental)
        return listed and replace(listed, account=rental.account, host_key=rental.host_key)

    def _listed(self, rental: Rental) -> RentedInstance | None:
        machines = self.listing.instances.get(rental.token, ()) if self.listing else ()
        return next((machine for machine in machines if rental.id in ("", machine.id)), None)

    def first_seen(self, machine: RentedInstance) -> float:
        """When the machine was first listed, or created if that was earlier."""
        since = self._first_seen.get(machine.token, self.clock.now())
        return since if machine.created is None else min(since, machine.created)

    def gone(self, rental: Rental) -> bool:
        """Whether the machine of a rental is certainly gone; False while that is unknown."""
        if self.listing is None or self._listed(rental) is not None or rental.token in self.ordering:
            return False
        if rental.made_at is None:
            # counted from the timeout of the order, which may take a while; from our start after a restart
            since = max(self._past(rental.intended_at), self._past(self._answered.get(rental.token, self._started_at)))
            return self.listing.at >= since + LOST_ORDER_SEARCH_S
        lag = self._past(rental.made_at) + self.abilities.grace_s
        if rental.token not in self._first_seen and self.listing.at < lag:
            return False
        absences = self._absences.setdefault(rental.token, 0 if rental.token in self._first_seen else 1)
        return absences >= MISSING_LISTINGS

    def may_order(self) -> bool:
        """Whether to order now: not before the first list, which shows whether we are the leader."""
        if self.listing is None or not is_due(self.not_before, self.clock.now()):
            return False
        pause = self.abilities.create_interval
        return not pause or is_due(self.ledger.last_order_time(self.name) + pause, self.clock.now(), pause)

    async def key_name(self, public_key: str) -> str:
        """The controller's key as the provider names it. Raises what the client raises."""
        if self._key_name is None:
            self._key_name = await self.provider.ensure_key(self.cluster, public_key)
        return self._key_name

    async def offers(self, query: Query) -> list[Offer]:
        """The available offers. Raises what the client raises."""
        return await self.provider.offers(replace(query, unfit_machines=self.ledger.unfit_machines(self.name)))

    async def order(self, orders: Sequence[RentalOrder]) -> list[RequestOutcome]:
        """Order machines of one offer, at most `abilities.at_once`. Their rows are already in the ledger."""
        tokens = {order.token for order in orders}
        unfit_machines = self.ledger.unfit_machines(self.name)
        orders = [replace(order, unfit_machines=unfit_machines) for order in orders]
        self.ordering |= tokens
        try:
            outcomes = _checked(await self.provider.create(orders), len(orders))
            outcomes = [_NO_ID if one.ok and not one.id else one for one in outcomes]
        except Exception as error:
            # it may have failed before or after sending: searching is right in both cases
            outcomes = [RequestOutcome(failure=FailureKind.AMBIGUOUS, message=error_text(error))] * len(orders)
        finally:
            self.ordering -= tokens
            self._answered |= dict.fromkeys(tokens, self.clock.now())
        for outcome in outcomes:
            self.refusals = self.refusals + 1 if outcome.failure is FailureKind.TRANSIENT else 0
            if outcome.failure in (FailureKind.RATE, FailureKind.TRANSIENT):
                wait = outcome.retry_after or max(self.abilities.create_interval, _FIRST_WAIT)
                self.not_before = max(self.not_before, self.clock.now() + wait)
        return outcomes

    def may_retry_delete(self, machine: RentedInstance) -> bool:
        """Whether to delete an orphan now, or whether that was just requested."""
        again = self._orphans.get(machine.id, float("-inf")) + DELETE_RETRY_S
        if not is_due(again, self.clock.now(), DELETE_RETRY_S):
            return False
        self._orphans[machine.id] = self.clock.now()
        return True

    def _past(self, at: float) -> float:
        """A recorded time; our start if it is in the future, because the clock was set back."""
        return at if at <= self.clock.now() else self._started_at

    async def delete(self, machines: Sequence[RentedInstance]) -> list[RequestOutcome]:
        """Delete machines. Failures are in the outcomes, and are retried later."""
        try:
            return _checked(await self.provider.delete(machines), len(machines))
        except Exception as error:
            return [RequestOutcome(one.id, FailureKind.TRANSIENT, message=error_text(error)) for one in machines]


_NO_ID = RequestOutcome(
    failure=FailureKind.AMBIGUOUS, message="the client reports success without the id of the machine"
)


def _checked(outcomes: Sequence[RequestOutcome], count: int) -> list[RequestOutcome]:
    """Check that a client returned one outcome per machine; otherwise they cannot be assigned."""
    if len(outcomes) != count or not all(isinstance(one, RequestOutcome) for one in outcomes):
        raise ProviderError(f"its client returned {len(outcomes)} outcomes for {count} machines")
    return list(outcomes)


class UnavailableProvider:
    """Replaces a client that cannot be made, for example for an invalid key: every call fails with that error."""

    def __init__(self, error: ProviderError) -> None:
        self.abilities = Abilities()
        self._error = error

    async def create(self, orders: Sequence[RentalOrder]) -> list[RequestOutcome]:
        return [RequestOutcome(failure=FailureKind.AUTH, scope="provider", message=self._error.message) for _ in orders]

    async def close(self) -> None:
        pass

    async def _fail(self, *_: Any, **__: Any) -> Any:
        raise self._error

    offers = instances = delete = ensure_key = _fail
