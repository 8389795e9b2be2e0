"""`python -m shoal.elastic`: what shoal-elastic.service runs on the controller."""

from __future__ import annotations

import asyncio
import logging
import signal
import sys
from collections.abc import Mapping
from pathlib import Path

from shoal.elastic.clock import SystemClock
from shoal.elastic.couriers import couriers
from shoal.elastic.fence import Fence
from shoal.elastic.fleet import Fleet
from shoal.elastic.inbox import Inbox
from shoal.elastic.job_starts import Starts
from shoal.elastic.join import LiveJoiner
from shoal.elastic.ledger import LEDGER, Ledger
from shoal.elastic.service import Service, alone
from shoal.elastic.settings import Settings, read_settings
from shoal.elastic.slurm import LiveSlurm
from shoal.elastic.source import Source, Unusable
from shoal.elastic.status import STATUS
from shoal.errors import ProviderError, ShoalError
from shoal.hosts.api import Target
from shoal.hosts.local import LocalHost
from shoal.providers.rental import Account, Rented, Renter
from shoal.providers.rented import renter
from shoal.roles.elastic import HOLD, SUCCEEDED
from shoal.spec.members import members
from shoal.spec.rented import rented_sets

SETTLE_SECONDS = 15.0


def service(settings: Settings, ledger: Ledger) -> Service:
    """The service as it runs for good."""
    spec, clock = settings.spec, SystemClock()
    sources = {
        name: Source(name, _renter(account), spec.cluster, ledger, clock) for name, account in settings.accounts.items()
    }

    def joined() -> Mapping[str, Rented | None]:
        """The rented nodes that take jobs, each with its machine as last listed; None where it was not yet."""
        found: dict[str, Rented | None] = {}
        for rental in ledger.live():
            machine = sources[rental.account].machine(rental) if rental.account in sources else None
            if rental.state == "joined":
                found[rental.node] = machine if machine is not None and machine.host else None
        return found

    fleet = Fleet(
        cluster=spec.cluster,
        sets=rented_sets(spec),
        sources=sources,
        ledger=ledger,
        slurm=LiveSlurm(LocalHost(Target(members(spec)[0].name))),
        joiner=LiveJoiner(settings, joined),
        clock=clock,
        public_key=settings.public_key,
        budget=spec.budget,
        fence=Fence(settings.since, Path(SUCCEEDED)),
        hold=Path(HOLD),
    )
    return Service(fleet, inbox=Inbox(), status_file=STATUS)


def _renter(account: Account) -> Renter:
    """One that cannot be made must not keep the others from giving machines back."""
    try:
        return renter(account)
    except ProviderError as error:
        logging.getLogger("shoal.elastic").error("account %s cannot be used: %s", account.name, error)
        return Unusable(error)


async def run() -> None:
    with alone(LEDGER.with_suffix(".lock")):
        await _run()


async def _run() -> None:
    ledger = Ledger.open()
    settings, here = read_settings(), LocalHost(Target("controller"))
    running = service(settings, ledger)
    work = asyncio.ensure_future(running.run())
    carrying = couriers(settings.spec, ledger, here)
    tasks = [asyncio.ensure_future(one) for one in (settle(running), Starts(here).run(), carrying.run())]
    for number in (signal.SIGTERM, signal.SIGINT):
        asyncio.get_running_loop().add_signal_handler(number, work.cancel)
    try:
        await work
    except asyncio.CancelledError:
        logging.getLogger("shoal.elastic").info("asked to end; what is rented stays, and the next service goes on")
    finally:
        for task in tasks:
            task.cancel()
        await running.close()
        ledger.close()


async def settle(running: Service) -> None:
    """See for ever that those who are gone are forgotten: their addresses may be another machine's tomorrow."""
    joiner, problem = running.fleet.joiner, ""
    assert isinstance(joiner, LiveJoiner)
    while True:
        await asyncio.sleep(SETTLE_SECONDS)
        try:
            if not running.fleet.held:
                await joiner.settle()
            problem = ""
        except Exception as error:  # the next time may be better, and nothing else waits for it
            if problem != str(error):
                logging.getLogger("shoal.elastic").warning("members that are gone are not forgotten yet: %s", error)
            problem = str(error)


def main() -> int:
    # systemd's journal has the time already.
    logging.basicConfig(level=logging.INFO, format="%(message)s", stream=sys.stderr)
    for name in ("asyncssh", "httpx", "httpcore"):
        logging.getLogger(name).setLevel(logging.WARNING)
    try:
        asyncio.run(run())
    except ShoalError as error:
        print(error, file=sys.stderr)
        return error.exit_code
    return 0


if __name__ == "__main__":
    sys.exit(main())
