"""From an order that was filled to a node that takes jobs: waits for machines, has them joined, gives up in time."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field

from shoal.elastic.clock import due
from shoal.elastic.fleet import UNFIT, Fleet, World, log
from shoal.elastic.rentals import Rental
from shoal.elastic.slurm import wants_machine
from shoal.providers.rental import Rented

AGAIN_SECONDS = 10.0
"""A machine that could not be joined is tried again after so long, until its time is over."""


@dataclass
class Boot:
    """The machines that come up now. Those that come up together are joined together, beside all others."""

    fleet: Fleet
    wake: Callable[[], None] = lambda: None
    """Called when a join has ended, so that nobody waits for the next step."""
    _joins: dict[asyncio.Task[Mapping[str, str]], dict[str, str]] = field(default_factory=dict)
    """What runs, with the token of every node in it."""
    _retry_at: dict[str, float] = field(default_factory=dict)
    _said: dict[str, str] = field(default_factory=dict)
    """What went wrong last, by token."""

    @property
    def waits(self) -> bool:
        """Whether a join runs."""
        return bool(self._joins)

    async def step(self, world: World) -> None:
        """Take in what has ended, give up on what is late, and join what is up."""
        booting = {rental.token: rental for rental in world.rentals if rental.state == "made"}
        self._collect(booting)
        world.read(self.fleet.ledger)
        running = {token for tokens in self._joins.values() for token in tokens.values()}
        ready: dict[str, Rented] = {}
        tokens: dict[str, str] = {}
        for rental in world.rentals:
            node = world.nodes.get(rental.node)
            if rental.state != "made" or node is None or not wants_machine(node):
                continue
            if self._late(rental, world.now):
                continue
            machine = self._up(rental)
            rests = not due(self._retry_at.get(rental.token, 0.0), world.now, AGAIN_SECONDS)
            if machine is None or rental.token in running or rests:
                continue
            ready[rental.node], tokens[rental.node] = machine, rental.token
        if ready and not self.fleet.held:
            task = asyncio.create_task(_join(self.fleet, ready))
            task.add_done_callback(lambda _: self.wake())
            self._joins[task] = tokens
            await asyncio.sleep(0)
        world.read(self.fleet.ledger)

    async def close(self) -> None:
        """Leave off what runs: the next service takes it up again."""
        for task in self._joins:
            task.cancel()
        await asyncio.gather(*self._joins, return_exceptions=True)
        self._joins.clear()

    def _up(self, rental: Rental) -> Rented | None:
        source = self.fleet.sources.get(rental.account)
        machine = source.machine(rental) if source else None
        return machine if machine is not None and machine.state == "up" and machine.host else None

    def _late(self, rental: Rental, now: float) -> bool:
        source = self.fleet.sources.get(rental.account)
        if source is None or now < rental.intended_at + source.abilities.boot_seconds:
            return False
        said = self._said.get(rental.token) or ("the machine is not up" if self._up(rental) is None else "not joined")
        why = f"{rental.id} of {rental.account} is not a node after {source.abilities.boot_seconds} s: {said}"
        self.fleet.useless(rental, why)
        return True

    def _collect(self, booting: Mapping[str, Rental]) -> None:
        now = self.fleet.clock.now()
        for task in [task for task in self._joins if task.done()]:
            tokens = self._joins.pop(task)
            said = task.result()
            for node, token in tokens.items():
                rental = booting.get(token)
                if rental is None:
                    continue  # it was given back meanwhile
                problem = said.get(node, "the joiner said nothing of it")
                if not problem:
                    log.info("%s: %s of %s takes jobs", node, rental.id, rental.account)
                    self.fleet.ledger.joined(token, now)
                elif problem.startswith(UNFIT):
                    self.fleet.useless(rental, f"{rental.id} of {rental.account}: {problem.removeprefix(UNFIT)}")
                else:
                    log.info("%s: %s is not joined yet: %s", node, rental.id, problem)
                    self._said[token], self._retry_at[token] = problem, now + AGAIN_SECONDS


async def _join(fleet: Fleet, ready: Mapping[str, Rented]) -> Mapping[str, str]:
    try:
        return await fleet.joiner.join(ready)
    except Exception as error:  # whatever happens to one join, machines are not left behind
        log.exception("%s could not be joined", ", ".join(ready))
        return dict.fromkeys(ready, f"{type(error).__name__}: {error}")
