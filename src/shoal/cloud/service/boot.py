"""From an order to a node that takes jobs: waits for machines, has them joined, and gives up in time.

A node has a watchdog, which comes with joining. Until then the boot script stands in for it: a machine without a
watchdog an hour after it should have joined shuts itself down, without the controller or the provider.
"""

from __future__ import annotations

import asyncio
import re
import shlex
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field

from shoal.cloud.providers.api import Abilities, RentedInstance
from shoal.cloud.rental import Rental
from shoal.cloud.service.context import ClusterSnapshot, ServiceContext, log, read_unfit
from shoal.cloud.service.machine_keys import CONTAINER_RELOAD, RELOAD, MachineKey, install_script
from shoal.cloud.service.scheduling import is_due
from shoal.cloud.service.slurm import wants_machine
from shoal.remote import program_text, python_command
from shoal.roles.rented import CONTAINER_POWEROFF, CONTROLLER_TIMEOUT_S, POWEROFF, UNITS, WATCHDOG

UNIT = "shoal-unclaimed"
END_RETRY_S = 300
"""The pause before a container that could not end itself tries again."""


def boot_script(abilities: Abilities, lifetime: int, key: MachineKey | None = None) -> str:
    """The script that a machine runs when it boots; empty where the provider runs none.

    Its only secret is the host key, which is of no use after the join: providers show such scripts in their consoles,
    and any user of the machine may be able to read them.
    """
    if abilities.boots_with == "none":
        return ""
    expected = min(abilities.boot_s, lifetime) if lifetime else abilities.boot_s
    seconds = expected + CONTROLLER_TIMEOUT_S
    script = container_script(seconds, end=abilities.end_program) if abilities.container else machine_script(seconds)
    if key is None:
        return script
    return script + install_script(key, CONTAINER_RELOAD if abilities.container else RELOAD)


def machine_script(seconds: int, units: str = UNITS, watchdog: str = WATCHDOG, systemctl: str = "systemctl") -> str:
    """With a systemd timer, which survives a reboot."""
    paths = {"UNITS": units, "UNIT": UNIT, "WATCHDOG": watchdog}
    return program_text("boot_machine.sh", SECONDS=seconds, POWEROFF=POWEROFF, SYSTEMCTL=systemctl, **paths)


def container_script(
    seconds: int, off: str = CONTAINER_POWEROFF, watchdog: str = WATCHDOG, end: tuple[str, ...] = ()
) -> str:
    """With a background process; a restarted container starts it again.

    `end` is the program that ends the bill, and its arguments, in place of `off`: a container whose processes end is
    started again where that is needed, and would wait anew. The program needs Python, which comes with sshd.
    """
    off = shlex.join(python_command(*end)) if end else off
    return program_text("boot_container.sh", SECONDS=seconds, RETRY_S=END_RETRY_S, POWEROFF=off, WATCHDOG=watchdog)


_CAUSE = re.compile(r"\b(?:fatal|error): (.+)")
MAX_CAUSE_LENGTH = 300


def join_error_text(problem: str) -> str:
    """An error of a join on one line: the failed step, and the last cause in the log below it."""
    first, _, log_text = problem.strip().partition("\n")
    causes = _CAUSE.findall(log_text) or log_text.strip().splitlines()[-1:]
    return " ".join(": ".join((first, *causes[-1:])).split())[:MAX_CAUSE_LENGTH]


JOIN_RETRY_S = 10.0
"""The pause before a failed join is retried, until the boot timeout."""

REGISTER_AGAIN_S = 30.0
"""After this time slurmd is started again on a joined node that slurmctld waits for."""


@dataclass
class NodeBooter:
    """Joins machines that are up. Those that come up together are joined together."""

    context: ServiceContext
    wake: Callable[[], None] = lambda: None
    """Called when a join has ended, to start the next step."""
    _joins: dict[asyncio.Task[Mapping[str, str]], dict[str, str]] = field(default_factory=dict)
    """The running joins, with the token of every node."""
    _retry_at: dict[str, float] = field(default_factory=dict)
    _errors: dict[str, str] = field(default_factory=dict)
    """The last error, by token."""
    _unregistered_since: dict[str, float] = field(default_factory=dict)
    """Since when slurmctld waits for a node that has joined, by token."""
    _registering: set[asyncio.Task[None]] = field(default_factory=set)

    @property
    def waits(self) -> bool:
        """Whether a join runs."""
        return bool(self._joins)

    def problem(self, rental: Rental) -> str:
        """Why a machine that is up has not joined yet; empty where nothing has failed."""
        return join_error_text(self._errors.get(rental.token, "")) if rental.state == "made" else ""

    async def step(self, snapshot: ClusterSnapshot) -> None:
        """Collect the joins that ended, release machines that are late, and join those that are up."""
        booting = {rental.token: rental for rental in snapshot.rentals if rental.state == "made"}
        await self._collect(booting)
        snapshot.refresh(self.context.ledger)
        running = {token for tokens in self._joins.values() for token in tokens.values()}
        ready: dict[str, RentedInstance] = {}
        tokens: dict[str, str] = {}
        for rental in snapshot.rentals:
            node = snapshot.nodes.get(rental.node)
            if rental.state != "made" or node is None or not wants_machine(node):
                continue
            late = True
            with self.context.isolated(rental.node):
                late = self._late(rental, snapshot.now)
            if late:
                continue
            machine = self._up(rental)
            waits_for_retry = not is_due(self._retry_at.get(rental.token, 0.0), snapshot.now, JOIN_RETRY_S)
            if machine is None or rental.token in running or waits_for_retry:
                continue
            ready[rental.node], tokens[rental.node] = machine, rental.token
        self._register_again(snapshot)
        if ready and not self.context.joins_paused:
            task = asyncio.create_task(_join(self.context, ready))
            task.add_done_callback(lambda _: self.wake())
            self._joins[task] = tokens
            await asyncio.sleep(0)
        snapshot.refresh(self.context.ledger)

    async def close(self) -> None:
        """Cancel the running joins: the next start repeats them."""
        tasks = [*self._joins, *self._registering]
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        self._joins.clear()

    def _register_again(self, snapshot: ClusterSnapshot) -> None:
        """Have nodes register again that joined, and that slurmctld waits for.

        Its controller lost power before it wrote down that they are up; it would wait for ResumeTimeout.
        """
        waiting: dict[str, float] = {}
        due: dict[str, RentedInstance] = {}
        for rental in snapshot.rentals:
            node = snapshot.nodes.get(rental.node)
            if rental.state != "joined" or node is None or not wants_machine(node):
                continue
            since = waiting[rental.token] = self._unregistered_since.get(rental.token, snapshot.now)
            with self.context.isolated(rental.node):
                if snapshot.now - since >= REGISTER_AGAIN_S and (machine := self._up(rental)) is not None:
                    waiting[rental.token], due[rental.node] = snapshot.now, machine
        self._unregistered_since = waiting
        if due:
            log.info("%s: slurmctld has no registration; slurmd is started again", ", ".join(due))
            task = asyncio.create_task(self.context.joiner.register(due))
            self._registering.add(task)
            task.add_done_callback(self._registering.discard)

    def _up(self, rental: Rental) -> RentedInstance | None:
        account = self.context.accounts.get(rental.account)
        machine = account.machine(rental) if account else None
        return machine if machine is not None and machine.state == "up" and machine.host else None

    def _late(self, rental: Rental, now: float) -> bool:
        account = self.context.accounts.get(rental.account)
        if account is None:
            return False
        limit, machine = account.abilities.address_timeout_s, account.machine(rental)
        if limit and machine is not None and not machine.host and now >= rental.begun + limit:
            self.context.reject(rental, f"{rental.id} of {rental.account} has no address after {limit} s")
            return True
        if now < rental.intended_at + account.abilities.boot_s:
            return False
        cause = self._errors.get(rental.token) or (
            "the machine is not up" if self._up(rental) is None else "not joined"
        )
        seconds = account.abilities.boot_s
        self.context.reject(rental, f"{rental.id} of {rental.account} is not a node after {seconds} s: {cause}")
        return True

    async def _collect(self, booting: Mapping[str, Rental]) -> None:
        now = self.context.clock.now()
        for task in [task for task in self._joins if task.done()]:
            tokens = self._joins.pop(task)
            errors = task.result()
            for node, token in tokens.items():
                rental = booting.get(token)
                if rental is None:
                    continue  # it was released meanwhile
                with self.context.isolated(node):
                    await self._record(rental, errors.get(node, "the joiner returned no result"), now)

    async def _record(self, rental: Rental, problem: str, now: float) -> None:
        """Record how the join of a machine ended."""
        if not problem:
            log.info("%s: %s of %s takes jobs", rental.node, rental.id, rental.account)
            self.context.ledger.record_join(rental.token, now)
        elif unfit := read_unfit(problem):
            scope, cause = unfit
            self.context.reject(rental, f"{rental.id} of {rental.account}: {cause}", scope)
        else:
            log.info("%s: %s has not joined yet: %s", rental.node, rental.id, problem)
            self._errors[rental.token], self._retry_at[rental.token] = problem, now + JOIN_RETRY_S
            for job in rental.jobs:  # they see only that it boots, for as long as this is retried
                place, cause = f"{rental.account} {rental.offer.place}", join_error_text(problem)
                await self.context.comment_job(job, f"trying {place}: {rental.id} has not joined yet: {cause}")


async def _join(context: ServiceContext, ready: Mapping[str, RentedInstance]) -> Mapping[str, str]:
    try:
        return await context.joiner.join(ready)
    except Exception as error:  # a failed join must not leave machines behind
        log.exception("cannot join %s", ", ".join(ready))
        if len(ready) == 1:
            return dict.fromkeys(ready, f"{type(error).__name__}: {error}")
    # each by itself: one of them must not block the others
    alone = await asyncio.gather(*(_join(context, {name: machine}) for name, machine in ready.items()))
    return {name: problem for problems in alone for name, problem in problems.items()}
