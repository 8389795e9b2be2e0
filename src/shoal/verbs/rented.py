"""The rented machines as `shoal status` shows them: what is there, what it costs an hour, and why jobs wait."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, fields

from shoal.elastic import status as service_status
from shoal.hosts.api import Host
from shoal.spec.model import Spec
from shoal.spec.rented import rented_sets

PATIENCE = 30.0
SILENT_SECONDS = 180.0
"""A service that has said nothing for so long does not run, or hangs."""


@dataclass(frozen=True)
class RentedNode:
    """A machine that is rented now, for a node. A node has two while one goes and another takes its place."""

    name: str
    """The node's."""
    state: str
    """As in the ledger: `intended`, `made`, `joined` or `releasing`."""
    account: str
    type: str
    place: str
    market: str
    usd_hour: float | None
    since: float


_FIELDS = [one.name for one in fields(RentedNode) if one.name != "name"]


@dataclass(frozen=True)
class RentedView:
    """What the service on the controller said last."""

    problem: str = ""
    """Why nothing is known, or nothing is done."""
    accounts: Mapping[str, str] = field(default_factory=dict)
    """The accounts that do not answer, each with what is wrong."""
    nodes: tuple[RentedNode, ...] = ()
    waiting: Mapping[str, str] = field(default_factory=dict)
    """Why jobs wait for nodes, by job."""

    @property
    def usd_hour(self) -> float:
        """What the machines cost an hour, all together, as far as prices are known."""
        return sum(node.usd_hour or 0.0 for node in self.nodes)


async def rented_view(spec: Spec, controller: Host, clock: Callable[[], float] = time.time) -> RentedView | None:
    """Read what the service wrote. None where the spec rents nothing."""
    if not rented_sets(spec):
        return None
    told = await controller.run(("cat", str(service_status.STATUS)), timeout=PATIENCE)
    if told.status != 0:
        return RentedView("shoal-elastic has said nothing yet; run `shoal up`")
    try:
        said = service_status.read(told.text)
        nodes = tuple(RentedNode(one["node"], **{key: one[key] for key in _FIELDS}) for one in said.machines.values())
    except (ValueError, KeyError, TypeError, AttributeError):
        return RentedView("this is not a status of shoal-elastic.service")
    problem = said.problem
    if clock() - said.at > SILENT_SECONDS:
        problem = f"shoal-elastic has said nothing for {(clock() - said.at) / 60:.0f} minutes; run `shoal up`"
    unwell = {name: text for name, text in said.accounts.items() if text}
    return RentedView(problem, unwell, nodes, dict(said.jobs))
