"""`python -m shoal.elastic`: the entry point of shoal-elastic.service on the controller."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import os
import signal
import sys
from collections.abc import Awaitable, Callable, Collection, Mapping
from pathlib import Path

from shoal.cloud.providers import rental_provider
from shoal.cloud.providers.api import ProviderLogin, RentalProvider, RentedInstance
from shoal.cloud.rental import OrderBlock
from shoal.cloud.service.context import ServiceContext
from shoal.cloud.service.host_costs import host_prices
from shoal.cloud.service.job_file_copier import create_job_file_copier
from shoal.cloud.service.join import LiveJoiner
from shoal.cloud.service.leader import Leadership
from shoal.cloud.service.ledger import LEDGER, Ledger
from shoal.cloud.service.provider_account import AccountClient, UnavailableProvider
from shoal.cloud.service.public_report import publish_reports
from shoal.cloud.service.scheduling import SystemClock
from shoal.cloud.service.service import RentalService, single_instance
from shoal.cloud.service.settings import ServiceSettings, read_settings
from shoal.cloud.service.slurm import LiveSlurm
from shoal.cloud.service.slurm_requests import JobStarter, RequestQueue
from shoal.cloud.status_file import PUBLIC_REPORT, STATUS
from shoal.errors import ProviderError, ShoalError
from shoal.hosts.api import Host, Target
from shoal.hosts.local import LocalHost
from shoal.roles.elastic import HOLD, SUPERSEDED
from shoal.roles.rented import rented_ports
from shoal.roles.rented_images import unfit_offers
from shoal.roles.slurm_tree import find_trees
from shoal.slurm.versions import Version
from shoal.spec.cluster_record import RECORD_PATH, parse_record
from shoal.spec.members import members, rented_sets
from shoal.spec.model import Spec

CLEANUP_INTERVAL_S = 15.0
VERSION_TIMEOUT_S = 30.0
UPDATE_CHECK_INTERVAL_S = 60.0
"""The interval between attempts to update permanent hosts that failed."""


def make_service(settings: ServiceSettings, ledger: Ledger, version: Version | None = None) -> RentalService:
    """The service with its real parts. `version` is the controller's Slurm, if known."""
    spec, clock = settings.spec, SystemClock()
    accounts = {
        name: AccountClient(name, _provider(account), spec.cluster, ledger, clock)
        for name, account in settings.accounts.items()
    }

    def list_joined() -> Mapping[str, RentedInstance | None]:
        """The rented nodes that take jobs, each with its machine as last listed; None if not listed yet."""
        nodes: dict[str, RentedInstance | None] = {}
        for rental in ledger.live():
            machine = accounts[rental.account].machine(rental) if rental.account in accounts else None
            if rental.state == "joined":
                nodes[rental.node] = machine if machine is not None and machine.host else None
        return nodes

    context = ServiceContext(
        cluster=spec.cluster,
        sets=rented_sets(spec),
        accounts=accounts,
        ledger=ledger,
        slurm=LiveSlurm(LocalHost(Target(members(spec)[0].name))),
        joiner=LiveJoiner(settings, list_joined, record_host_key=ledger.record_host_key),
        clock=clock,
        public_key=settings.public_key,
        ports=rented_ports(spec),
        unfit_offers=blocks_of_unfit_offers(spec, version, tuple(find_trees())) if version else (),
        host_prices=host_prices(spec),
        budget=spec.budget,
        leadership=Leadership(settings.since, Path(SUPERSEDED)),
        pause_file=Path(HOLD),
    )
    return RentalService(context, requests=RequestQueue(), status_file=STATUS)


def blocks_of_unfit_offers(spec: Spec, version: Version, tree_archs: Collection[str] = ()) -> list[OrderBlock]:
    """What is never rented, because the Slurm of its image cannot talk to the controller's, or its CPU has none."""
    return [
        OrderBlock(
            account=unfit.choice.provider,
            type=unfit.choice.type or "",
            place=unfit.choice.zone or unfit.choice.region or "",
            market=unfit.choice.market,
            why=unfit.why,
            nodeset=unfit.nodeset,
        )
        for unfit in unfit_offers(spec, version, tree_archs)
    ]


async def controller_version(controller: Host) -> Version | None:
    """The controller's Slurm; None where it does not tell."""
    try:
        return Version.parse((await controller.run(("scontrol", "--version"), timeout=VERSION_TIMEOUT_S)).text)
    except (ShoalError, ValueError):
        return None


def _provider(account: ProviderLogin) -> RentalProvider:
    """A client that cannot be made must not keep the service from using the other accounts."""
    try:
        return rental_provider(account)
    except ProviderError as error:
        logging.getLogger("shoal.elastic").error("cannot use provider account %s: %s", account.name, error)
        return UnavailableProvider(error)


async def run() -> None:
    ledger = Ledger.open()
    settings, controller = read_settings(), LocalHost(Target("controller"))
    service = make_service(settings, ledger, await controller_version(controller))
    work = asyncio.ensure_future(service.run())
    copier = create_job_file_copier(settings.spec, ledger, controller)
    kinds = {name: account.kind for name, account in settings.accounts.items()}
    report = publish_reports(service.context, kinds, service.catalog, report_files())
    tasks = [
        asyncio.ensure_future(coroutine)
        for coroutine in (
            remove_departed(service),
            update_permanent_hosts(service),
            JobStarter(controller).run(),
            copier.run(),
            report,
        )
    ]
    for number in (signal.SIGTERM, signal.SIGINT):
        asyncio.get_running_loop().add_signal_handler(number, work.cancel)
    try:
        await work
    except asyncio.CancelledError:
        logging.getLogger("shoal.elastic").info("stopping; rented machines stay, and the next start continues")
    finally:
        for task in tasks:
            task.cancel()
        await service.close()
        ledger.close()


def report_files(record: Path = Path(RECORD_PATH)) -> list[Path]:
    """Where users read costs and offers: on the controller, and for login hosts on the share with the users' jobs."""
    try:
        jobs = parse_record(record.read_text(encoding="utf-8"), str(record)).jobs
    except (OSError, ShoalError):
        jobs = ""
    # A share of another host has the directory, but not for root of this one.
    is_writable = bool(jobs) and Path(jobs).is_dir() and os.access(jobs, os.W_OK)
    return [PUBLIC_REPORT, *([Path(jobs) / PUBLIC_REPORT.name] if is_writable else [])]


async def remove_departed(running: RentalService) -> None:
    """Remove nodes that are gone from the cluster, forever: another machine may get their addresses."""
    joiner = running.context.joiner
    assert isinstance(joiner, LiveJoiner)

    async def remove() -> None:
        await asyncio.sleep(CLEANUP_INTERVAL_S)
        if not running.context.joins_paused:
            await joiner.remove_departed()

    await repeat(remove, "remove departed nodes")


async def update_permanent_hosts(running: RentalService) -> None:
    """Give permanent hosts the names and keys of rented nodes when these change, forever."""
    joiner = running.context.joiner
    assert isinstance(joiner, LiveJoiner)

    async def update() -> None:
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(UPDATE_CHECK_INTERVAL_S):
                await joiner.members_changed.wait()
        await joiner.update_permanent_hosts()

    await repeat(update, "update permanent hosts")


async def repeat(work: Callable[[], Awaitable[None]], what: str) -> None:
    """Do something again and again, forever. An error is logged once, and nothing else waits for it."""
    problem = ""
    while True:
        try:
            await work()
            problem = ""
        except Exception as error:
            if problem != str(error):
                logging.getLogger("shoal.elastic").warning("cannot %s yet: %s", what, error)
            problem = str(error)


def main() -> int:
    # journald adds the time
    logging.basicConfig(level=logging.INFO, format="%(message)s", stream=sys.stderr)
    for name in ("httpx", "httpcore"):
        logging.getLogger(name).setLevel(logging.WARNING)
    try:
        with single_instance(LEDGER.with_suffix(".lock")):
            asyncio.run(run())
    except ShoalError as error:
        print(error, file=sys.stderr)
        return error.exit_code
    return 0


if __name__ == "__main__":
    sys.exit(main())
