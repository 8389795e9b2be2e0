"""Watch a simulated cloud while a service rents there: machines without a node, two machines for a node, money.

It counts what the cloud would bill. From the ledger it reads only the node that each machine was ordered for.
"""

from collections import defaultdict
from collections.abc import Callable
from dataclasses import dataclass, field

from tests.unit.cloud.scene import Scene

from shoal.cloud.rental import Rental
from shoal.cloud.service.service import RECONCILE_INTERVAL_S
from shoal_simulators.instances import SimulatedInstance

EVERY = 10.0
"""Seconds from one look to the next."""
SERVED = ({"ALLOCATED"}, {"IDLE"}, {"ALLOCATED", "POWERING_UP"}, {"IDLE", "POWERING_UP"})
"""The states of a node that has a machine, or is to get one; Slurm marks all of these CLOUD too."""


@dataclass
class Watch:
    """Lets time pass in a scene, and looks at its cloud every ten seconds of it."""

    it: Scene
    limit: float
    """Dollars an hour that the budget admits."""
    provider: str
    most: float = 0.0
    """The most that was paid an hour for what was ordered."""
    orphan_seconds: float = 0.0
    """Instance-seconds without a node, from one reconcile and the provider's grace after the node was gone."""
    longest: float = 0.0
    """The longest that a machine was without a node, the grace included."""
    doubles: set[str] = field(default_factory=set)
    """Machines ordered for a node which had one that nobody was giving back, and machines without an intent."""
    _without: dict[str, float] = field(default_factory=dict)
    """Since when each machine has no node."""
    _orders: dict[str, str] = field(default_factory=dict)
    """The token of the order that made a machine, by the machine's id."""

    @property
    def over(self) -> float:
        return max(0.0, round(self.most - self.limit, 6))

    async def until(self, condition: Callable[[], bool], seconds: float) -> bool:
        """Whether it is so within that time."""
        end = self.it.clock.now() + seconds
        while not condition() and self.it.clock.now() < end:
            await self._step()
        return condition()

    async def passes(self, seconds: float) -> None:
        await self.until(lambda: False, seconds)

    async def _step(self) -> None:
        await self.it.step()
        self._look()
        self.it.clock.advance(EVERY)

    def _look(self) -> None:
        now = self.it.clock.now()
        rentals = {one.token: one for one in self.it.rentals()}
        by_node: defaultdict[str, list[tuple[Rental, SimulatedInstance]]] = defaultdict(list)
        homeless: list[SimulatedInstance] = []
        for machine in self.it.machines():
            order = rentals.get(self._order(machine, rentals))
            if order is None:
                self.doubles.add(machine.id)
            if order is not None and self._served(order.node):
                by_node[order.node].append((order, machine))
            else:
                homeless.append(machine)
        for several in by_node.values():
            several.sort(key=lambda one: (one[0].state == "joined", one[0].intended_at, one[1].id == one[0].id))
            homeless += [machine for _, machine in several[:-1]]
            # A twin has the same order; what goes is marked so before another is ordered.
            orders = {order.token: machine for order, machine in several if order.state != "releasing"}
            self.doubles.update(machine.id for machine in list(orders.values())[1:])
        self._count({machine.id for machine in homeless}, now)
        # Each order once: a twin that the cloud made by itself is an orphan, and nobody's order.
        orders_usd = {id(machine.order): machine.usd_hour for machine in self.it.machines()}
        self.most = max(self.most, sum(orders_usd.values()))

    def _count(self, homeless: set[str], now: float) -> None:
        self._without = {machine_id: self._without.get(machine_id, now) for machine_id in homeless}
        grace = RECONCILE_INTERVAL_S + self.it.context.accounts[self.provider].abilities.grace_s
        for since in self._without.values():
            self.longest = max(self.longest, now - since)
            self.orphan_seconds += EVERY if now - since > grace else 0.0

    def _order(self, machine: SimulatedInstance, rentals: dict[str, Rental]) -> str:
        """The order that made a machine. Every provider carries its token in a mark of its own."""
        if machine.id not in self._orders:
            marks = repr((machine.order.name, machine.name, machine.order.marks))
            self._orders[machine.id] = next((token for token in rentals if token in marks), "")
        return self._orders[machine.id]

    def _served(self, node: str) -> bool:
        return self.it.slurm.state(node) - {"CLOUD", "DRAIN"} in SERVED
