"""What the ledger on the controller holds: asked from here, so that it counts also when the service is stopped."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from importlib.resources import files

from shoal.elastic.ledger import LEDGER, LIVE
from shoal.elastic.status import STATUS
from shoal.errors import ShoalError
from shoal.hosts.api import Host
from shoal.verbs.context import Context

PATIENCE = 120.0
PROGRAM = ("env", "python3", "-c")


@dataclass(frozen=True)
class Held:
    """A machine that is there, or may be."""

    token: str
    node: str
    account: str
    id: str
    state: str
    """As in the ledger; `failed` where an order was given up on whose answer got lost."""
    age: float
    """Seconds that its provider has had to list it; 0 where it should be there: a list that lacks it may lag."""
    of_now: bool = False
    """It was ordered by the service that runs now, with the accounts that this one has."""

    @property
    def live(self) -> bool:
        return self.state in LIVE

    @property
    def stands(self) -> bool:
        """Whether its provider has said that it made it, and not that it took it back."""
        return self.live and bool(self.id) and not self.age


async def held(context: Context) -> tuple[Held, ...] | None:
    """All that the ledger holds. None where nobody can say: no controller, no ledger."""
    try:
        async with await context.connections([context.controller]) as fleet:
            return await held_on(await fleet.host(context.controller.name))
    except ShoalError:
        return None


async def held_on(host: Host) -> tuple[Held, ...] | None:
    """The same of a host that may be the controller no longer. Raises HostError where it does not answer."""
    return await _told(host, {})


async def strike_off(context: Context, ended: Mapping[Held, float]) -> None:
    """Note in the ledger that machines are gone, each since so many seconds.

    Where that cannot be done the service finds out by itself, as long as it has their account.
    """
    gone = {one.token: [one.state, ago] for one, ago in ended.items() if one.live}
    if not gone:
        return
    try:
        async with await context.connections([context.controller]) as fleet:
            await _told(await fleet.host(context.controller.name), gone)
    except ShoalError:
        return


async def _told(host: Host, ended: Mapping[str, list[object]]) -> tuple[Held, ...] | None:
    program = files("shoal").joinpath("elastic/held_machines_program.py").read_text(encoding="utf-8")
    command = (*PROGRAM, program, str(LEDGER), str(STATUS))
    result = await host.run(command, stdin=json.dumps({"ended": ended}).encode(), timeout=PATIENCE)
    try:
        return tuple(Held(**one) for one in json.loads(result.text)["machines"]) if result.status == 0 else None
    except (ValueError, KeyError, TypeError):
        return None
