"""Rented machines as the controller knows them: its ledger, and the status and control of shoal-elastic.

The ledger is read with a program of our own: it must also be readable while the service is stopped.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import time
from collections.abc import AsyncIterator, Callable, Coroutine, Iterable, Mapping, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass, field, fields
from typing import TYPE_CHECKING, Any, Literal, TypeVar

from shoal.cloud.rental import LIVE, Rental
from shoal.cloud.service.ledger import LEDGER
from shoal.cloud.status_file import PUBLIC_REPORT, STATUS, read_status
from shoal.errors import ShoalError, UsageError
from shoal.hosts.api import Host
from shoal.remote import python_command, shell_command
from shoal.remote.rental_ledger import SERVICE
from shoal.roles.elastic import HOLD, HOLD_MAX_AGE_S
from shoal.spec.members import rented_sets
from shoal.spec.model import Spec
from shoal.verbs.context import Context

if TYPE_CHECKING:
    from shoal.cloud.service.public_report import PublicReport

T = TypeVar("T")

LEDGER_TIMEOUT_S = 120.0
STATUS_TIMEOUT_S = 30.0
SYSTEMCTL_TIMEOUT_S = 120.0
STALE_STATUS_S = 180.0
"""A service whose status is older than this does not run, or hangs."""
WATCH_TIMEOUT_S = 7200
"""How long the controller waits for a disconnected operator before it starts the service again."""
NOT_LOADED = 5
"""Exit status of systemctl for a service that does not exist."""

NO_RESTART = b"stay\n"
RESTART = 'echo watching; word=$(timeout "$1" head -n 1); test "$word" = stay || exec systemctl start "$2"'
"""Starts the service again when the connection ends before `stay` was sent."""
READ_REPORT = """
cat "$1" 2> /dev/null && exit
[ -n "$2" ] && cat "$2/${1##*/}" 2> /dev/null && exit
exec ssh -o BatchMode=yes -o ConnectTimeout=10 "$3" cat "$1"
"""
"""Where a user logs in: the controller's file, its copy on the share with the users' jobs, which is root's, or the
controller's by a login from here, where the user has a key for that."""
TOUCH = 'test ! -d "${1%/*}" || touch "$1"'
"""A host without the directory has no service that could add nodes."""


@dataclass(frozen=True)
class LedgerRental(Rental):
    """A rental in the ledger whose machine exists, or may exist."""

    age: float = 0.0
    """Seconds since the provider should list the machine; 0 where it should exist: a list that lacks it may lag."""
    of_now: bool = False
    """Ordered by the running service, with the provider accounts that it has."""

    @property
    def confirmed(self) -> bool:
        """Whether the provider has confirmed that it made the machine, and not that it deleted it."""
        return self.live and bool(self.id) and not self.age


async def ledger_rentals(context: Context) -> tuple[LedgerRental, ...] | None:
    """The rentals in the ledger. None where they are unknown: no controller, no ledger."""
    try:
        async with context.controller_host() as controller:
            return await read_ledger(controller)
    except ShoalError:
        return None


async def record_ended(context: Context, ended: Iterable[tuple[Rental, float]]) -> None:
    """Record in the ledger that machines are gone, each with the seconds since.

    Where this fails the service finds out by itself, as long as it has their provider account.
    """
    ended_rentals = {rental.token: (rental.state, age_s) for rental, age_s in ended if rental.state in LIVE}
    if not ended_rentals:
        return
    with contextlib.suppress(ShoalError):
        async with context.controller_host() as controller:
            await read_ledger(controller, ended_rentals)


async def read_ledger(
    host: Host, ended: Mapping[str, Sequence[object]] | None = None
) -> tuple[LedgerRental, ...] | None:
    """The rentals in the controller's ledger, once `ended` is recorded there.

    Raises HostError where it does not answer.
    """
    command = python_command("rental_ledger", str(LEDGER), str(STATUS))
    result = await host.run(command, stdin=json.dumps({"ended": ended or {}}).encode(), timeout=LEDGER_TIMEOUT_S)
    try:
        return tuple(LedgerRental(**row) for row in json.loads(result.text)["machines"]) if result.status == 0 else None
    except (ValueError, KeyError, TypeError):
        return None


@dataclass(frozen=True)
class RentedNode:
    """A machine that is rented now for a node. A node has two while one leaves and another replaces it."""

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
    problem: str = ""
    """Why a machine that is up has not joined yet."""


_FIELDS = [field.name for field in fields(RentedNode) if field.name not in ("name", "problem")]


@dataclass(frozen=True)
class RentedView:
    """The last status of shoal-elastic, for `shoal status`."""

    problem: str = ""
    """Why nothing is known, or nothing is done."""
    accounts: Mapping[str, str] = field(default_factory=dict)
    """The provider accounts that do not answer, each with the error."""
    nodes: tuple[RentedNode, ...] = ()
    waiting: Mapping[str, str] = field(default_factory=dict)
    """Why jobs wait for nodes, by job."""
    hosts: tuple[RentedNode, ...] = ()
    """Rented hosts: the controller and login hosts."""

    @property
    def usd_hour(self) -> float:
        """What all machines together cost an hour, as far as prices are known."""
        return sum(machine.usd_hour or 0.0 for machine in (*self.nodes, *self.hosts))


async def rented_view(spec: Spec, controller: Host, clock: Callable[[], float] = time.time) -> RentedView | None:
    """Read the status that the service wrote. None where the spec rents nothing."""
    if not rented_sets(spec):
        return None
    result = await controller.run(("cat", str(STATUS)), timeout=STATUS_TIMEOUT_S)
    if result.status != 0:
        return RentedView("shoal-elastic has written no status yet; run `shoal up`")
    try:
        status = read_status(result.text)
        nodes, hosts = (
            tuple(
                RentedNode(row["node"], **{key: row[key] for key in _FIELDS}, problem=row.get("problem", ""))
                for row in rows
            )
            for rows in (status.machines.values(), status.hosts.values())
        )
    except (ValueError, KeyError, TypeError, AttributeError):
        return RentedView(f"{STATUS} is not a status of shoal-elastic; run `shoal up`")
    problem, age_s = status.problem, clock() - status.at
    if age_s > STALE_STATUS_S:
        problem = f"shoal-elastic has written no status for {age_s / 60:.0f} minutes; run `shoal up`"
    accounts = {name: text for name, text in status.accounts.items() if text}
    return RentedView(problem, accounts, nodes, dict(status.jobs), hosts)


async def read_public_report(context: Context, host: Host) -> PublicReport:
    """What an ordinary user may know of renting. Raises ShoalError where the file cannot be read."""
    from shoal.cloud.service.public_report import parse_report  # it imports httpx, which no other command needs here

    assert context.joined is not None
    record = context.joined.record
    if not any(nodeset.rented for nodeset in record.nodesets.values()):
        raise UsageError(f"cluster {context.cluster} rents no machines", hint="`shoal usage` shows what its GPUs cost")
    command = shell_command(READ_REPORT, str(PUBLIC_REPORT), record.jobs, record.controller)
    result = await host.run(command, timeout=STATUS_TIMEOUT_S, root=False)
    try:
        return parse_report(result.text)
    except ValueError:
        raise ShoalError(
            f"{host.name} cannot show what the rental service on {record.controller} publishes",
            hint=f"join the controller itself: `shoal join USER@{record.controller}`",
        ) from None


async def control_service(host: Host, verb: Literal["start", "stop"]) -> str:
    """Start or stop shoal-elastic on a host. Returns the error, if any; a host without the service is fine."""
    try:
        result = await host.run(("systemctl", verb, SERVICE), timeout=SYSTEMCTL_TIMEOUT_S)
    except ShoalError as error:
        return error.message
    if result.status in (0, NOT_LOADED):
        return ""
    return result.error_text.strip() or f"systemctl {verb} ended with status {result.status}"


@asynccontextmanager
async def restart_if_disconnected(host: Host) -> AsyncIterator[bool]:
    """Have the host start the service itself if the connection ends inside the block. Yields whether it does so."""
    try:
        watch = await host.start(shell_command(RESTART, str(WATCH_TIMEOUT_S), SERVICE))
        is_watching = bool(await watch.readline())
    except ShoalError:
        yield False
        return
    try:
        yield is_watching
    finally:
        with contextlib.suppress(ShoalError):
            await run_to_completion(watch.write(NO_RESTART))
            await run_to_completion(watch.wait())


@asynccontextmanager
async def hold_joins(host: Host) -> AsyncIterator[None]:
    """Let no machine join inside the block: it would get keys that are being replaced. It joins afterwards.

    Raises ShoalError where the host cannot hold them. If this process is killed inside, the hold expires after minutes.
    """
    await _hold(host)
    renewal = asyncio.create_task(_renew_hold(host))
    try:
        yield
    finally:
        renewal.cancel()
        with contextlib.suppress(ShoalError):
            await run_to_completion(host.run(("rm", "-f", HOLD), timeout=SYSTEMCTL_TIMEOUT_S))


async def _hold(host: Host) -> None:
    result = await host.run(shell_command(TOUCH, HOLD), timeout=SYSTEMCTL_TIMEOUT_S)
    if result.status != 0:
        raise ShoalError(
            f"{host.name}: cannot keep new rented nodes from joining: {result.error_text.strip()}",
            hint="solve that first; nothing was changed",
        )


async def _renew_hold(host: Host) -> None:
    while True:
        await asyncio.sleep(HOLD_MAX_AGE_S / 5)
        with contextlib.suppress(ShoalError):
            await _hold(host)


async def run_to_completion(work: Coroutine[Any, Any, T]) -> T:
    """Finish the work even if we are cancelled meanwhile."""
    task = asyncio.ensure_future(work)
    while not task.done():
        with contextlib.suppress(asyncio.CancelledError):
            await asyncio.shield(task)
    return task.result()
